"""OpenAI's own clients, synchronous and asynchronous, against a real server with a real model."""

from __future__ import annotations

import asyncio
import json
import math
from typing import Any

import openai
import pytest

from tests.serving.live_server import MODEL, LiveServer

QUESTION: list[Any] = [{"role": "user", "content": "Name three uses of copper."}]


def ask(client: openai.OpenAI, **options: Any) -> Any:
    given: dict[str, Any] = {"model": MODEL, "messages": QUESTION, "temperature": 0, "max_tokens": 12}
    return client.chat.completions.create(**{**given, **options})


def streamed(chunks: Any) -> str:
    return "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)


def test_models_are_listed(server: LiveServer) -> None:
    client = server.client()
    assert [model.id for model in client.models.list()] == [MODEL, f"{MODEL}@wiki", "minilm-l6-v2"]
    assert client.models.retrieve(MODEL).owned_by == "specrag"
    with pytest.raises(openai.NotFoundError) as caught:
        client.models.retrieve("gpt-4")
    assert caught.value.code == "model_not_found"


def test_a_chat_is_what_python_generates(server: LiveServer) -> None:
    answer = ask(server.client())
    expected = server.service.llm.generate(QUESTION, max_tokens=12)
    choice = answer.choices[0]
    assert choice.message.content == expected.text
    assert (choice.finish_reason, choice.message.role) == ("length", "assistant")
    usage = answer.usage
    assert (usage.prompt_tokens, usage.completion_tokens) == (expected.usage.prompt_tokens, 12)
    assert usage.total_tokens == usage.prompt_tokens + 12
    figures = answer.model_extra["specrag"]
    assert figures["method"] == "adaptive"
    assert figures["usage"]["passes"] <= 12
    assert figures["usage"]["mat"] == pytest.approx(12 / figures["usage"]["passes"])
    assert figures["usage"]["seconds"]["total"] > 0


def test_a_stream_is_the_same_text(server: LiveServer) -> None:
    client = server.client()
    whole = ask(client).choices[0].message.content
    chunks = list(ask(client, stream=True, stream_options={"include_usage": True}))
    assert streamed(chunks) == whole
    assert chunks[0].choices[0].delta.role == "assistant"
    assert [chunk.choices[0].finish_reason for chunk in chunks if chunk.choices][-1] == "length"
    assert not chunks[-1].choices
    assert chunks[-1].usage.completion_tokens == 12
    assert len({chunk.id for chunk in chunks}) == 1
    without = list(ask(client, stream=True))
    assert all(chunk.usage is None for chunk in without)
    assert all("specrag" not in chunk.model_extra for chunk in without)


def test_several_choices_are_drawn_apart_and_a_seed_repeats_them(server: LiveServer) -> None:
    client = server.client()
    options = {"n": 3, "seed": 7, "temperature": 1.0, "max_tokens": 6}
    first = [choice.message.content for choice in ask(client, **options).choices]
    assert len(set(first)) == 3
    assert [choice.message.content for choice in ask(client, **options).choices] == first
    chunks = list(ask(client, stream=True, **options))
    for index, text in enumerate(first):
        assert streamed([c for c in chunks if c.choices and c.choices[0].index == index]) == text
    other = [choice.message.content for choice in ask(client, **{**options, "seed": 8}).choices]
    assert other != first
    unseeded = {ask(client, temperature=1.0).choices[0].message.content for _ in range(3)}
    assert len(unseeded) > 1


def test_stop_texts_end_the_answer(server: LiveServer) -> None:
    client = server.client()
    whole = ask(client, max_tokens=24).choices[0].message.content
    stop = whole[12:17]
    choice = ask(client, max_tokens=24, stop=[stop, "\0"]).choices[0]
    assert choice.message.content == whole[: whole.index(stop)]
    assert choice.finish_reason == "stop"
    assert streamed(ask(client, max_tokens=24, stop=stop, stream=True)) == whole[: whole.index(stop)]


def test_log_probabilities(server: LiveServer) -> None:
    client = server.client()
    choice = ask(client, logprobs=True, top_logprobs=3).choices[0]
    assert len(choice.logprobs.content) == 12
    assert "".join(token.token for token in choice.logprobs.content) == choice.message.content
    for token in choice.logprobs.content:
        assert len(token.top_logprobs) == 3
        assert token.logprob == token.top_logprobs[0].logprob  # greedy
        assert bytes(token.bytes).decode() == token.token
    chunks = ask(client, logprobs=True, top_logprobs=3, stream=True)
    told = [
        token for chunk in chunks if chunk.choices[0].logprobs for token in chunk.choices[0].logprobs.content
    ]
    assert [token.token for token in told] == [token.token for token in choice.logprobs.content]
    assert ask(client).choices[0].logprobs is None


def test_biases_and_penalties_change_the_text(server: LiveServer) -> None:
    client = server.client()
    llm = server.service.llm
    plain = llm.generate(QUESTION, max_tokens=12)
    banned = plain.tokens[0].token
    biased = ask(client, logit_bias={str(banned): -100}).choices[0].message.content
    assert biased != plain.text
    assert biased == llm.generate(QUESTION, max_tokens=12, logit_bias={banned: -100.0}).text
    expected = llm.generate(QUESTION, max_tokens=20, presence_penalty=2.0, frequency_penalty=2.0).text
    penalised = ask(client, max_tokens=20, presence_penalty=2.0, frequency_penalty=2.0)
    assert penalised.choices[0].message.content == expected != llm.generate(QUESTION, max_tokens=20).text


def test_a_top_p_of_zero_is_greedy(server: LiveServer) -> None:
    client = server.client()
    greedy = ask(client).choices[0].message.content
    assert ask(client, temperature=1.0, top_p=0).choices[0].message.content == greedy


def test_completions_go_on_from_the_prompt_as_it_is(server: LiveServer) -> None:
    client = server.client()
    llm = server.service.llm
    prompts = ["The sky is", "Copper is a"]
    answer: Any = client.completions.create(model=MODEL, prompt=prompts, temperature=0, max_tokens=8, n=2)
    expected = [llm.generate(prompt, raw=True, max_tokens=8).text for prompt in prompts]
    assert [choice.text for choice in answer.choices] == [expected[0]] * 2 + [expected[1]] * 2
    tokens = llm.encode(prompts[0], raw=True)
    assert answer.usage.prompt_tokens == len(tokens) + len(llm.encode(prompts[1], raw=True))
    assert answer.usage.completion_tokens == 32
    by_tokens: Any = client.completions.create(
        model=MODEL, prompt=tokens, temperature=0, echo=True, extra_body={"ignore_eos": True}
    )
    assert by_tokens.choices[0].text.startswith(prompts[0] + expected[0])
    assert by_tokens.usage.completion_tokens == 16  # OpenAI's default
    parts: Any = client.completions.create(
        model=MODEL, prompt=prompts[0], temperature=0, max_tokens=8, stream=True
    )
    assert "".join(part.choices[0].text for part in parts) == expected[0]


def test_given_texts_are_scored(server: LiveServer) -> None:
    client = server.client()
    llm = server.service.llm
    whole = "Copper is a soft metal."
    answer: Any = client.completions.create(
        model=MODEL, prompt=whole, max_tokens=0, echo=True, logprobs=2, temperature=0
    )
    choice = answer.choices[0]
    assert choice.text == whole
    assert "".join(choice.logprobs.tokens) == whole
    assert choice.logprobs.token_logprobs[0] is None
    assert choice.logprobs.text_offset[1] == len(choice.logprobs.tokens[0])
    # The same by generating: what follows a prompt of all but the last token is as probable as the score says.
    tokens = llm.encode(whole, raw=True)
    for place in (1, len(tokens) - 1):
        drawn = llm.generate(
            tokens[:place], raw=True, max_tokens=1, log_probs=1, logit_bias={tokens[place]: 100.0}
        ).tokens[0]
        assert drawn.token == tokens[place]
        assert choice.logprobs.token_logprobs[place] == pytest.approx(drawn.log_prob, abs=1e-4)
    assert len(choice.logprobs.top_logprobs[2]) == 2
    longer: Any = client.completions.create(
        model=MODEL, prompt=whole, max_tokens=3, echo=True, logprobs=0, temperature=0
    ).choices[0]
    assert longer.logprobs.token_logprobs[: len(tokens)] == choice.logprobs.token_logprobs
    assert len(longer.logprobs.tokens) == len(tokens) + 3
    assert "".join(longer.logprobs.tokens) == longer.text


def test_embeddings_in_both_encodings(server: LiveServer) -> None:
    client = server.client()
    texts = ["a river in France", "the Seine", "an integer"]
    vectors = [item.embedding for item in client.embeddings.create(model="minilm-l6-v2", input=texts).data]
    plain = client.embeddings.create(model="minilm-l6-v2", input=texts, encoding_format="float").data
    assert vectors == [pytest.approx(item.embedding, abs=1e-7) for item in plain]

    def cosine(left: list[float], right: list[float]) -> float:
        return sum(a * b for a, b in zip(left, right, strict=True))

    assert [math.sqrt(cosine(vector, vector)) for vector in vectors] == pytest.approx([1, 1, 1], abs=1e-3)
    assert cosine(vectors[0], vectors[1]) > cosine(vectors[0], vectors[2])


@pytest.mark.parametrize(
    ("change", "code", "param"),
    [
        ({"model": "gpt-4"}, "model_not_found", "model"),
        ({"temperature": 3}, "invalid_value", "temperature"),
        ({"temperature": "hot"}, "invalid_value", "temperature"),
        ({"max_tokens": 10**9}, "invalid_value", "max_tokens"),
        ({"n": 0}, "invalid_value", "n"),
        ({"messages": []}, "invalid_value", "messages"),
        ({"messages": [{"role": "system", "content": "Be brief."}]}, "invalid_value", "messages"),
        ({"stop": [""]}, "invalid_value", "stop"),
        ({"logit_bias": {"x": 1}}, "invalid_value", "logit_bias"),
        ({"logit_bias": {"99999": 1}}, "invalid_value", "logit_bias"),
        ({"top_logprobs": 2}, "invalid_value", "top_logprobs"),
        ({"extra_body": {"top_logporbs": 2}}, "invalid_value", "top_logporbs"),
        ({"extra_body": {"specrag": {"method": "adaptif"}}}, "invalid_value", "specrag.method"),
        ({"extra_body": {"specrag": {"kb": "none"}}}, "invalid_value", "specrag.kb"),
        (
            {"extra_body": {"specrag": {"options": {"drafter": "model:/x"}}}},
            "invalid_value",
            "specrag.options.drafter",
        ),
        ({"messages": [{"role": "user", "content": "? " * 9000}]}, "context_length_exceeded", "prompt"),
    ],
    ids=lambda value: json.dumps(value)[:40] if isinstance(value, dict) else "",
)
def test_errors_have_openais_form(server: LiveServer, change: dict[str, Any], code: str, param: str) -> None:
    with pytest.raises(openai.APIStatusError) as caught:
        ask(server.client(), **change)
    error = caught.value
    assert error.status_code == (404 if code == "model_not_found" else 400)
    assert error.code == code
    assert error.param is not None
    assert error.param.startswith(param)
    body = error.body
    assert isinstance(body, dict)
    assert set(body) == {"message", "type", "param", "code"}
    assert "Traceback" not in str(body)
    assert "/" + "src" not in str(body)


def test_asyncio_requests_share_passes_and_equal_those_alone(server: LiveServer) -> None:
    client = server.client()
    words = ["copper", "rain", "an owl", "the Moon"]
    questions: list[list[Any]] = [[{"role": "user", "content": f"Tell me about {word}."}] for word in words]
    alone = [
        ask(client, messages=messages, max_tokens=16).choices[0].message.content for messages in questions
    ]

    async def together() -> list[str]:
        async with server.async_client() as async_client:

            async def one(messages: list[Any], stream: bool) -> str:
                answer: Any = await async_client.chat.completions.create(
                    model=MODEL, messages=messages, temperature=0, max_tokens=16, stream=stream
                )
                if not stream:
                    return str(answer.choices[0].message.content)
                return "".join([chunk.choices[0].delta.content or "" async for chunk in answer])

            tasks = [one(messages, place % 2 == 0) for place, messages in enumerate(questions)]
            return list(await asyncio.gather(*tasks))

    assert asyncio.run(together()) == alone
    server.wait_until_idle()
