"""Calls of tools as families of models write them: read from recorded texts, told by chat templates."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from specrag.models.catalog import ModelFiles, list_models
from specrag.models.grammar import GrammarVocabulary
from specrag.models.tokenizer import Tokenizer
from specrag.serving.openai.schemas import MAX_CALLS, Tool
from specrag.serving.openai.tools import FORMS, HERMES, LONGEST_CALL, CallForm, TextReader, form_of, tool_use
from tests.serving.live_server import MODEL, LiveServer, post, running_server

NAMES = ["get_weather", "get_time"]
_, MISTRAL, LLAMA = FORMS
PARIS, ROME = (
    ("get_weather", {"city": "Paris"}),
    ("get_weather", {"city": 'Rome, "the" [city] {of} hills; é'}),
)
_ROME = json.dumps(ROME[1])

# What the models write: Qwen2.5, Hermes 2 Pro; Llama 3.1, 3.2; Mistral 7B v0.3, whose marks are special tokens there.
RECORDED: dict[str, tuple[CallForm, str, str, list[Any]]] = {
    "qwen": (
        HERMES,
        '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Paris"}}\n</tool_call>',
        "",
        [PARIS],
    ),
    "qwen, behind words and two": (
        HERMES,
        'I will look.\n<tool_call>\n{"name": "get_weather", "arguments": {"city": "Paris"}}\n</tool_call>\n'
        f'<tool_call>\n{{"name": "get_weather", "arguments": {_ROME}}}\n</tool_call>',
        "I will look.",
        [PARIS, ROME],
    ),
    "qwen, without its end": (
        HERMES,
        '<tool_call>\n{"name": "get_time", "arguments": {}}',
        "",
        [("get_time", {})],
    ),
    "qwen coder, in a block of code": (
        HERMES,
        '```json\n{\n  "name": "get_weather",\n  "arguments": {\n    "city": "Paris"\n  }\n}\n```',
        "",
        [PARIS],
    ),
    "llama": (LLAMA, '{"name": "get_weather", "parameters": {"city": "Paris"}}', "", [PARIS]),
    "llama, with its mark": (
        LLAMA,
        '<|python_tag|>{"name": "get_weather", "parameters": {"city": "Paris"}}',
        "",
        [PARIS],
    ),
    "llama, two": (
        LLAMA,
        f'\n{{"type": "function", "name": "get_weather", "parameters": {_ROME}}}; '
        '{"name": "get_time", "parameters": {}}',
        "",
        [ROME, ("get_time", {})],
    ),
    "llama, behind words": (
        LLAMA,
        'I will look.<|python_tag|>{"name": "get_weather", "parameters": {"city": "Paris"}}',
        "I will look.",
        [PARIS],
    ),
    "mistral": (
        MISTRAL,
        '[TOOL_CALLS] [{"name": "get_weather", "arguments": {"city": "Paris"}}]',
        "",
        [PARIS],
    ),
    "mistral, two without the mark": (
        MISTRAL,
        f' [{{"name": "get_weather", "arguments": {_ROME}}}, {{"name": "get_time", "arguments": {{}}}}]',
        "",
        [ROME, ("get_time", {})],
    ),
    "mistral, behind words": (
        MISTRAL,
        'I will look.[TOOL_CALLS][{"name": "get_weather", "arguments": {"city": "Paris"}}]',
        "I will look.",
        [PARIS],
    ),
}

DEEP = "[" * 50_000
MALFORMED = {
    "no JSON": "{city}",
    "cut off": '{"name": "get_weather", "ARGUMENTS": {"city": "Par',
    "no object": '["get_weather", 1]',
    "no name": '{"ARGUMENTS": {}}',
    "name no text": '{"name": ["get_weather"], "ARGUMENTS": {}}',
    "unknown": '{"name": "rm", "ARGUMENTS": {}}',
    "arguments a list": '{"name": "get_weather", "ARGUMENTS": []}',
    "not a number": '{"name": "get_weather", "ARGUMENTS": {"x": NaN}}',
    "half a pair": '{"name": "get_weather", "ARGUMENTS": {"x": "\\ud800"}}',
    "long number": '{"name": "get_weather", "ARGUMENTS": {"x": 1' + "0" * 5000 + "}}",
    "words behind": '{"name": "get_weather", "ARGUMENTS": {}} and so on',
    "deep": '{"name": "get_weather", "ARGUMENTS": {"x": ' + DEEP,
    "huge": '{"name": "get_weather", "ARGUMENTS": {"x": "' + "y" * LONGEST_CALL + '"}}',
}


OTHERS = [
    "Hello [1] {x}.", "[1] says so", "  \n", "[ ", "a <", "<|pyth", "", "\n" * 99 + "{", "{", "``",
    "```json\n{}\n```", '{"name": "rm"}',
]  # fmt: skip


def read(reader: TextReader, text: str, size: int) -> str:
    parts = [reader.push(text[start : start + size]) for start in range(0, len(text), size)]
    return "".join([*parts, reader.finish()])


@pytest.mark.parametrize("name", RECORDED)
def test_recorded_calls_are_read_however_they_are_cut(name: str) -> None:
    form, text, shown, calls = RECORDED[name]
    for size in (1, 2, 5, 13, len(text)):
        reader = form.reader(NAMES)
        assert read(reader, text, size) == shown
        assert [(call.function.name, json.loads(call.function.arguments)) for call in reader.calls] == calls
        assert len({call.id for call in reader.calls}) == len(calls)


@pytest.mark.parametrize("name", MALFORMED)
@pytest.mark.parametrize("form", FORMS, ids=lambda form: form.mark)
def test_malformed_calls_stay_text(form: CallForm, name: str) -> None:
    inner = MALFORMED[name].replace("ARGUMENTS", form.arguments)
    text = f"Look: {form.mark}{form.start}{inner}{form.end}{form.closing} done"
    for size in (7, len(text)):
        reader = form.reader(NAMES)
        assert read(reader, text, size) == text
        assert not reader.calls


@pytest.mark.parametrize("form", FORMS, ids=lambda form: form.mark)
def test_more_calls_than_a_message_may_hold_stay_text(form: CallForm) -> None:
    call = f'{form.opening}{{"name": "get_time", "{form.arguments}": {{}}}}{form.closing}'
    for count in (MAX_CALLS, MAX_CALLS + 1):
        reader = form.reader(NAMES)
        left = read(reader, form.start + form.between.join([call] * count) + form.end, 1000)
        assert len(reader.calls) <= MAX_CALLS
        assert bool(left) == (count > MAX_CALLS)


@pytest.mark.parametrize("form", FORMS, ids=lambda form: form.mark)
@pytest.mark.parametrize("text", OTHERS)
def test_other_text_is_shown_as_it_is(form: CallForm, text: str) -> None:
    for size in (1, 100):
        reader = form.reader(NAMES)
        assert read(reader, text, size) == text
        assert not reader.calls


def test_text_is_shown_as_it_comes() -> None:
    for form in FORMS:
        reader = form.reader(NAMES)
        assert [reader.push(text) for text in ("Hello", " there", ".")] == ["Hello", " there", "."]


def test_marks_that_are_tokens_are_written_as_tokens(smollm2: Path) -> None:
    """Qwen's tags are added tokens, which a grammar knows by name alone."""
    tokenizer = Tokenizer(ModelFiles("smollm2", smollm2, "", ""))
    tokenizer._backend.add_tokens([HERMES.opening, HERMES.closing])
    vocabulary = GrammarVocabulary(tokenizer, tokenizer.vocab_size)
    written = (
        f'{HERMES.opening}\n{{"name": "get_weather", "arguments": {{"city": "Paris"}}}}\n{HERMES.closing}'
    )
    tokens = tokenizer.encode(written, special=False)
    assert tokenizer.vocab_size - 1 in tokens
    logits = np.zeros(tokenizer.vocab_size, dtype=np.float32)
    for choice in ("required", "auto"):
        tools = tool_use([Tool.model_validate(WEATHER)], choice, None)
        grammar = tools.grammar(vocabulary) if tools else None
        assert grammar is not None
        state = grammar.start([])
        for token in tokens:
            assert np.isfinite(grammar.apply(logits, state))[token]
            state = grammar.advance(state, token)
        allowed = np.flatnonzero(np.isfinite(grammar.apply(logits, state)))
        assert tokenizer.eos_tokens <= set(allowed.tolist())
        assert (len(allowed) == len(tokenizer.eos_tokens)) == (choice == "required")


# -- told by templates ------------------------------------------------------------------------------------------

_TURNS = (
    "{% if tools %}TOOLS {{ tools | tojson }}\n{% endif %}{% for m in messages %}<|im_start|>{{ m.role }}\n"
    "{{ m.content }}{% if m.tool_calls %}{% for c in m.tool_calls %}{% if c.id | length != 9 %}"
    "{{ raise_exception('ids have 9 letters') }}{% endif %}MARK{{ c.function.name }} "
    "{{ c.function.arguments | tojson }}{% endfor %}{% endif %}{% if m.role == 'tool' %} of {{ m.name }} "
    "{{ m.tool_call_id }}{% endif %}<|im_end|>\n{% endfor %}<|im_start|>assistant\n"
)
WEATHER: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "The weather of a city<|im_end|>",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string", "maxLength": 20}},
            "required": ["city"],
            "additionalProperties": False,
        },
    },
}
CALLED: list[dict[str, Any]] = [
    {"role": "user", "content": "What is the weather in Paris?"},
    {
        "role": "assistant",
        "content": None,
        "tool_calls": [
            {
                "id": "call_1",
                "type": "function",
                "function": {"name": "get_weather", "arguments": '{"city": "Paris<|im_end|>"}'},
            }
        ],
    },
    {"role": "tool", "tool_call_id": "call_1", "content": "17 degrees"},
]


@pytest.fixture(params=FORMS, ids=lambda form: form.mark)
def native(request: pytest.FixtureRequest, server: LiveServer, monkeypatch: pytest.MonkeyPatch) -> CallForm:
    """Give the form that the server's model is told in, by a template of its family."""
    form: CallForm = request.param
    template = _TURNS.replace("MARK", form.mark)
    monkeypatch.setattr(server.service.llm.tokenizer, "_tool_template", template)
    assert form_of(server.service.llm.tokenizer) is form
    return form


def ask(server: LiveServer, messages: list[dict[str, Any]], **options: Any) -> dict[str, Any]:
    body = {"model": MODEL, "messages": messages, "tools": [WEATHER], "temperature": 0, "max_tokens": 60}
    answer = post(server, "/v1/chat/completions", {**body, **options})
    assert answer.status_code == 200, answer.text
    told: dict[str, Any] = answer.json()
    return told


@pytest.mark.parametrize("several", [False, True])
def test_a_required_call_is_written_and_read_in_the_models_form(
    server: LiveServer, native: CallForm, several: bool
) -> None:
    (choice,) = ask(server, CALLED[:1], tool_choice="required", parallel_tool_calls=several, max_tokens=150)[
        "choices"
    ]
    calls = choice["message"]["tool_calls"]
    assert choice["finish_reason"] == "tool_calls" or several  # a small model may find no end
    assert {call["function"]["name"] for call in calls} == {"get_weather"}
    assert all(set(json.loads(call["function"]["arguments"])) == {"city"} for call in calls)


def test_the_template_tells_tools_calls_and_results(
    server: LiveServer, native: CallForm, monkeypatch: pytest.MonkeyPatch
) -> None:
    read: list[str] = []
    tokenizer = server.service.llm.tokenizer
    encode = tokenizer.encode

    def reading(text: str, *, special: bool) -> list[int]:
        read.append(text)
        return encode(text, special=special)

    monkeypatch.setattr(tokenizer, "encode", reading)
    answer = ask(server, CALLED, max_tokens=4)
    told = next(text for text in read if text.startswith("TOOLS"))
    assert json.loads(told.partition("TOOLS ")[2].partition("\n")[0])[0]["function"]["name"] == "get_weather"
    assert f'{native.mark}get_weather {{"city": "Paris< |im_end|>"}}' in told
    assert re.search(r"tool\n17 degrees of get_weather [0-9a-f]{9}<\|im_end\|>", told)
    assert told.count("<|im_end|>") == 3  # those of the turns alone
    assert answer["usage"]["prompt_tokens"] == len(encode(told, special=False))
    # One that is told nothing is asked as without tools.
    assert "TOOLS" not in told.partition("\n")[2]
    without = ask(server, CALLED[:1], tool_choice="none", max_tokens=4)
    assert without["usage"]["prompt_tokens"] < 60


def test_tools_that_are_too_long_are_refused_before_they_are_read(
    server: LiveServer, native: CallForm
) -> None:
    del native
    tool = {**WEATHER, "function": {**WEATHER["function"], "description": "x y " * 100_000}}
    body = {"model": MODEL, "messages": CALLED[:1], "tools": [tool], "max_tokens": 4}
    answer = post(server, "/v1/chat/completions", body)
    assert answer.json()["error"]["code"] == "context_length_exceeded"


@pytest.mark.parametrize("depth", [100, 400, 900, 50_000])
def test_deep_arguments_are_read_or_refused(server: LiveServer, native: CallForm, depth: int) -> None:
    del native
    called = {"name": "get_weather", "arguments": '{"city": ' + "[" * depth + "]" * depth + "}"}
    calls = [{"id": "call_1", "type": "function", "function": called}]
    messages = [CALLED[0], {**CALLED[1], "tool_calls": calls}, CALLED[2]]
    body = {"model": MODEL, "messages": messages, "tools": [WEATHER], "max_tokens": 1}
    answer = post(server, "/v1/chat/completions", body)
    assert answer.status_code == 200 if depth == 100 else answer.status_code in (200, 400)


@pytest.mark.slow
def test_qwen_calls_a_tool_and_answers_from_it(model_home: Path) -> None:
    """A model that was trained to, by its own template; it forgets the tags and writes a block of code."""
    name = "qwen2.5-coder-1.5b"
    if not any(status.name == name and status.pulled for status in list_models()):
        pytest.skip(f"{name} is not on this machine")
    asked: list[dict[str, Any]] = [{"role": "user", "content": "What is the weather in Paris right now?"}]
    with running_server(model=name) as server:
        assert form_of(server.service.llm.tokenizer) is HERMES
        for choice in ("required", "auto"):
            (answer,) = ask(server, asked, model=name, tool_choice=choice)["choices"]
            assert answer["finish_reason"] == "tool_calls"
            (call,) = answer["message"]["tool_calls"]
            assert (call["function"]["name"], json.loads(call["function"]["arguments"])) == PARIS
        (free,) = ask(server, [{"role": "user", "content": "Write a haiku."}], model=name)["choices"]
        assert free["message"]["content"]
        assert "tool_calls" not in free["message"]
