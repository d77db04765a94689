"""JSON by a schema and calls of tools: what is written can be parsed, and speculation does not change it."""

from __future__ import annotations

import json
from typing import Any

import openai
import pytest

from specrag.errors import InputError
from specrag.models.grammar import GrammarVocabulary
from specrag.serving.openai.schemas import FunctionDefinition, Tool
from specrag.serving.openai.tools import HERMES, tool_use
from tests.serving.live_server import MODEL, LiveServer

PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 20},
        "age": {"type": "integer", "minimum": 0, "maximum": 120},
        "likes": {"type": "array", "items": {"enum": ["tea", "rain", "chess"]}, "minItems": 1, "maxItems": 2},
    },
    "required": ["name", "age", "likes"],
    "additionalProperties": False,
}
WEATHER: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "The weather of a city",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string", "maxLength": 20}, "unit": {"enum": ["C", "F"]}},
            "required": ["city", "unit"],
            "additionalProperties": False,
        },
    },
}
TIME: dict[str, Any] = {"type": "function", "function": {"name": "get_time"}}


def ask(server: LiveServer, question: str, **options: Any) -> Any:
    given: dict[str, Any] = {"temperature": 0, "max_tokens": 80, **options}
    return server.client().chat.completions.create(
        model=MODEL, messages=[{"role": "user", "content": question}], **given
    )


def schema_format(schema: dict[str, Any]) -> dict[str, Any]:
    return {"type": "json_schema", "json_schema": {"name": "it", "schema": schema}}


def check_person(text: str) -> None:
    person = json.loads(text)
    assert list(person) == ["name", "age", "likes"]
    assert isinstance(person["name"], str)
    assert 0 <= person["age"] <= 120
    assert set(person["likes"]) <= {"tea", "rain", "chess"}


@pytest.mark.parametrize("seed", range(2))
def test_sampled_json_keeps_to_its_schema(server: LiveServer, seed: int) -> None:
    answer = ask(
        server, "Describe somebody.", response_format=schema_format(PERSON), temperature=1.5, seed=seed
    ).choices[0]
    assert answer.finish_reason == "stop"
    check_person(answer.message.content)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_speculation_changes_no_formed_text(server: LiveServer, temperature: float) -> None:
    question = f"Write this person again: {json.dumps({'name': 'Ada', 'age': 36, 'likes': ['tea', 'rain']})}"
    answers = [
        ask(
            server,
            question,
            response_format=schema_format(PERSON),
            temperature=temperature,
            seed=3,
            extra_body={"specrag": {"method": method}},
        )
        for method in ("plain", "prompt-lookup")
    ]
    texts = [answer.choices[0].message.content for answer in answers]
    assert texts[0] == texts[1]
    check_person(texts[0])
    assert answers[1].model_extra["specrag"]["usage"]["accepted"] > 0  # guesses were checked by the grammar


def test_any_object_and_streams(server: LiveServer) -> None:
    chunks = ask(
        server,
        'Write this again: {"name": "Ada"}',
        response_format={"type": "json_object"},
        stream=True,
        max_tokens=120,
        extra_body={"repetition_penalty": 1.05},
    )
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks)
    assert isinstance(json.loads(text), dict)


@pytest.mark.parametrize(
    "schema",
    [{"type": "objekt"}, {"$ref": "http://127.0.0.1:1/x.json"}, {"type": "string", "pattern": "(?=a)b"}],
    ids=str,
)
def test_schemas_that_no_grammar_can_follow_are_refused(server: LiveServer, schema: dict[str, Any]) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        ask(server, "?", response_format=schema_format(schema))
    assert caught.value.param == "schema"


def test_a_required_tool_is_called_with_arguments_that_fit(server: LiveServer) -> None:
    answer = ask(server, "What is the weather in Paris?", tools=[WEATHER, TIME], tool_choice="required")
    choice = answer.choices[0]
    assert choice.finish_reason == "tool_calls"
    assert not choice.message.content
    (call,) = choice.message.tool_calls
    assert call.id.startswith("call_")
    if call.function.name == "get_weather":
        arguments = json.loads(call.function.arguments)
        assert set(arguments) == {"city", "unit"}
    named = {"type": "function", "function": {"name": "get_time"}}
    (call,) = ask(server, "Hello!", tools=[WEATHER, TIME], tool_choice=named).choices[0].message.tool_calls
    assert call.function.name == "get_time"
    assert isinstance(json.loads(call.function.arguments), dict)


def test_several_calls_are_made_where_the_client_says_so(server: LiveServer) -> None:
    question = "What is the weather in Paris and in Rome? Call get_weather once for each city."
    given: dict[str, Any] = {"tools": [WEATHER], "tool_choice": "required", "max_tokens": 200}
    (one,) = ask(server, question, **given).choices[0].message.tool_calls
    counts = []
    for seed in range(8):
        choice = ask(server, question, **given, parallel_tool_calls=True, temperature=1.0, seed=seed).choices[
            0
        ]
        calls = choice.message.tool_calls
        counts.append(len(calls))
        assert {call.function.name for call in calls} == {one.function.name}
        assert all(set(json.loads(call.function.arguments)) == {"city", "unit"} for call in calls)
        assert len({call.id for call in calls}) == len(calls)
        if len(calls) > 1:
            break
    assert max(counts) >= 2


def test_a_call_is_streamed_whole(server: LiveServer) -> None:
    chunks = list(
        ask(server, "What is the weather in Paris?", tools=[WEATHER], tool_choice="required", stream=True)
    )
    calls = [call for chunk in chunks for call in chunk.choices[0].delta.tool_calls or []]
    assert [call.index for call in calls] == [0]
    assert set(json.loads(calls[0].function.arguments)) == {"city", "unit"}
    assert not any(chunk.choices[0].delta.content for chunk in chunks)
    assert chunks[-1].choices[0].finish_reason == "tool_calls"


def test_a_tool_that_need_not_be_called_leaves_the_answer_free(server: LiveServer) -> None:
    free = ask(server, "Name a river in France.", tools=[WEATHER], max_tokens=16).choices[0]
    assert free.message.content or free.message.tool_calls
    without = ask(server, "Name a river in France.", tools=[WEATHER], tool_choice="none", max_tokens=16)
    assert (
        without.choices[0].message.content
        == ask(server, "Name a river in France.", max_tokens=16).choices[0].message.content
    )


def test_a_conversation_with_a_tools_answer_goes_on(server: LiveServer) -> None:
    call = {
        "id": "call_1",
        "type": "function",
        "function": {"name": "get_weather", "arguments": '{"city": "Paris"}'},
    }
    messages: list[Any] = [
        {"role": "user", "content": "What is the weather in Paris?"},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "call_1", "content": "17 degrees and rain"},
    ]
    tools: list[Any] = [WEATHER]
    answer = server.client().chat.completions.create(
        model=MODEL, messages=messages, tools=tools, temperature=0, max_tokens=8
    )
    assert answer.choices[0].message.content
    assert answer.usage is not None
    assert answer.usage.prompt_tokens > 150  # the tools and the result were read


@pytest.mark.parametrize(
    ("options", "param"),
    [
        ({"tool_choice": "required"}, "tool_choice"),
        ({"tools": [WEATHER], "tool_choice": {"type": "function", "function": {"name": "x"}}}, "tool_choice"),
        ({"tools": [WEATHER, WEATHER]}, "tools"),
        (
            {"tools": [{"type": "function", "function": {"name": "x", "parameters": {"type": "nope"}}}]},
            "tools",
        ),
    ],
    ids=["none", "unknown", "twice", "no-schema"],
)
def test_tools_that_cannot_be_used_are_refused(
    server: LiveServer, options: dict[str, Any], param: str
) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        ask(server, "?", **options)
    assert caught.value.param == param


def test_calls_are_told_from_text_however_it_is_cut() -> None:
    written = 'Wait.\n<tool_call>\n{"name": "f", "arguments": {"a": "<b>"}}\n</tool_call>\nDone <tool'
    for size in (1, 3, 7, len(written)):
        reader = HERMES.reader(["f"])
        parts = [reader.push(written[start : start + size]) for start in range(0, len(written), size)]
        assert "".join([*parts, reader.finish()]) == "Wait.Done <tool"
        (call,) = reader.calls
        assert (call.function.name, json.loads(call.function.arguments)) == ("f", {"a": "<b>"})
    broken = HERMES.reader(["f"])
    assert broken.push("<tool_call>{no json}</tool_call>") == "<tool_call>{no json}</tool_call>"
    assert not broken.calls


def test_a_grammars_state_is_a_function_of_the_path(server: LiveServer) -> None:
    llm = server.service.llm
    grammar = GrammarVocabulary(llm.tokenizer, llm.model.vocab_size).json(PERSON)
    import numpy as np

    logits = np.zeros(llm.model.vocab_size, dtype=np.float32)
    tokens = llm.tokenizer.encode('{"name": "Ada", "age": 36, "likes": ["tea"]}', special=False)
    states = [grammar.start([])]
    masks = []
    for token in tokens:
        mask = np.isfinite(grammar.apply(logits, states[-1]))
        masks.append(mask)
        # A wrong turning leaves the state as it was.
        grammar.advance(states[-1], int(np.flatnonzero(~mask)[0]))
        states.append(grammar.advance(states[-1], token))
        assert mask[token]
    for state, mask in zip(states, masks, strict=False):
        assert (np.isfinite(grammar.apply(logits, state)) == mask).all()
    allowed = np.flatnonzero(np.isfinite(grammar.apply(logits, states[-1])))
    assert set(allowed) == llm.tokenizer.eos_tokens
    dead = grammar.advance(states[0], tokens[1])
    assert set(np.flatnonzero(np.isfinite(grammar.apply(logits, dead)))) == llm.tokenizer.eos_tokens


def test_two_tools_of_one_name_are_refused() -> None:
    tool = Tool(type="function", function=FunctionDefinition(name="f"))
    with pytest.raises(InputError, match="name of its own"):
        tool_use([tool, tool], None, None)
    assert tool_use([tool], "none", None) is None
