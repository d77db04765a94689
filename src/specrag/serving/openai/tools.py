"""Tools: how a model is told of them, which grammar its calls follow, and how the calls are read from its text.

The model's chat template tells it of the tools, in the template's form (:data:`FORMS`). If the template knows no tools,
the form of Hermes and Qwen is used. Anything that is not a well-formed call of one of the request's tools stays text.
"""

from __future__ import annotations

import json
import re
import secrets
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from specrag.errors import InputError
from specrag.models import JSON_FORM
from specrag.serving.openai.schemas import (
    MAX_CALLS,
    CalledFunction,
    FunctionDefinition,
    NamedTool,
    Tool,
    ToolCall,
)

if TYPE_CHECKING:
    from specrag.models import Grammar, GrammarVocabulary, Tokenizer

#: Most characters of a call; anything longer is text.
LONGEST_CALL = 2**18

# Characters after which it is clear whether a text is calls and nothing else.
_LONGEST_LEAD = 64


@dataclass(frozen=True, slots=True)
class CallForm:
    """How a family of models writes calls.

    Attributes:
        mark: precedes calls; the chat template holds it.
        arguments: the key of the arguments.
        opening, closing: enclose each call; without a closing, calls go on to the end of the text.
        start, between, end: before the first call, between two, and after the last one.
        begins: what a text of calls without a mark begins with, apart from white space. A mark that is a special
            token is missing in the text; Qwen2.5-Coder forgets its mark.
    """

    mark: str
    arguments: str = "arguments"
    opening: str = ""
    closing: str = ""
    start: str = ""
    between: str = ""
    end: str = ""
    begins: tuple[str, ...] = ("{",)

    def head(self, function: FunctionDefinition) -> str:
        """A call from the opening to its arguments."""
        space = "\n" if self.opening else ""
        return f'{space}{{"name": {json.dumps(function.name)}, "{self.arguments}": '

    @property
    def tail(self) -> str:
        """A call from the end of its arguments to the closing."""
        return "}\n" if self.closing else "}"

    def reader(self, names: Collection[str]) -> CallReader:
        """A reader of texts with calls.

        Args:
            names: of the functions that may be called.
        """
        marked = _Enclosed(self, names) if self.closing else _ToTheEnd(self, names)
        return _Whole(self, names, marked)


_FENCE = "```"

HERMES = CallForm(
    "<tool_call>",
    opening="<tool_call>",
    closing="</tool_call>",
    between="\n",
    begins=("{", f"{_FENCE}{{", f"{_FENCE}json{{"),
)

#: The forms of models, told apart by the marks in their chat templates.
FORMS = (
    HERMES,
    CallForm("[TOOL_CALLS]", start="[", between=", ", end="]", begins=("[{",)),
    CallForm("<|python_tag|>", arguments="parameters", between="; "),
)


def form_of(tokenizer: Tokenizer) -> CallForm | None:
    """The form in which the model's chat template tells of tools; ``None`` if it does not."""
    template = tokenizer.tool_template or ""
    return next((form for form in FORMS if form.mark in template), None)


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
        functions: those that may be called.
        required: one must be called.
        several: more than one call may be made; only if the client says so, since small models do not stop.
        form: of the calls.
        native: the model's chat template tells of the tools.
    """

    functions: tuple[FunctionDefinition, ...]
    required: bool
    several: bool
    form: CallForm = HERMES
    native: bool = False

    @property
    def names(self) -> list[str]:
        """The names of the functions."""
        return [function.name for function in self.functions]

    def described(self) -> list[dict[str, Any]]:
        """The tools for a chat template."""
        return [
            {"type": "function", "function": function.model_dump(exclude_none=True)}
            for function in self.functions
        ]

    def told(self) -> str:
        """The text for the system message, if the template has none."""
        return _TOLD.format(signatures="\n".join(json.dumps(tool) for tool in self.described()))

    def grammar(self, vocabulary: GrammarVocabulary) -> Grammar | None:
        """The grammar of what the model may write: calls, or, if none is required, any text with calls in it.

        ``None`` if any text may be written and nothing in it shows where a call begins.

        Raises:
            InputError: a tool's parameters are not a JSON schema that can be followed.
        """
        form = self.form
        if not (self.required or form.closing):
            return None
        opening, closing = _mark(form.opening, vocabulary), _mark(form.closing, vocabulary)
        calls = [f"call_{number}" for number in range(len(self.functions))]
        rules = [
            f"{rule}: {_quoted(form.head(function))} %json {_parameters(function)} {_quoted(form.tail)} {closing}"
            for rule, function in zip(calls, self.functions, strict=True)
        ]
        one = f"one: {' | '.join(calls)}"
        if self.required:
            more = f"({_quoted(form.between)} {opening} one)*" if self.several else ""
            start = f"start: {_quoted(form.start)} {opening} one {more} {_quoted(form.end)}"
        else:
            count = "*" if self.several else "?"
            # Lazy: the text ends as soon as a call is opened. Not needed if the opening is a token, which no text has.
            lazy = "" if vocabulary.is_token(form.opening) else "[lazy]"
            opened = f"called: opened one\nopened{lazy}: TEXT {opening}\nTEXT: /(.|\\n)*/"
            start = f"start: called{count} TEXT\n{opened}"
        return vocabulary.lark("\n".join(["%llguidance {}", start, one, *rules]), "tools")


def reader_of(tools: ToolUse | None) -> TextReader:
    """A reader of a request's text."""
    return TextReader() if tools is None else tools.form.reader(tools.names)


def tool_use(
    tools: Sequence[Tool] | None,
    choice: str | NamedTool | None,
    parallel: bool | None,
    native: CallForm | None = None,
) -> ToolUse | None:
    """The tools that a request asks for; ``None`` if the model is to know of none.

    Args:
        native: the form of the model's chat template, if that can tell of tools.

    Raises:
        InputError: a tool is chosen or required that is not there, or two have the same name.
    """
    functions = tuple(tool.function for tool in tools or ())
    names = [function.name for function in functions]
    for name in names:
        if names.count(name) > 1:
            raise InputError("tools", name, "give every function a name of its own")
    required, several = choice == "required", parallel is True
    if isinstance(choice, NamedTool):
        functions = tuple(function for function in functions if function.name == choice.function.name)
        if not functions:
            raise InputError("tool_choice", choice.function.name, "name one of the tools")
        required, several = True, False
    if required and not functions:
        raise InputError("tool_choice", choice, "give at least one tool")
    if not functions or choice == "none":
        return None
    return ToolUse(functions, required, several, native or HERMES, native is not None)


def written_calls(calls: Sequence[ToolCall]) -> str:
    """Calls that the assistant made earlier, as the model wrote them."""
    return "\n".join(
        f"{HERMES.opening}\n"
        f'{{"name": {json.dumps(call.function.name)}, "arguments": {call.function.arguments}}}\n'
        f"{HERMES.closing}"
        for call in calls
    )


def written_result(content: str) -> str:
    """A tool's result, in the form that the model reads."""
    return f"<tool_response>\n{content}\n</tool_response>"


def parsed_arguments(written: str) -> Any:
    """A call's arguments for a chat template: the values of the JSON, or the text if it is not JSON."""
    try:
        return _DECODER.decode(written)
    except (ValueError, RecursionError):
        return written


# -- reading ----------------------------------------------------------------------------------------------------


class TextReader:
    """Reads a text without calls.

    Attributes:
        calls: those read so far.
    """

    def __init__(self) -> None:
        self.calls: list[ToolCall] = []

    def push(self, text: str) -> str:
        """Take characters; returns those that are text and may be shown."""
        return text

    def finish(self) -> str:
        """Returns the rest of the text; calls that were cut off are shown as they are."""
        return ""


class CallReader(TextReader):
    """Separates calls from text as it is written; text that may be the beginning of a call is held back.

    Args:
        form: of the calls.
        names: of the functions that may be called.
    """

    def __init__(self, form: CallForm, names: Collection[str]) -> None:
        super().__init__()
        self.form = form
        self._names = frozenset(names)

    def _read(self, written: str) -> bool:
        """Note the calls in a piece of JSON; returns whether it is calls and nothing else."""
        if len(written) > LONGEST_CALL:
            return False
        try:
            calls = [self._call(value) for value in _values(written)]
        except (ValueError, TypeError, KeyError, RecursionError):
            return False
        if not calls or len(self.calls) + len(calls) > MAX_CALLS:
            return False
        self.calls += calls
        return True

    def _call(self, value: Any) -> ToolCall:
        name, arguments = value["name"], value[self.form.arguments]
        if name not in self._names or not isinstance(arguments, Mapping):
            raise ValueError("no call")
        told = json.dumps(arguments, ensure_ascii=False)
        told.encode()  # fails for a lone surrogate, which cannot be sent
        called = CalledFunction(name=name, arguments=told)
        return ToolCall(id=f"call_{secrets.token_hex(12)}", type="function", function=called)


class _Enclosed(CallReader):
    """Reads calls that stand between an opening and a closing."""

    def __init__(self, form: CallForm, names: Collection[str]) -> None:
        super().__init__(form, names)
        self._held = ""
        self._searched = 0
        self._inside = False
        self._behind_call = False

    def push(self, text: str) -> str:
        self._held += text
        shown = ""
        while True:
            if self._inside:
                end = self._held.find(self.form.closing, self._searched)
                if end < 0 and len(self._held) <= LONGEST_CALL:
                    self._searched = max(len(self._held) - len(self.form.closing), 0)
                    return shown
                if end < 0:
                    shown += self.form.opening
                else:
                    shown += self._close(end)
                self._inside = False
            else:
                if self._behind_call and self._held:
                    self._held, self._behind_call = self._held.removeprefix("\n"), False
                start = self._held.find(self.form.opening)
                if start < 0:
                    kept = _beginning(self._held, self.form.opening)
                    shown += self._held[: len(self._held) - kept]
                    self._held = self._held[len(self._held) - kept :]
                    return shown
                # The line end before a call belongs to it, as does the one after it.
                shown += self._held[:start].rstrip("\n")
                self._held = self._held[start + len(self.form.opening) :]
                self._inside, self._searched = True, 0

    def _close(self, end: int) -> str:
        """Take a call out of the held text; returns it as text if it is none."""
        written, behind = self._held[:end], end + len(self.form.closing)
        whole = f"{self.form.opening}{self._held[:behind]}"
        self._held, self._behind_call = self._held[behind:], True
        return "" if self._read(written) else whole

    def finish(self) -> str:
        held, self._held = self._held, ""
        if not self._inside:
            return held
        return "" if self._read(held) else f"{self.form.opening}{held}"


class _ToTheEnd(CallReader):
    """Reads calls that take up everything after a mark."""

    def __init__(self, form: CallForm, names: Collection[str]) -> None:
        super().__init__(form, names)
        self._held: list[str] = []
        self._inside = False

    def push(self, text: str) -> str:
        if self._inside:
            self._held.append(text)
            return ""
        held = "".join([*self._held, text])
        shown, mark, rest = held.partition(self.form.mark)
        if mark:
            self._inside, self._held = True, [rest]
            return shown
        kept = _beginning(held, self.form.mark)
        self._held = [held[len(held) - kept :]]
        return held[: len(held) - kept]

    def finish(self) -> str:
        held, self._held = "".join(self._held), []
        if not self._inside:
            return held
        return "" if self._read(held) else f"{self.form.mark}{held}"


class _Whole(CallReader):
    """Reads a text that is calls and nothing else, without a mark; leaves any other to another reader.

    Args:
        form: of the calls.
        names: of the functions that may be called.
        other: reads texts with marks.
    """

    def __init__(self, form: CallForm, names: Collection[str], other: CallReader) -> None:
        super().__init__(form, names)
        self._other = other
        self.calls = other.calls
        self._held: list[str] = []
        self._begun = self._left = False

    def push(self, text: str) -> str:
        if self._left:
            return self._other.push(text)
        self._held.append(text)
        if self._begun:
            return ""
        held = "".join(self._held)
        lead = "".join(held[:_LONGEST_LEAD].split())
        self._begun = lead.startswith(self.form.begins)
        if self._begun or (
            len(held) <= _LONGEST_LEAD and any(begin.startswith(lead) for begin in self.form.begins)
        ):
            return ""
        self._left = True
        return self._other.push(held)

    def finish(self) -> str:
        if self._left:
            return self._other.finish()
        held = "".join(self._held)
        if self._begun and self._read(_without_fence(held)):
            return ""
        return self._other.push(held) + self._other.finish()


def _without_fence(text: str) -> str:
    """The content of a Markdown code block; any other text as it is."""
    inner = text.strip()
    fenced = inner.startswith(_FENCE) and inner.endswith(_FENCE) and len(inner) > 2 * len(_FENCE)
    return inner.removeprefix(_FENCE).removesuffix(_FENCE).removeprefix("json") if fenced else text


def _no_number(name: str) -> Any:
    raise ValueError(f"{name} is no JSON")


_DECODER = json.JSONDecoder(parse_constant=_no_number)
_GAP = re.compile(r"[\s;]*")


def _behind_gap(written: str, place: int) -> int:
    found = _GAP.match(written, place)
    return place if found is None else found.end()


def _values(written: str) -> list[Any]:
    """The values of consecutive JSON texts, or of one list.

    Raises:
        ValueError: the text is something else.
    """
    values: list[Any] = []
    place = _behind_gap(written, 0)
    while place < len(written):
        value, place = _DECODER.raw_decode(written, place)
        values.append(value)
        place = _behind_gap(written, place)
    return values[0] if len(values) == 1 and isinstance(values[0], list) else values


def _beginning(text: str, mark: str) -> int:
    """Length of the longest suffix of a text that may be the beginning of a call."""
    for length in range(min(len(text), len(mark)), 0, -1):
        if f"\n{mark}".startswith(text[-length:]) or mark.startswith(text[-length:]):
            return length
    return 0


def _parameters(function: FunctionDefinition) -> str:
    # A function without parameters takes none (OpenAI's reference).
    nothing: dict[str, Any] = {"type": "object", "properties": {}, "additionalProperties": False}
    schema = {"type": "object", **function.parameters} if function.parameters else nothing
    return json.dumps({**schema, "x-guidance": dict(JSON_FORM)})


def _mark(text: str, vocabulary: GrammarVocabulary) -> str:
    return text if vocabulary.is_token(text) else _quoted(text)


def _quoted(text: str) -> str:
    """A text as a literal of a grammar; empty for an empty text."""
    return json.dumps(text) if text else ""
