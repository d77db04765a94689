"""Relays plain chat and plain completions through a gateway: passes the request on and streams the answer back."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import aclosing
from functools import partial
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from specrag.errors import InputError
from specrag.methods import DecodingMethod, Plan, Relayed
from specrag.models.endpoint import Call, Piece
from specrag.serving.openai.answering import Answering, Ended, respond
from specrag.serving.openai.planning import Job, Planner
from specrag.serving.openai.schemas import ChatCompletionRequest, CompletionRequest, GenerationBody
from specrag.serving.openai.writing import AnswerWriter
from specrag.speculation import Step

#: Fields that are not passed on: the gateway's own, and those that tell who asks.
_KEPT = {
    "model",
    "specrag",
    "stream",
    "stream_options",
    "user",
    "metadata",
    "store",
    "service_tier",
    "safety_identifier",
}


def is_relayed(body: GenerationBody, planner: Planner) -> bool:
    """Whether an upstream answers by itself.

    Raises:
        InputError: the method that the body names does not work through upstreams.
    """
    if planner.model.remote is None:
        return False
    return isinstance(planner.method(body), DecodingMethod) and body.extension.kb is None


def refuse_forms(body: ChatCompletionRequest) -> None:
    """Refuse fields that only plain chat passes on.

    Raises:
        InputError: the body has one of them.
    """
    formed = body.response_format is not None and body.response_format.type != "text"
    asked = {
        "response_format": formed,
        "logprobs": bool(body.logprobs),
        "tool_choice": body.tool_choice not in (None, "none", "auto"),
        "tools": bool(body.tools) and body.extension.kb is None,
    }
    for field, is_asked in asked.items():
        if is_asked:
            remedy = "leave it out; through upstreams only plain /v1/chat/completions passes it on"
            raise InputError(field, "a value", remedy)


async def relay(
    request: Request, body: ChatCompletionRequest | CompletionRequest, planner: Planner, arrived: float
) -> Response:
    """Answer through an upstream alone."""
    remote = planner.model.remote
    assert remote is not None  # is_relayed has checked it
    choices = _choices(body)
    planner.check_choices(choices)
    chat = isinstance(body, ChatCompletionRequest)
    call = Call("/chat/completions" if chat else "/completions", _forwarded(body, planner))
    stream = bool(body.stream)
    plan = Plan(partial(remote.relaying, call, choices, stream=stream), 0)
    answering = Answering(planner, body, Job(planner.method(body), [plan]), arrived)
    return await respond(request, answering, _RelayWriter(body, answering, chat=chat), stream=stream)


def _choices(body: ChatCompletionRequest | CompletionRequest) -> int:
    choices = body.n or 1
    if isinstance(body, ChatCompletionRequest) or isinstance(body.prompt, str):
        return choices
    return choices if isinstance(body.prompt[0], int) else choices * len(body.prompt)


def _forwarded(body: ChatCompletionRequest | CompletionRequest, planner: Planner) -> dict[str, Any]:
    """The fields that a client has set, within the server's limits."""
    dumped = body.model_dump(mode="json", by_alias=True, exclude_unset=True, exclude=_KEPT)
    fields = {name: value for name, value in dumped.items() if value is not None}
    most = planner.service.settings.max_output_tokens
    if most is not None:
        name = "max_completion_tokens" if "max_completion_tokens" in fields else "max_tokens"
        fields[name] = min(fields.get(name, most), most)
    return fields


class _RelayWriter(AnswerWriter):
    """Passes an upstream's answer on under the gateway's own head.

    Args:
        body: the request's.
        answering: runs it.
        chat: whether it is a chat completion.
    """

    def __init__(
        self, body: ChatCompletionRequest | CompletionRequest, answering: Answering, *, chat: bool
    ) -> None:
        prefix = "chatcmpl" if chat else "cmpl"
        objects = (
            ("chat.completion", "chat.completion.chunk") if chat else ("text_completion", "text_completion")
        )
        super().__init__(body, answering, prefix, objects)

    async def whole(self) -> dict[str, Any]:
        """The answer in one piece."""
        await self.answering.enter()
        choices: list[dict[str, Any]] = []
        async with aclosing(self.answering.emissions()) as emissions:  # type: ignore[type-var]
            async for emission in emissions:
                if isinstance(emission.value, Relayed):
                    choices = [_choice(piece) for piece in emission.value.pieces]
        return self.whole_of(sorted(choices, key=lambda choice: int(choice["index"])))

    async def chunks(self) -> AsyncIterator[dict[str, Any]]:
        """The answer in chunks, as it arrives. The chunk that ends the first choice waits for the token counts."""
        describer = self.answering.describer()
        last: dict[str, Any] | None = None
        async with aclosing(self.answering.emissions()) as emissions:  # type: ignore[type-var]
            async for emission in emissions:
                value = emission.value
                if isinstance(value, Ended):
                    if last is not None:
                        yield self.chunk_of(last, self.done(0))
                    continue
                for piece in value.pieces:
                    if piece.finish_reason and not piece.index:
                        last = _choice(piece)
                        continue
                    step = Step((), piece.text, {}, 0, 0.0)
                    event = describer.describe(step) if self.tells_events and piece.text else None
                    yield self.chunk_of(_choice(piece), event)
        for chunk in self.usage_chunks():
            yield chunk


def _choice(piece: Piece) -> dict[str, Any]:
    return {
        "index": piece.index,
        **piece.fields,
        "logprobs": piece.log_probs,
        "finish_reason": piece.finish_reason,
    }
