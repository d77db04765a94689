"""``/v1/responses`` by OpenAI's client: the texts of chat completions, their events, and what is refused."""

from __future__ import annotations

import json
import re
from typing import Any

import openai
import pytest

from tests.serving.live_server import MODEL, LiveServer, post

QUESTION = "Name three uses of copper."
WEATHER: Any = {
    "type": "function",
    "name": "get_weather",
    "parameters": {
        "type": "object",
        "properties": {"city": {"type": "string", "maxLength": 20}},
        "required": ["city"],
        "additionalProperties": False,
    },
}


def ask(server: LiveServer, **options: Any) -> Any:
    given: dict[str, Any] = {"model": MODEL, "input": QUESTION, "temperature": 0, "max_output_tokens": 12}
    return server.client().responses.create(**{**given, **options})


def chat(server: LiveServer, messages: list[Any], **options: Any) -> Any:
    return server.client().chat.completions.create(
        model=MODEL, messages=messages, temperature=0, max_tokens=12, **options
    )


def test_an_answer_is_that_of_a_chat(server: LiveServer) -> None:
    answer = ask(server, instructions="Be brief.")
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": QUESTION}]
    expected = chat(server, messages)
    assert answer.output_text == expected.choices[0].message.content
    assert (answer.status, answer.incomplete_details.reason) == ("incomplete", "max_output_tokens")
    assert answer.usage.input_tokens == expected.usage.prompt_tokens
    assert answer.usage.output_tokens == 12
    assert answer.store is False
    assert answer.model_extra["specrag"]["method"] == "adaptive"


def test_a_stream_tells_the_same_in_events(server: LiveServer) -> None:
    whole = ask(server)
    events = list(ask(server, stream=True))
    kinds = [event.type for event in events]
    assert kinds[:4] == [
        "response.created",
        "response.in_progress",
        "response.output_item.added",
        "response.content_part.added",
    ]
    assert kinds[-4:] == [
        "response.output_text.done",
        "response.content_part.done",
        "response.output_item.done",
        "response.incomplete",
    ]
    assert set(kinds[4:-4]) == {"response.output_text.delta"}
    assert "".join(event.delta for event in events[4:-4]) == whole.output_text == events[-4].text
    assert [event.sequence_number for event in events] == list(range(len(events)))
    assert events[-1].response.output_text == whole.output_text
    ended = list(ask(server, input="Say only: yes", stream=True, max_output_tokens=200))
    assert ended[-1].type == "response.completed"
    with server.client().responses.stream(
        model=MODEL, input="Say only: yes", temperature=0, max_output_tokens=200
    ) as stream:
        assert stream.get_final_response().output_text == ended[-1].response.output_text


def test_a_conversation_is_sent_back(server: LiveServer) -> None:
    first = ask(server)
    items = [{"role": "user", "content": [{"type": "input_text", "text": QUESTION}]}]
    items += [item.model_dump(exclude_none=True) for item in first.output]
    items.append({"role": "user", "content": "And of tin?"})
    messages = [
        {"role": "user", "content": QUESTION},
        {"role": "assistant", "content": first.output_text},
        {"role": "user", "content": "And of tin?"},
    ]
    assert ask(server, input=items).output_text == chat(server, messages).choices[0].message.content


@pytest.mark.parametrize("stream", [False, True])
def test_tools_are_called_and_answered(server: LiveServer, stream: bool) -> None:
    asked: list[Any] = [{"role": "user", "content": "What is the weather in Paris?"}]
    answer = ask(
        server, input=asked, tools=[WEATHER], tool_choice="required", max_output_tokens=80, stream=stream
    )
    if stream:
        events = list(answer)
        (done,) = [event for event in events if event.type == "response.function_call_arguments.done"]
        answer = events[-1].response
        assert done.arguments == answer.output[0].arguments
        assert not any(event.type == "response.output_text.delta" for event in events)
    (call,) = answer.output
    assert (answer.status, call.type, call.name) == ("completed", "function_call", "get_weather")
    assert set(json.loads(call.arguments)) == {"city"}
    asked += [
        call.model_dump(exclude_none=True),
        {"type": "function_call_output", "call_id": call.call_id, "output": "17 degrees"},
    ]
    after = ask(server, input=asked, tools=[WEATHER], max_output_tokens=4)
    assert after.usage.input_tokens > answer.usage.input_tokens
    named = ask(
        server, tools=[WEATHER], tool_choice={"type": "function", "name": "get_weather"}, max_output_tokens=80
    )
    assert named.output[0].name == "get_weather"


def test_a_schema_and_a_knowledge_base(server: LiveServer) -> None:
    schema = {
        "type": "object",
        "properties": {"yes": {"type": "boolean"}},
        "required": ["yes"],
        "additionalProperties": False,
    }
    form = {"format": {"type": "json_schema", "name": "it", "schema": schema}}
    assert set(json.loads(ask(server, text=form, max_output_tokens=40).output_text)) == {"yes"}
    question = "Who discovered radium?"
    answer = ask(server, model=f"{MODEL}@wiki", input=question, max_output_tokens=12)
    expected = chat(server, [{"role": "user", "content": question}], extra_body={"specrag": {"kb": "wiki"}})
    assert answer.output_text == expected.choices[0].message.content
    assert re.search(r" \[\d\]$", answer.output_text)
    assert answer.model_extra["specrag"]["sources"]


@pytest.mark.parametrize(
    ("options", "param"),
    [
        ({"previous_response_id": "resp_1"}, "previous_response_id"),
        ({"store": True}, "store"),
        ({"input": [{"type": "function_call", "name": "f", "arguments": "{}"}]}, "input.0.call_id"),
        ({"input": [{"type": "reasoning", "summary": []}]}, "input"),
        ({"max_output_tokens": 0}, "max_output_tokens"),
        ({"text": {"format": {"type": "json_schema", "schema": {"type": "nope"}}}}, "schema"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"background": True}, "background"),
        ({"specrag": {"events": True}}, "specrag.events"),
    ],
    ids=lambda value: str(value)[:40],
)
def test_what_cannot_be_done_is_refused(server: LiveServer, options: dict[str, Any], param: str) -> None:
    for stream in (False, True):
        body = {"model": MODEL, "input": "?", "max_output_tokens": 4, "stream": stream, **options}
        answer = post(server, "/v1/responses", body)
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, param)


def test_it_waits_for_a_place_as_others_do(server: LiveServer) -> None:
    admission = server.service.admission
    limit, admission._limit = admission._limit, 0
    admission.running += admission.places
    try:
        with pytest.raises(openai.RateLimitError):
            ask(server)
    finally:
        admission._limit = limit
        admission.running -= admission.places
    server.wait_until_idle()
