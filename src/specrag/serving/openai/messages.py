"""The messages of a chat request as a model's chat template takes them; tools, and how their calls are read.

Tools have one form for every model, the one that Hermes and Qwen were trained on: ``<tool_call>`` around a JSON object.
A grammar keeps a call's arguments to the tool's schema, so that what is called can be called.
"""

from __future__ import annotations

import json
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from specrag.errors import InputError
from specrag.methods.prompts import Message as PlainMessage
from specrag.models.grammar import JSON_FORM
from specrag.serving.openai.planning import check_text
from specrag.serving.openai.schemas import (
    CalledFunction,
    FunctionDefinition,
    Message,
    NamedTool,
    Tool,
    ToolCall,
)

if TYPE_CHECKING:
    from specrag.models.grammar import Grammar, GrammarVocabulary

OPEN, CLOSE = "<tool_call>", "</tool_call>"

_TOLD = """# Tools

You may call one or more functions to assist with the user query.

You are provided with function signatures within <tools></tools> XML tags:
<tools>
{signatures}
</tools>

For each function call, return a json object with function name and arguments within <tool_call></tool_call> XML tags:
<tool_call>
{{"name": <function-name>, "arguments": <args-json-object>}}
</tool_call>"""


@dataclass(frozen=True, slots=True)
class ToolUse:
    """The tools of a request.

    Attributes:
        functions: that may be called.
        required: one must be called.
        several: more than one call may be made; only where the client says so, since small models find no end.
    """

    functions: tuple[FunctionDefinition, ...]
    required: bool
    several: bool

    def told(self) -> str:
        """The text for the system message."""
        signatures = [
            json.dumps({"type": "function", "function": function.model_dump(exclude_none=True)})
            for function in self.functions
        ]
        return _TOLD.format(signatures="\n".join(signatures))

    def grammar(self, vocabulary: GrammarVocabulary) -> Grammar:
        """What the model may write: calls, or, where none is required, any text with calls in it.

        Raises:
            InputError: a tool's parameters are no JSON schema that can be followed.
        """
        calls = [f"call_{number}" for number in range(len(self.functions))]
        rules = [
            f"{rule}: {_quoted(_head(function))} %json {_parameters(function)} {_quoted(_TAIL)}"
            for rule, function in zip(calls, self.functions, strict=True)
        ]
        one = f"one: {' | '.join(calls)}"
        if self.required:
            more = f' ("\\n" {_quoted(OPEN)} one)*' if self.several else ""
            start = f"start: {_quoted(OPEN)} one{more}"
        else:
            # Lazy: the text ends as soon as a call is opened.
            count = "*" if self.several else "?"
            opened = f"called: opened one\nopened[lazy]: TEXT {_quoted(OPEN)}\nTEXT: /(.|\\n)*/"
            start = f"start: called{count} TEXT\n{opened}"
        return vocabulary.lark("\n".join(["%llguidance {}", start, one, *rules]), "tools")


def tool_use(
    tools: Sequence[Tool] | None, choice: str | NamedTool | None, parallel: bool | None
) -> ToolUse | None:
    """What a request asks for; ``None`` where the model is to know of no tools.

    Raises:
        InputError: a tool is chosen that is not there, or two have one name.
    """
    functions = tuple(tool.function for tool in tools or ())
    names = [function.name for function in functions]
    for name in names:
        if names.count(name) > 1:
            raise InputError("tools", name, "give every function a name of its own")
    if isinstance(choice, NamedTool):
        functions = tuple(function for function in functions if function.name == choice.function.name)
        if not functions:
            raise InputError("tool_choice", choice.function.name, "name one of the tools")
        return ToolUse(functions, True, False)
    if choice == "required" and not functions:
        raise InputError("tool_choice", choice, "give at least one tool")
    if not functions or choice == "none":
        return None
    return ToolUse(functions, choice == "required", parallel is True)


def written_calls(calls: Sequence[ToolCall]) -> str:
    """Calls that the assistant made earlier, as the model wrote them."""
    return "\n".join(
        f'{OPEN}\n{{"name": {json.dumps(call.function.name)}, "arguments": {call.function.arguments}}}\n{CLOSE}'
        for call in calls
    )


def written_result(content: str) -> str:
    """What a tool has answered, for the model."""
    return f"<tool_response>\n{content}\n</tool_response>"


class CallReader:
    """Tells calls from text as it comes.

    Text that may turn out to be the beginning of a call is held back.
    """

    def __init__(self) -> None:
        self._held = ""
        self._inside = False
        self._behind_call = False
        self.calls: list[ToolCall] = []

    def push(self, text: str) -> str:
        """Take characters; those that are text and may be shown."""
        self._held += text
        shown = ""
        while True:
            if self._inside:
                end = self._held.find(CLOSE)
                if end < 0:
                    return shown
                shown += self._read(self._held[:end], closed=True)
                self._held = self._held[end + len(CLOSE) :]
                self._inside, self._behind_call = False, True
            else:
                if self._behind_call and self._held:
                    self._held, self._behind_call = self._held.removeprefix("\n"), False
                start = self._held.find(OPEN)
                if start < 0:
                    kept = _beginning(self._held)
                    shown += self._held[: len(self._held) - kept]
                    self._held = self._held[len(self._held) - kept :]
                    return shown
                # The line end in front of a call belongs to it, as the one behind it does.
                shown += self._held[:start].rstrip("\n")
                self._held = self._held[start + len(OPEN) :]
                self._inside = True

    def finish(self) -> str:
        """The rest of the text; a call that was cut off is shown as it stands."""
        held, self._held = self._held, ""
        return self._read(held, closed=False) if self._inside else held

    def _read(self, written: str, *, closed: bool) -> str:
        """Note a call; gives back what is none."""
        whole = f"{OPEN}{written}{CLOSE if closed else ''}"
        try:
            call = json.loads(written)
            name, arguments = call["name"], call["arguments"]
        except (ValueError, TypeError, KeyError):
            return whole
        if not isinstance(name, str) or not isinstance(arguments, Mapping):
            return whole
        called = CalledFunction(name=name, arguments=json.dumps(arguments, ensure_ascii=False))
        self.calls.append(ToolCall(id=f"call_{secrets.token_hex(12)}", type="function", function=called))
        return ""


_TAIL = f"}}\n{CLOSE}"


def _head(function: FunctionDefinition) -> str:
    return f'\n{{"name": {json.dumps(function.name)}, "arguments": '


def _parameters(function: FunctionDefinition) -> str:
    # A function without parameters takes none (OpenAI's reference).
    nothing: dict[str, Any] = {"type": "object", "properties": {}, "additionalProperties": False}
    schema = {"type": "object", **function.parameters} if function.parameters else nothing
    return json.dumps({**schema, "x-guidance": dict(JSON_FORM)})


def _quoted(text: str) -> str:
    return json.dumps(text)


def _beginning(text: str) -> int:
    """Length of the longest end of a text that may be the beginning of a call."""
    for length in range(min(len(text), len(OPEN)), 0, -1):
        if ("\n" + OPEN).startswith(text[-length:]) or OPEN.startswith(text[-length:]):
            return length
    return 0


@dataclass(frozen=True, slots=True)
class Conversation:
    """A conversation.

    Attributes:
        messages: all of it, the system message first.
        question: the last message, where that is the user's; else empty.
    """

    messages: tuple[PlainMessage, ...]
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
    first: list[PlainMessage] = [{"role": "system", "content": "\n\n".join(systems)}] if systems else []
    question = spoken[-1]["content"] if messages[-1].role == "user" else ""
    return Conversation((*first, *spoken), question)


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
