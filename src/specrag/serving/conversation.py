"""The messages of a chat request as a model's chat template takes them: roles and texts, tools written out."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from specrag.errors import InputError
from specrag.methods.rag_prompt import Message as PlainMessage
from specrag.serving.asks import check_text
from specrag.serving.schemas import Message
from specrag.serving.tools import ToolUse, written_calls, written_result


@dataclass(frozen=True, slots=True)
class Conversation:
    """A conversation.

    Attributes:
        messages: all of it, the system message first.
        system: that message's text; ``None`` where there is none.
        history: what stands between it and the question.
        question: the last message, where that is the user's; else empty.
    """

    messages: tuple[PlainMessage, ...]
    system: str | None
    history: tuple[PlainMessage, ...]
    question: str


def read_conversation(messages: Sequence[Message], tools: ToolUse | None) -> Conversation:
    """The messages of a request.

    Raises:
        InputError: a message has no text, or the order makes no sense.
    """
    systems: list[str] = []
    spoken: list[PlainMessage] = []
    for place, message in enumerate(messages):
        text = check_text(f"messages.{place}.content", _text(place, message))
        if message.role in ("system", "developer"):
            systems.append(text)
        elif message.role == "tool":
            result = written_result(text)
            if spoken and spoken[-1]["role"] == "user" and messages[place - 1].role == "tool":
                # Answers to calls that were made together are one message.
                result = f"{spoken.pop()['content']}\n{result}"
            spoken.append({"role": "user", "content": result})
        else:
            spoken.append({"role": message.role, "content": text})
    if tools is not None:
        systems.append(tools.told())
    if not spoken:
        raise InputError("messages", "no user's message", "give at least one message of role user")
    system = "\n\n".join(systems) if systems else None
    first: tuple[PlainMessage, ...] = () if system is None else ({"role": "system", "content": system},)
    question = spoken[-1]["content"] if messages[-1].role == "user" else ""
    return Conversation((*first, *spoken), system, tuple(spoken[:-1]), question)


def _text(place: int, message: Message) -> str:
    content = message.content
    text = content if isinstance(content, str) else "".join(part.text for part in content or ())
    if message.tool_calls:
        if message.role != "assistant":
            raise InputError(f"messages.{place}.tool_calls", message.role, "only the assistant calls tools")
        return f"{text}\n{written_calls(message.tool_calls)}" if text else written_calls(message.tool_calls)
    if content is None and message.role != "assistant":
        raise InputError(f"messages.{place}.content", None, "give a text")
    return text
