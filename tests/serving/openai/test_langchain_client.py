"""A client that nobody here wrote: LangChain's OpenAI classes."""

from __future__ import annotations

import asyncio
import warnings
from typing import TYPE_CHECKING, Any

import openai
import pytest
from pydantic import BaseModel, Field

from tests.serving.live_server import MODEL, LiveServer

if TYPE_CHECKING:
    from langchain_openai import ChatOpenAI


class Person(BaseModel):
    """A person."""

    name: str = Field(max_length=16)
    age: int = Field(ge=0, le=99)


def make_chat(server: LiveServer, **options: Any) -> ChatOpenAI:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from langchain_openai import ChatOpenAI
    given: dict[str, Any] = {
        "model": MODEL,
        "base_url": f"{server.url}/v1",
        "api_key": "none",
        "temperature": 0,
        "max_tokens": 12,
        "max_retries": 0,
        **options,
    }
    return ChatOpenAI(**given)


@pytest.fixture(scope="module")
def chat(server: LiveServer) -> ChatOpenAI:
    """Give LangChain's class, set to the server."""
    return make_chat(server)


def test_invoking_and_streaming_give_one_text(server: LiveServer, chat: ChatOpenAI) -> None:
    question = "Name three uses of copper."
    answer = chat.invoke(question)
    expected = server.service.llm.generate(question, max_tokens=12)
    assert answer.content == expected.text
    assert answer.usage_metadata is not None
    assert answer.usage_metadata["output_tokens"] == 12
    assert "".join(str(part.content) for part in chat.stream(question)) == expected.text


def test_asynchronous_calls_share_the_server(server: LiveServer, chat: ChatOpenAI) -> None:
    question = "Name three uses of copper."
    expected = server.service.llm.generate(question, max_tokens=12)

    async def ask() -> list[Any]:
        async with openai.DefaultAsyncHttpxClient() as client:
            own = make_chat(server, http_async_client=client)
            return list(await own.abatch([question, question]))

    assert [answer.content for answer in asyncio.run(ask())] == [expected.text] * 2


def test_an_answer_is_parsed_into_a_class(server: LiveServer) -> None:
    person = make_chat(server, max_tokens=60).with_structured_output(Person, method="json_schema")
    found = person.invoke("Describe a person.")
    assert isinstance(found, Person)


def test_a_tool_is_called(chat: ChatOpenAI) -> None:
    weather: dict[str, Any] = {
        "title": "get_weather",
        "description": "The weather of a city",
        "type": "object",
        "properties": {"city": {"type": "string", "maxLength": 16}},
        "required": ["city"],
        "additionalProperties": False,
    }
    answer = chat.bind_tools([weather], tool_choice="get_weather").invoke(
        "What is the weather in Paris?", max_tokens=60
    )
    assert [call["name"] for call in answer.tool_calls] == ["get_weather"]
    assert set(answer.tool_calls[0]["args"]) == {"city"}


def test_answers_rest_on_a_knowledge_base(server: LiveServer, chat: ChatOpenAI) -> None:
    answer = chat.invoke("Who discovered radium?", extra_body={"specrag": {"kb": "wiki", "k": 1}})
    assert "Curie" in str(answer.content)
