"""Converts the messages of a chat request to the form that a model's chat template takes."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from specrag.errors import InputError
from specrag.serving.openai.planning import check_text
from specrag.serving.openai.schemas import Message, ToolCall
from specrag.serving.openai.tools import ToolUse, parsed_arguments, written_calls, written_result


@dataclass(frozen=True, slots=True)
class Conversation:
    """A conversation.

    Attributes:
        messages: all of it, the system message first; ``role`` and ``content``, and for a template that knows tools
            also the calls.
        question: the last message if that is the user's, else empty.
    """

    messages: tuple[Mapping[str, Any], ...]
    question: str

    def texts(self) -> Iterator[str]:
        """All texts that the model reads."""
        for message in self.messages:
            yield message["content"]
            yield from (call["written"] for call in message.get("tool_calls", ()))


def read_conversation(messages: Sequence[Message], tools: ToolUse | None) -> Conversation:
    """Read the messages of a request.

    Raises:
        InputError: a message has no text, or the order makes no sense.
    """
    native = tools is not None and tools.native
    systems: list[str] = []
    spoken: list[Mapping[str, Any]] = []
    for place, message in enumerate(messages):
        text = check_text(f"messages.{place}.content", _text(place, message))
        if message.role in ("system", "developer"):
            systems.append(text)
        elif native:
            spoken.append(_native(message, text, spoken))
        elif message.role == "tool":
            result = written_result(text)
            if spoken and spoken[-1]["role"] == "user" and messages[place - 1].role == "tool":
                # Results of calls that were made together form one message.
                result = f"{spoken.pop()['content']}\n{result}"
            spoken.append({"role": "user", "content": result})
        else:
            spoken.append({"role": message.role, "content": _with_calls(text, message.tool_calls)})
    if tools is not None and not native:
        systems.append(tools.told())
    if not spoken:
        raise InputError("messages", "no user's message", "give at least one message of role user")
    first: list[Mapping[str, Any]] = [{"role": "system", "content": "\n\n".join(systems)}] if systems else []
    question = spoken[-1]["content"] if messages[-1].role == "user" else ""
    return Conversation((*first, *spoken), question)


def _text(place: int, message: Message) -> str:
    content = message.content
    for number, call in enumerate(message.tool_calls or ()):
        if message.role != "assistant":
            raise InputError(f"messages.{place}.tool_calls", message.role, "only the assistant calls tools")
        where = f"messages.{place}.tool_calls.{number}"
        for name, text in (
            ("name", call.function.name),
            ("arguments", call.function.arguments),
            ("id", call.id),
        ):
            check_text(f"{where}.{name}", text)
    if content is None and message.role != "assistant":
        raise InputError(f"messages.{place}.content", None, "give a text")
    return content if isinstance(content, str) else "".join(part.text for part in content or ())


def _with_calls(text: str, calls: Sequence[ToolCall] | None) -> str:
    if not calls:
        return text
    return f"{text}\n{written_calls(calls)}" if text else written_calls(calls)


def _native(message: Message, text: str, earlier: Sequence[Mapping[str, Any]]) -> Mapping[str, Any]:
    """A message in the form of chat templates that know tools."""
    told: dict[str, Any] = {"role": message.role, "content": text}
    if message.tool_calls:
        told["tool_calls"] = [_called(call) for call in message.tool_calls]
    if message.role == "tool":
        told["tool_call_id"] = _short(message.tool_call_id or "")
        calls = [call for other in earlier for call in other.get("tool_calls", ())]
        names = {call["id"]: call["function"]["name"] for call in calls}
        told["name"] = message.name or names.get(told["tool_call_id"], "")
    return told


def _called(call: ToolCall) -> dict[str, Any]:
    function = {"name": call.function.name, "arguments": parsed_arguments(call.function.arguments)}
    # "written" is for counting what the model reads; templates ignore it.
    return {
        "id": _short(call.id),
        "type": "function",
        "function": function,
        "written": call.function.arguments,
    }


def _short(call_id: str) -> str:
    """Nine letters and digits that stand for an id: Mistral's templates refuse others."""
    return hashlib.blake2b(call_id.encode(), digest_size=5).hexdigest()[:9]
