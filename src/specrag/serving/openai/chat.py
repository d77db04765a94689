"""``POST /v1/chat/completions``: the next message of a conversation, with or without a knowledge base and tools."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from contextlib import aclosing
from dataclasses import dataclass
from typing import Any

import anyio
from fastapi import APIRouter, Request
from starlette.responses import Response

from specrag.errors import InputError
from specrag.methods import DecodingMethod
from specrag.request import Prompt, Result
from specrag.request import Request as TextRequest
from specrag.serving.openai.answering import Answering, Ended, shown_text
from specrag.serving.openai.logprobs import chat_log_probs
from specrag.serving.openai.messages import read_conversation
from specrag.serving.openai.planning import Job, Planner, form_processors
from specrag.serving.openai.relay import refuse_forms
from specrag.serving.openai.schemas import ChatCompletionRequest
from specrag.serving.openai.texts import answer
from specrag.serving.openai.tools import TextReader, ToolUse, form_of, reader_of, tool_use
from specrag.serving.openai.writing import AnswerWriter
from specrag.serving.operation.limits import JsonRoute
from specrag.speculation import Step

router = APIRouter(route_class=JsonRoute, tags=["chat"])


@router.post("/v1/chat/completions")
async def create_chat_completion(body: ChatCompletionRequest, request: Request) -> Response:
    """Answer a conversation."""
    return await answer(request, body, "messages", prepare_chat, _Writer)


@dataclass(frozen=True, slots=True)
class ChatJob(Job):
    """The texts of a request.

    Attributes:
        tools: the tools that may be called; ``None`` for none.
    """

    tools: ToolUse | None


def prepare_chat(body: ChatCompletionRequest, planner: Planner) -> ChatJob:
    """Check everything and tokenize; runs outside the event loop."""
    choices = body.n or 1
    planner.check_choices(choices)
    if body.top_logprobs is not None and not body.logprobs:
        raise InputError("top_logprobs", body.top_logprobs, "set logprobs to true")
    extension, method, tokenizer = body.extension, planner.method(body), planner.model.tokenizer
    if planner.model.remote is not None:
        refuse_forms(body)
    # Other methods read the messages and write prompts of their own.
    decodes = extension.kb is None and isinstance(method, DecodingMethod)
    form = form_of(tokenizer) if body.tools and decodes and tokenizer is not None else None
    tools = tool_use(body.tools, body.tool_choice, body.parallel_tool_calls, form)
    if extension.kb is not None and tools is not None and not tools.required:
        # Passages answer. Clients offer dozens of tools to every model, which would take the passages' room.
        tools = None
    conversation = read_conversation(body.messages, tools)
    # With passages, earlier messages are dropped if need be, so only the last one is checked.
    planner.check_sizes(
        list(conversation.texts()) if extension.kb is None else [conversation.messages[-1]["content"]]
    )
    prompt: Prompt = conversation.messages
    if tools is not None and tools.native and tokenizer is not None:
        planner.check_sizes([json.dumps(tools.described())])
        prompt = tokenizer.chat(conversation.messages, tools.described())
    processors = form_processors(planner.service, body.response_format)
    if tools is not None:
        if processors and tools.required:
            raise InputError("response_format", "a form", "leave it out where a tool must be called")
        # A text that must have a form cannot hold calls; a client that asks for both wants the form.
        tools = None if processors else tools
    grammar = None if tools is None else tools.grammar(planner.service.grammars)
    if grammar is not None:
        processors.append(grammar)
    max_tokens = body.max_completion_tokens or body.max_tokens
    options = planner.options(body, max_tokens, processors)
    if body.logprobs:
        options["log_probs"] = body.top_logprobs or 0
    if extension.kb is not None and not conversation.question.strip():
        raise InputError("messages", "no question", "end with the user's question, to be looked up")
    plans = planner.plans(extension, method, TextRequest(prompt, options), choices)
    return ChatJob(method, plans, tools)


class _Writer(AnswerWriter):
    """Answers in OpenAI's form.

    Args:
        body: the request's.
        job: its texts.
        answering: runs them.
    """

    def __init__(self, body: ChatCompletionRequest, job: ChatJob, answering: Answering) -> None:
        super().__init__(body, answering, "chatcmpl", ("chat.completion", "chat.completion.chunk"))
        self._job = job
        self._shows_log_probs = bool(body.logprobs)

    # -- in one piece -----------------------------------------------------------------------------------------

    async def whole(self) -> dict[str, Any]:
        """The answer in one piece."""
        await self.answering.enter()
        async with aclosing(self.answering.emissions()) as emissions:  # type: ignore[type-var]
            async for _ in emissions:
                pass
        return await anyio.to_thread.run_sync(self._whole)

    def _whole(self) -> dict[str, Any]:
        """Runs outside the event loop, since log-probabilities take time."""
        return self.whole_of(
            [self._choice(index, result) for index, result in enumerate(self.answering.finished)]
        )

    def _choice(self, index: int, result: Result) -> dict[str, Any]:
        reader = reader_of(self._job.tools)
        text = reader.push(result.text)
        text += reader.finish()
        message: dict[str, Any] = {"role": "assistant", "content": text, "refusal": None}
        if reader.calls:
            message["content"] = text or None
            message["tool_calls"] = [call.model_dump(exclude={"index"}) for call in reader.calls]
        return {
            "index": index,
            "message": message,
            "logprobs": self._log_probs(result.tokens),
            "finish_reason": _reason(result, reader),
        }

    # -- as it comes ------------------------------------------------------------------------------------------

    async def chunks(self) -> AsyncIterator[dict[str, Any]]:
        """The answer in chunks, as it is written."""
        count = len(self._job.plans)
        describers = [self.answering.describer() for _ in range(count)]
        readers = [reader_of(self._job.tools) for _ in range(count)]
        told = [0] * count
        begun: set[int] = set()
        async with aclosing(self.answering.emissions()) as emissions:  # type: ignore[type-var]
            async for emission in emissions:
                index, value = emission.index, emission.value
                if index not in begun:
                    begun.add(index)
                    yield self._chunk(index, {"role": "assistant", "content": "", "refusal": None})
                reader = readers[index]
                if isinstance(value, Ended):
                    rest = reader.finish()
                    if rest:
                        yield self._chunk(index, {"content": rest})
                    for chunk in self._calls(index, reader, told):
                        yield chunk
                    yield self._last(index, reader)
                    continue
                text = reader.push(shown_text(value))
                event = describers[index].describe(value) if self.tells_events else None
                log_probs = self._log_probs(value.tokens) if isinstance(value, Step) else None
                if text or event or log_probs:
                    delta = {"content": text} if text else {}
                    yield self._chunk(index, delta, log_probs=log_probs, event=event)
                for chunk in self._calls(index, reader, told):
                    yield chunk
        for chunk in self.usage_chunks():
            yield chunk

    def _calls(self, index: int, reader: TextReader, told: list[int]) -> list[dict[str, Any]]:
        """Chunks for complete calls that have not been sent yet."""
        chunks = []
        for number in range(told[index], len(reader.calls)):
            call = reader.calls[number].model_copy(update={"index": number})
            chunks.append(self._chunk(index, {"tool_calls": [call.model_dump()]}))
        told[index] = len(reader.calls)
        return chunks

    def _last(self, index: int, reader: TextReader) -> dict[str, Any]:
        reason = _reason(self.answering.result(index), reader)
        return self._chunk(index, {}, reason=reason, event=self.done(index))

    def _chunk(
        self,
        index: int,
        delta: dict[str, Any],
        *,
        reason: str | None = None,
        log_probs: dict[str, Any] | None = None,
        event: dict[str, Any] | None = None,
    ) -> dict[str, Any]:
        choice = {"index": index, "delta": delta, "logprobs": log_probs, "finish_reason": reason}
        return self.chunk_of(choice, event)

    def _log_probs(self, tokens: Any) -> dict[str, Any] | None:
        if not self._shows_log_probs:
            return None
        shown = self.names.shown(tokens, self.ends)
        return chat_log_probs(self.names, shown) if shown or self.answering.finished else None


def _reason(result: Result, reader: TextReader) -> str:
    return "tool_calls" if reader.calls and result.finish_reason == "stop" else result.finish_reason
