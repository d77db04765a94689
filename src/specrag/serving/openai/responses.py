"""``POST /v1/responses``: a chat completion in OpenAI's newer form; nothing is kept between requests."""

from __future__ import annotations

import time
import uuid
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import aclosing
from typing import Any, Literal

from fastapi import APIRouter, Request
from starlette.responses import Response

from specrag.errors import InputError
from specrag.serving.openai.answering import Answering, Ended, shown_text
from specrag.serving.openai.chat import ChatJob, prepare_chat
from specrag.serving.openai.planning import Planner
from specrag.serving.openai.schemas import (
    MAX_CALLS,
    CalledFunction,
    ChatCompletionRequest,
    FunctionDefinition,
    JsonSchema,
    Message,
    NamedFunction,
    NamedResponseTool,
    NamedTool,
    ResponseFormat,
    ResponseItem,
    ResponseRequest,
    Tool,
    ToolCall,
)
from specrag.serving.openai.texts import answer
from specrag.serving.openai.tools import reader_of
from specrag.serving.openai.writing import add_up
from specrag.serving.operation.limits import JsonRoute

router = APIRouter(route_class=JsonRoute, tags=["responses"])

#: Names of chat completion fields in this API, for errors.
_FIELDS = {
    "messages": "input",
    "max_tokens": "max_output_tokens",
    "response_format": "text.format",
    "response_format.json_schema": "text.format.schema",
}


@router.post("/v1/responses")
async def create_response(body: ResponseRequest, request: Request) -> Response:
    """Answer an input. Nothing is kept: send the whole conversation each time."""
    return await answer(request, body, "input", _prepare, _Writer)


def _prepare(body: ResponseRequest, planner: Planner) -> ChatJob:
    """Check everything and tokenize, outside the event loop; errors name the fields of this API."""
    try:
        return prepare_chat(_as_chat(body), planner)
    except InputError as error:
        first = error.field.partition(".")[0]
        field = _FIELDS.get(error.field, _FIELDS.get(first, error.field))
        raise type(error)(field, error.value, error.remedy) from None


# -- what is asked ----------------------------------------------------------------------------------------------


def _as_chat(body: ResponseRequest) -> ChatCompletionRequest:
    """Convert the body to a chat completion.

    Raises:
        InputError: the body relies on stored responses, asks for events, or has no message.
    """
    if body.previous_response_id is not None:
        remedy = "leave it out and send the whole conversation as input; responses are not kept here"
        raise InputError("previous_response_id", body.previous_response_id, remedy)
    if body.store:
        raise InputError("store", True, "set it to false; responses are not kept here")
    if body.extension.events:
        raise InputError("specrag.events", True, "leave it out; /v1/chat/completions tells them")
    messages = [] if body.instructions is None else [Message(role="system", content=body.instructions)]
    if isinstance(body.input, str):
        messages.append(Message(role="user", content=body.input))
    else:
        messages += _messages(body.input)
    if not messages:
        raise InputError("input", "no message", "give at least one message of role user")
    return ChatCompletionRequest(
        model=body.model,
        messages=messages,
        max_completion_tokens=body.max_output_tokens,
        temperature=body.temperature,
        top_p=body.top_p,
        stream=body.stream,
        tools=[Tool(type="function", function=_function(tool)) for tool in body.tools or ()],
        tool_choice=_choice(body),
        parallel_tool_calls=body.parallel_tool_calls,
        response_format=_format(body),
        specrag=body.specrag,
    )


def _choice(body: ResponseRequest) -> Literal["none", "auto", "required"] | NamedTool | None:
    if isinstance(body.tool_choice, NamedResponseTool):
        return NamedTool(type="function", function=NamedFunction(name=body.tool_choice.name))
    return body.tool_choice


def _function(tool: FunctionDefinition) -> FunctionDefinition:
    return FunctionDefinition(**{name: getattr(tool, name) for name in FunctionDefinition.model_fields})


def _format(body: ResponseRequest) -> ResponseFormat | None:
    given = body.text.format if body.text is not None else None
    if given is None:
        return None
    if given.type != "json_schema":
        return ResponseFormat(type=given.type)
    return ResponseFormat(
        type=given.type, json_schema=JsonSchema(name=given.name or "schema", schema=given.schema_)
    )


def _messages(items: Sequence[ResponseItem]) -> list[Message]:
    """Convert the items of an input to messages; consecutive calls form one message.

    Raises:
        InputError: an item lacks a field.
    """
    messages: list[Message] = []
    for place, item in enumerate(items):

        def needed(name: str, item: ResponseItem = item, place: int = place) -> Any:
            value = getattr(item, name)
            if value is None:
                raise InputError(f"input.{place}.{name}", None, f"a {item.type} needs it")
            return value

        if item.type == "message":
            messages.append(Message(role=needed("role"), content=_text(needed("content"))))
        elif item.type == "function_call":
            function = CalledFunction(name=needed("name"), arguments=needed("arguments"))
            call = ToolCall(id=needed("call_id"), type="function", function=function)
            before = messages[-1].tool_calls if messages else None
            if before and len(before) < MAX_CALLS:
                before.append(call)
            else:
                messages.append(Message(role="assistant", tool_calls=[call]))
        elif item.type == "function_call_output":
            content = _text(needed("output"))
            messages.append(Message(role="tool", content=content, tool_call_id=needed("call_id")))
        # Reasoning items are not read again.
    return messages


def _text(content: str | list[Any]) -> str:
    return content if isinstance(content, str) else "".join(part.text for part in content)


# -- what is answered -------------------------------------------------------------------------------------------


class _Writer:
    """Answers in the form of responses.

    Args:
        body: the request's.
        job: its text.
        answering: runs it.
    """

    def __init__(self, body: ResponseRequest, job: ChatJob, answering: Answering) -> None:
        self._answering = answering
        self._reader = reader_of(job.tools)
        self._told = 0
        self._message_id = f"msg_{uuid.uuid4().hex}"
        self._head = {
            "id": f"resp_{uuid.uuid4().hex}",
            "object": "response",
            "created_at": int(time.time()),
            "model": body.model,
            "instructions": body.instructions,
            "max_output_tokens": body.max_output_tokens,
            "temperature": body.temperature,
            "top_p": body.top_p,
            "parallel_tool_calls": body.parallel_tool_calls is True,
            "tool_choice": "auto" if body.tool_choice is None else _dumped(body.tool_choice),
            "tools": [_dumped(tool) for tool in body.tools or ()],
            "text": {"format": {"type": "text"}} if body.text is None else _dumped(body.text),
            "metadata": body.metadata or {},
            "previous_response_id": None,
            "store": False,
            "error": None,
        }

    async def whole(self) -> dict[str, Any]:
        """The answer in one piece."""
        await self._answering.enter()
        async with aclosing(self._answering.emissions()) as emissions:  # type: ignore[type-var]
            async for _ in emissions:
                pass
        text = self._reader.push(self._answering.result(0).text)
        return self._ended(text + self._reader.finish())

    async def chunks(self) -> AsyncIterator[dict[str, Any]]:
        """The answer as events, as it is written."""
        begun = {
            **self._head,
            "status": "in_progress",
            "output": [],
            "incomplete_details": None,
            "usage": None,
        }
        yield self._event("response.created", response=begun)
        yield self._event("response.in_progress", response=begun)
        shown = ""
        async with aclosing(self._answering.emissions()) as emissions:  # type: ignore[type-var]
            async for emission in emissions:
                value = emission.value
                text = (
                    self._reader.finish()
                    if isinstance(value, Ended)
                    else self._reader.push(shown_text(value))
                )
                if text and not shown:
                    for event in self._opening():
                        yield event
                if text:
                    yield self._part("response.output_text.delta", delta=text, logprobs=[])
                shown += text
        ended = self._ended(shown)
        for event in self._closing(ended["output"], opened=bool(shown)):
            yield event
        yield self._event(f"response.{ended['status']}", response=ended)

    def _opening(self) -> Iterator[dict[str, Any]]:
        item = self._message("", "in_progress")
        part, item["content"] = item["content"][0], []
        yield self._event("response.output_item.added", output_index=0, item=item)
        yield self._part("response.content_part.added", part=part)

    def _closing(self, output: list[dict[str, Any]], *, opened: bool) -> Iterator[dict[str, Any]]:
        """The events that end the message, and those of the calls after it."""
        for index, item in enumerate(output):
            if item["type"] == "message":
                if not opened:  # it is empty
                    yield from self._opening()
                part = item["content"][0]
                yield self._part("response.output_text.done", text=part["text"], logprobs=[])
                yield self._part("response.content_part.done", part=part)
            else:
                begun = {**item, "arguments": "", "status": "in_progress"}
                yield self._event("response.output_item.added", output_index=index, item=begun)
                place = {"item_id": item["id"], "output_index": index}
                written = item["arguments"]
                yield self._event("response.function_call_arguments.delta", **place, delta=written)
                yield self._event(
                    "response.function_call_arguments.done", **place, name=item["name"], arguments=written
                )
            yield self._event("response.output_item.done", output_index=index, item=item)

    def _ended(self, text: str) -> dict[str, Any]:
        """The whole response, once the text has ended."""
        result = self._answering.result(0)
        cut = result.finish_reason == "length"
        status = "incomplete" if cut else "completed"
        output = [
            {
                "type": "function_call",
                "id": f"fc_{uuid.uuid4().hex}",
                "call_id": call.id,
                "name": call.function.name,
                "arguments": call.function.arguments,
                "status": "completed",
            }
            for call in self._reader.calls
        ]
        if text or not output:
            output.insert(0, self._message(text, status))
        usage = add_up([result], 1)
        return {
            **self._head,
            "status": status,
            "incomplete_details": {"reason": "max_output_tokens"} if cut else None,
            "output": output,
            "usage": {
                "input_tokens": usage["prompt_tokens"],
                "input_tokens_details": {"cached_tokens": usage["prompt_tokens_details"]["cached_tokens"]},
                "output_tokens": usage["completion_tokens"],
                "output_tokens_details": {"reasoning_tokens": 0},
                "total_tokens": usage["total_tokens"],
            },
            "specrag": self._answering.summary(),
        }

    def _message(self, text: str, status: str) -> dict[str, Any]:
        part = {"type": "output_text", "text": text, "annotations": [], "logprobs": []}
        head = {"type": "message", "id": self._message_id, "role": "assistant"}
        return {**head, "status": status, "content": [part]}

    def _part(self, kind: str, **more: Any) -> dict[str, Any]:
        return self._event(kind, item_id=self._message_id, output_index=0, content_index=0, **more)

    def _event(self, kind: str, **more: Any) -> dict[str, Any]:
        number, self._told = self._told, self._told + 1
        return {"type": kind, "sequence_number": number, **more}


def _dumped(value: Any) -> Any:
    return (
        value if isinstance(value, str) else value.model_dump(mode="json", by_alias=True, exclude_none=True)
    )
