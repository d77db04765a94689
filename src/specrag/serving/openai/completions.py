"""``POST /v1/completions``: texts that continue a prompt as it is."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import anyio
from fastapi import APIRouter, Request
from starlette.responses import Response

from specrag.errors import InputError
from specrag.methods import Needs, Plan
from specrag.request import Request as TextRequest
from specrag.request import Result
from specrag.serving.openai.answering import Answering, Ended, shown_text
from specrag.serving.openai.logprobs import PromptScored, completion_log_probs, scoring
from specrag.serving.openai.planning import Job, Planner, check_text, form_processors
from specrag.serving.openai.schemas import CompletionRequest
from specrag.serving.openai.texts import answer
from specrag.serving.openai.writing import AnswerWriter
from specrag.serving.operation.limits import JsonRoute
from specrag.speculation import DecodedToken, Step

router = APIRouter(route_class=JsonRoute, tags=["completions"])

#: OpenAI's default.
DEFAULT_MAX_TOKENS = 16

# Tokens of a scored prompt in one chunk of a stream; formatting them holds up other requests for a few milliseconds.
_PIECE = 128


@router.post("/v1/completions")
async def create_completion(body: CompletionRequest, request: Request) -> Response:
    """Go on from one or several prompts."""
    return await answer(request, body, "prompt", _prepare, _Writer)


@dataclass(frozen=True, slots=True)
class _Job(Job):
    """The texts of a request.

    Attributes:
        prompts: the text of each choice's prompt, for requests that ask for an echo.
    """

    prompts: list[str]


def _prepare(body: CompletionRequest, planner: Planner) -> _Job:
    """Check everything and tokenize; runs outside the event loop."""
    if body.suffix is not None:
        raise InputError("suffix", body.suffix[:20], "leave it out; this model only goes on from a prompt")
    choices = body.n or 1
    if planner.model.remote is not None:
        raise InputError("specrag.kb", body.extension.kb, "ask POST /v1/chat/completions")
    if body.best_of is not None and body.best_of != choices:
        raise InputError("best_of", body.best_of, "leave it out or give it n's value")
    prompts = _prompts(body.prompt)
    planner.check_choices(len(prompts) * choices)
    max_tokens = DEFAULT_MAX_TOKENS if body.max_tokens is None else body.max_tokens
    llm = planner.service.llm
    processors = form_processors(planner.service, body.response_format)
    options = planner.options(body, max(max_tokens, 1), processors)
    extension = body.extension
    method = planner.method(body)
    # A question is asked as text; otherwise token ids are continued as they are.
    asks = extension.kb is not None or Needs.CONTEXT in method.needs
    if Needs.CONTEXT not in method.needs:
        options["raw"] = True
    if body.logprobs is not None:
        options["log_probs"] = body.logprobs
    plans: list[Plan] = []
    texts: list[str] = []
    for prompt in prompts:
        tokens = _tokens(planner, prompt)
        text = prompt if isinstance(prompt, str) else llm.tokenizer.decode(tokens)
        asked = TextRequest(text if asks or isinstance(prompt, str) else tokens, options)
        top = body.logprobs or 0
        if max_tokens == 0:
            planner.check_length(asked)
            made = [Plan(partial(scoring, llm, tokens, top, None), len(tokens) + 1)] * choices
        else:
            made = planner.plans(extension, method, asked, choices)
            if body.echo and body.logprobs is not None and extension.kb is None:
                made = [replace(plan, begin=partial(scoring, llm, tokens, top, plan.begin)) for plan in made]
        plans += made
        texts += [text] * choices
    return _Job(method, plans, texts)


def _prompts(prompt: str | list[str] | list[int] | list[list[int]]) -> Sequence[str | list[int]]:
    if isinstance(prompt, str):
        return [prompt]
    if all(isinstance(part, int) for part in prompt):
        return [prompt]  # type: ignore[list-item]
    return prompt  # type: ignore[return-value]


def _tokens(planner: Planner, prompt: str | list[int]) -> list[int]:
    llm = planner.service.llm
    if isinstance(prompt, str):
        planner.check_sizes([check_text("prompt", prompt)])
        return llm.encode(prompt, raw=True)
    known = llm.model.vocab_size
    for token in prompt:
        if not 0 <= token < known:
            raise InputError("prompt", token, f"give token ids from 0 to {known - 1}")
    return prompt


class _Writer(AnswerWriter):
    """Answers in OpenAI's form.

    Args:
        body: the request's.
        job: its texts.
        answering: runs them.
    """

    def __init__(self, body: CompletionRequest, job: _Job, answering: Answering) -> None:
        super().__init__(body, answering, "cmpl", ("text_completion", "text_completion"))
        self._job = job
        self._echo = bool(body.echo)
        self._shows_log_probs = body.logprobs is not None
        self._shows_ids = bool(body.return_token_ids)

    async def whole(self) -> dict[str, Any]:
        """The answer in one piece."""
        scored: dict[int, PromptScored] = {}
        await self.answering.enter()
        async with aclosing(self.answering.emissions()) as emissions:  # type: ignore[type-var]
            async for emission in emissions:
                if isinstance(emission.value, PromptScored):
                    scored[emission.index] = emission.value
        return await anyio.to_thread.run_sync(self._whole, scored)

    def _whole(self, scored: Mapping[int, PromptScored]) -> dict[str, Any]:
        """Runs outside the event loop: sixteen prompts of 2,000 tokens with their alternatives take a second."""
        results = self.answering.finished
        return self.whole_of(
            [self._choice(index, result, scored.get(index)) for index, result in enumerate(results)]
        )

    async def chunks(self) -> AsyncIterator[dict[str, Any]]:
        """The answer in chunks, as it is written."""
        count = len(self._job.plans)
        describers = [self.answering.describer() for _ in range(count)]
        offsets = [0] * count
        if self._echo and not self._shows_log_probs:
            for index, prompt in enumerate(self._job.prompts):
                yield self._chunk(index, prompt, offsets=offsets)
        async with aclosing(self.answering.emissions()) as emissions:  # type: ignore[type-var]
            async for emission in emissions:
                index, value = emission.index, emission.value
                if isinstance(value, Ended):
                    reason = self.answering.result(index).finish_reason
                    yield self._chunk(index, "", reason=reason, event=self.done(index), offsets=offsets)
                elif isinstance(value, PromptScored):
                    for start in range(0, len(value), _PIECE):
                        piece = value.described(start, start + _PIECE)
                        text = "" if start else self._job.prompts[index]
                        yield self._chunk(index, text, piece, offsets=offsets, prompt=True)
                        await asyncio.sleep(0)  # gives other requests a turn
                else:
                    text = shown_text(value)
                    event = describers[index].describe(value) if self.tells_events else None
                    tokens = value.tokens if isinstance(value, Step) else ()
                    if text or event or (tokens and (self._shows_log_probs or self._shows_ids)):
                        yield self._chunk(index, text, tokens, event=event, offsets=offsets)
        for chunk in self.usage_chunks():
            yield chunk

    def _choice(self, index: int, result: Result, scored: PromptScored | None) -> dict[str, Any]:
        text, tokens, log_probs = result.text, list(result.tokens), None
        if self._echo:
            text = self._job.prompts[index] + text
        if self._shows_log_probs:
            shown = self.names.shown(tokens, self.ends)
            prompt = [] if scored is None else scored.described(0, len(scored))
            log_probs = completion_log_probs(self.names, [*prompt, *shown], 0, from_start=scored is not None)
        return {
            "index": index,
            "text": text,
            "logprobs": log_probs,
            "finish_reason": result.finish_reason,
            **self._ids(tokens),
        }

    def _ids(self, tokens: Sequence[DecodedToken]) -> dict[str, Any]:
        return {"token_ids": [token.token for token in tokens]} if self._shows_ids else {}

    def _chunk(
        self,
        index: int,
        text: str,
        tokens: Sequence[DecodedToken] = (),
        *,
        offsets: list[int],
        reason: str | None = None,
        event: dict[str, Any] | None = None,
        prompt: bool = False,
    ) -> dict[str, Any]:
        log_probs = None
        if self._shows_log_probs and tokens:
            shown = list(tokens) if prompt else self.names.shown(tokens, self.ends)
            first = prompt and not offsets[index]
            log_probs = completion_log_probs(self.names, shown, offsets[index], from_start=first)
            offsets[index] += sum(len(name) for name in log_probs["tokens"])
        choice = {
            "index": index,
            "text": text,
            "logprobs": log_probs,
            "finish_reason": reason,
            **self._ids(() if prompt else tokens),
        }
        return self.chunk_of(choice, event)
