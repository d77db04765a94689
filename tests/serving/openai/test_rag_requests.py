"""Answers from a knowledge base by the request field ``specrag``."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import replace
from typing import Any
from unittest.mock import ANY

import httpx
import openai
import pytest

from specrag.methods.citations import find_citations, without_citations
from specrag.methods.decoding import decoder_names
from specrag.methods.plain import Plain
from specrag.methods.registry import method_names
from specrag.request import ABSTENTION
from specrag.retrieval.knowledge_base import KnowledgeBase
from tests.methods.rag_toys import standard
from tests.methods.run import answer_of
from tests.serving.live_server import MODEL, LiveServer, post

QUESTION = "Who discovered radium?"


def body(question: str = QUESTION, **specrag: Any) -> dict[str, Any]:
    return {
        "model": MODEL,
        "messages": [{"role": "user", "content": question}],
        "max_tokens": 16,
        "specrag": {"kb": "wiki", "k": 2, **specrag},
    }


@pytest.fixture(scope="module")
def answer(server: LiveServer) -> dict[str, Any]:
    """Give what the plain question is answered."""
    return ask(server)


def ask(server: LiveServer, question: str = QUESTION, **specrag: Any) -> dict[str, Any]:
    response = post(server, "/v1/chat/completions", body(question, **specrag))
    assert response.status_code == 200, response.text
    answer: dict[str, Any] = response.json()
    return answer


def events(server: LiveServer, **specrag: Any) -> list[dict[str, Any]]:
    response = post(server, "/v1/chat/completions", {**body(**specrag), "stream": True})
    assert response.headers["content-type"].startswith("text/event-stream")
    lines = [line.removeprefix("data: ") for line in response.text.split("\n\n") if line]
    assert lines.pop() == "[DONE]"
    return [json.loads(line) for line in lines]


def text_of(chunks: list[dict[str, Any]]) -> str:
    return "".join(chunk["choices"][0]["delta"].get("content") or "" for chunk in chunks)


def test_an_answer_is_standard_rags_with_its_sources(server: LiveServer, answer: dict[str, Any]) -> None:
    base = server.service.knowledge_bases.get("wiki")
    assert isinstance(base, KnowledgeBase)
    expected = answer_of(standard(server.service.llm, base, k=2), QUESTION, max_tokens=16)
    assert answer["choices"][0]["message"]["content"] == expected.text
    figures = answer["specrag"]
    assert [source["number"] for source in figures["sources"]] == [1, 2]
    for source, wanted in zip(figures["sources"], expected.sources, strict=True):
        assert source["text"] == wanted.passage.text
        assert source["title"] == wanted.passage.title
        assert source["place"] == wanted.passage.place
        assert source["cited"] == wanted.cited
        assert source["support"] == pytest.approx(wanted.support)
        assert source["score"] == pytest.approx(wanted.score)
    assert figures["usage"]["retrieved"] == 2
    assert figures["usage"]["seconds"]["retrieval"] > 0
    assert figures["abstained"] is False


@pytest.mark.parametrize(
    ("method", "options", "drafts"),
    [("standard-rag", {"decoder": "plain"}, False), ("plain", {}, False), ("prompt-lookup", {}, True)],
)
def test_lossless_methods_give_one_answer(
    server: LiveServer, answer: dict[str, Any], method: str, options: dict[str, Any], drafts: bool
) -> None:
    other = ask(server, method=method, options=options)
    assert other["choices"][0]["message"]["content"] == answer["choices"][0]["message"]["content"]
    assert other["specrag"]["method"] == method
    assert bool(other["specrag"]["usage"]["drafted"]) == drafts


def test_the_stream_tells_sources_first_then_rounds_then_figures(
    server: LiveServer, answer: dict[str, Any]
) -> None:
    chunks = events(server, events=True)
    told = [chunk["specrag"] for chunk in chunks if "specrag" in chunk]
    assert [event["event"] for event in told if event["event"] != "step"] == ["sources", "done"]
    assert told[0]["event"] == "sources"
    assert len(told[0]["sources"]) == 2
    steps = [event for event in told if event["event"] == "step"]
    text = answer["choices"][0]["message"]["content"]
    assert text_of(chunks).strip() == text
    # Tokens are the model's own; citations are specrag's.
    written = "".join(token["text"] for step in steps for token in step["tokens"])
    assert without_citations(text)[1:] in written
    assert find_citations(text, ["", ""]).numbers
    done = told[-1]
    assert done["sources"] == answer["specrag"]["sources"]
    assert done["usage"]["accepted"] == sum(step["accepted"] for step in steps)
    drafted: Counter[str] = Counter()
    for step in steps:
        drafted.update(step["drafted"])
    assert done["usage"]["drafted_by"] == dict(drafted)
    times = [event["at"] for event in told if "at" in event]
    assert times == sorted(times)
    # Without events the text alone comes, and the figures at its end.
    plain = events(server)
    assert text_of(plain) == text_of(chunks)
    assert [chunk["specrag"]["event"] for chunk in plain if "specrag" in chunk] == ["done"]


def test_ralmspec_equals_sequential_retrieval(server: LiveServer) -> None:
    options = {"interval": 4}
    sequential = ask(server, method="sequential", options=options)
    speculative = ask(server, method="ralmspec", options={**options, "stride": 3, "prefetch": 4})
    contents = [answer["choices"][0]["message"]["content"] for answer in (sequential, speculative)]
    assert contents[0] == contents[1] != ""
    assert sequential["specrag"]["retrievals"] == speculative["specrag"]["retrievals"] > 1
    assert speculative["specrag"]["sources"]
    assert text_of(events(server, method="ralmspec", options={"stride": 3})) == contents[0]


def test_text_is_taken_back_only_where_the_client_is_told(server: LiveServer) -> None:
    options = {"stride": 3, "prefetch": 1, "early": True}
    silent = post(
        server, "/v1/chat/completions", {**body(method="ralmspec", options=options), "stream": True}
    )
    assert silent.status_code == 400
    assert silent.json()["error"]["param"] == "specrag.events"
    shown = ""
    for chunk in events(server, method="ralmspec", options=options, events=True):
        event = chunk.get("specrag", {})
        if event.get("event") == "correction":
            assert shown.endswith(event["text"])
            shown = shown.removesuffix(event["text"])
        shown += chunk["choices"][0]["delta"].get("content") or ""
    whole = ask(server, method="ralmspec", options=options)
    assert shown == whole["choices"][0]["message"]["content"] != ""


def test_speculative_rag_shows_drafts_and_scores(server: LiveServer) -> None:
    options = {"drafts": 2, "passages_per_draft": 1, "draft_tokens": 32}
    chunks = events(server, method="speculative-rag", k=4, options=options, events=True)
    told = [chunk["specrag"] for chunk in chunks if "specrag" in chunk]
    kinds = [event["event"] for event in told]
    assert [kind for kind in kinds if kind != "draft"] == ["sources", "subsets", "scores", "verdict", "done"]
    drafts = {event["index"]: event for event in told if event["event"] == "draft"}
    assert set(drafts) == {0, 1}
    scores = next(event for event in told if event["event"] == "scores")
    if scores["scores"]:  # a malformed draft has none
        best = max(scores["scores"], key=lambda score: score["total"])
        assert scores["winner"] == best["index"]
        assert text_of(chunks) == drafts[best["index"]]["answer"]
    whole = ask(server, method="speculative-rag", k=4, options=options)
    assert whole["choices"][0]["message"]["content"] == text_of(chunks)


def test_a_draft_and_the_verifier_can_read_all_passages(server: LiveServer) -> None:
    options = {"drafts": 2, "passages_per_draft": 1, "draft_tokens": 32}
    reading = {**options, "strategy": "anchored-whole", "evidence": "all-passages"}
    chunks = events(server, method="speculative-rag", k=4, options=reading, events=True)
    told = {chunk["specrag"]["event"]: chunk["specrag"] for chunk in chunks if "specrag" in chunk}
    assert [len(subset) for subset in told["subsets"]["subsets"]] == [4, 1]
    unknown = body(method="speculative-rag", options={**options, "evidence": "none"})
    refused = post(server, "/v1/chat/completions", unknown)
    assert refused.status_code == 400
    assert "all-passages" in refused.text


def test_drafts_tell_what_was_guessed_for_them(server: LiveServer) -> None:
    options = {"drafts": 2, "passages_per_draft": 1, "draft_tokens": 32}
    plain, copied = (
        ask(server, method="speculative-rag", k=4, options={**options, "decoder": decoder})["specrag"][
            "usage"
        ]
        for decoder in ("plain", "adaptive")
    )
    assert plain["drafted"] == plain["accepted"] == 0
    assert copied["drafted"] >= copied["accepted"] > 0
    assert sum(copied["accepted_by"].values()) == copied["accepted"]
    assert copied["mat"] > plain["mat"]


def test_a_source_that_is_a_path_is_told_by_its_name(
    server: LiveServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Files of the same name in two folders are indexed under their whole paths."""
    base = server.service.knowledge_bases.get("wiki")
    assert isinstance(base, KnowledgeBase)
    search = base.search

    def elsewhere(*given: Any, **named: Any) -> Any:
        return [
            [replace(hit, passage=replace(hit.passage, source="/srv/secret/notes.md")) for hit in hits]
            for hits in search(*given, **named)
        ]

    monkeypatch.setattr(base, "search", elsewhere)
    answer = ask(server)
    assert {source["source"] for source in answer["specrag"]["sources"]} == {"notes.md"}
    assert "/srv/secret" not in json.dumps(answer)


def test_the_figures_of_an_answer_are_counted(server: LiveServer) -> None:
    def figures() -> dict[str, float]:
        text = httpx.get(f"{server.url}/metrics").text
        lines = (line.rpartition(" ") for line in text.splitlines() if not line.startswith("#"))
        return {name: float(value) for name, _, value in lines}

    before = figures()
    answer = ask(server, method="adaptive")
    after, usage = figures(), answer["specrag"]["usage"]
    gained = {name: value - before.get(name, 0.0) for name, value in after.items()}

    def of(name: str) -> float:
        return sum(value for label, value in gained.items() if label.startswith(f"{name}_total"))

    assert of("specrag_tokens") == usage["completion_tokens"]
    assert of("specrag_prompt_tokens") == usage["prompt_tokens"]
    assert of("specrag_drafted_tokens") == usage["drafted"] > 0
    assert of("specrag_accepted_tokens") == usage["accepted"]
    assert of("specrag_retrieved_passages") == usage["retrieved"] == 2
    reason = answer["choices"][0]["finish_reason"]
    assert gained[f'specrag_generations_total{{method="adaptive",reason="{reason}"}}'] == 1
    assert gained['specrag_mean_accepted_tokens_sum{method="adaptive"}'] == pytest.approx(usage["mat"])


def test_a_long_text_of_the_request_itself_is_answered_by_rapid(server: LiveServer) -> None:
    text = "\n\n".join(f"Heron number {number} lives by lake {number * 7}." for number in range(40))
    question = "Where does heron number 13 live?"
    texts = []
    for messages in (
        [{"role": "user", "content": f"{text}\n\n{question}"}],
        [
            {"role": "user", "content": text},
            {"role": "assistant", "content": "I have read it."},
            {"role": "user", "content": question},
        ],
    ):
        asked = {"model": MODEL, "messages": messages, "max_tokens": 8, "temperature": 0}
        response = post(server, "/v1/chat/completions", {**asked, "specrag": {"method": "rapid"}})
        assert response.status_code == 200, response.text
        texts.append(response.json()["choices"][0]["message"]["content"])
        assert response.json()["specrag"]["usage"]["prompt_tokens"] > 400
    assert all(texts)
    bare = {
        "model": MODEL,
        "messages": [{"role": "user", "content": question}],
        "specrag": {"method": "rapid"},
    }
    refused = post(server, "/v1/chat/completions", bare)
    assert refused.status_code == 400
    assert refused.json()["error"]["param"] == "messages"
    greedy = {**asked, "specrag": {"method": "rapid", "options": {"eta": 5}}}
    refused = post(server, "/v1/chat/completions", greedy)
    assert refused.status_code == 400
    assert refused.json()["error"]["param"] == "specrag.options.eta"
    assert post(server, "/v1/chat/completions", {**greedy, "temperature": 0.5}).status_code == 200


def test_a_question_that_nothing_answers_is_not_answered(server: LiveServer) -> None:
    answer = ask(server, "How do I reset my router password?")
    assert answer["choices"][0]["message"]["content"] == ABSTENTION
    assert answer["specrag"]["abstained"] is True
    answered = ask(server, "How do I reset my router password?", abstain=False)
    assert answered["specrag"]["abstained"] is False
    assert answered["choices"][0]["message"]["content"] != ABSTENTION


def test_a_follow_up_question_is_rewritten_unless_that_is_switched_off(server: LiveServer) -> None:
    messages = [
        {"role": "user", "content": "Who was Marie Curie?"},
        {"role": "assistant", "content": "A physicist and chemist."},
        {"role": "user", "content": "What did she discover?"},
    ]
    asked = {**body(), "messages": messages}
    rewritten = post(server, "/v1/chat/completions", asked).json()["specrag"]
    assert rewritten["question"] != "What did she discover?"
    assert rewritten["usage"]["seconds"]["rewrite"] > 0.01
    asked["specrag"] = {**asked["specrag"], "rewrite": False}
    assert (
        post(server, "/v1/chat/completions", asked).json()["specrag"]["question"] == "What did she discover?"
    )


def test_conditions_narrow_the_search(server: LiveServer, answer: dict[str, Any]) -> None:
    title = answer["specrag"]["sources"][0]["title"]
    narrowed = ask(server, where=[f"title={title}"], k=1)["specrag"]["sources"]
    assert {source["title"] for source in narrowed} == {title}
    assert ask(server, where=f"title={title}", k=1)["specrag"]["sources"] == narrowed


@pytest.mark.parametrize(
    ("specrag", "param"),
    [
        ({"where": ["colour=red"]}, "specrag.where"),
        ({"where": ["nonsense"]}, "specrag.where"),
        ({"kb": None, "method": "ralmspec"}, "specrag.kb"),
        ({"kb": "../wiki"}, "specrag.kb"),
        ({"method": "ralmspec", "options": {"stride": 0}}, "specrag.options.stride"),
        ({"options": {"tolerance": 99.0}}, "specrag.options.tolerance"),
        ({"k": 100}, "specrag.k"),
        ({"index": "annoy"}, "specrag.index"),
    ],
    ids=str,
)
def test_what_cannot_be_used_is_named(server: LiveServer, specrag: dict[str, Any], param: str) -> None:
    response = post(server, "/v1/chat/completions", body(**specrag))
    assert response.status_code == 400
    assert response.json()["error"]["param"].startswith(param), response.text


def test_the_official_client_sends_the_field_and_reads_the_answer(server: LiveServer) -> None:
    client: openai.OpenAI = server.client()
    answer = client.chat.completions.create(
        model=MODEL,
        messages=[{"role": "user", "content": QUESTION}],
        max_tokens=4,
        extra_body={"specrag": {"kb": "wiki", "k": 1}},
    )
    assert answer.model_extra is not None
    assert answer.model_extra["specrag"]["sources"]
    completed = client.completions.create(
        model=MODEL, prompt=QUESTION, max_tokens=4, extra_body={"specrag": {"kb": "wiki", "k": 1}}
    )
    assert completed.model_extra is not None
    assert len(completed.model_extra["specrag"]["sources"]) == 1


def test_a_fresh_request_finds_nothing_and_leaves_nothing_of_its_prompt(server: LiveServer) -> None:
    def cached(fresh: bool) -> int:
        body = {
            "model": MODEL,
            "messages": [
                {"role": "user", "content": "Count the lighthouses of Orla, all of them, one by one. " * 4}
            ],
            "max_tokens": 2,
            "specrag": {"method": "plain", "fresh": fresh},
        }
        answer = post(server, "/v1/chat/completions", body)
        assert answer.status_code == 200, answer.text
        return int(answer.json()["usage"]["prompt_tokens_details"]["cached_tokens"])

    shared = 40  # a chat's head is the same in every request
    assert cached(fresh=True) == cached(fresh=True) == 0
    assert cached(fresh=False) < shared  # the fresh ones left nothing
    assert cached(fresh=False) > shared
    assert cached(fresh=True) == 0


def test_the_methods_describe_their_options(server: LiveServer) -> None:
    import httpx

    methods = {method["name"]: method for method in httpx.get(f"{server.url}/v1/specrag/methods").json()}
    assert methods["plain"] == {
        "name": "plain",
        "title": Plain.summary,
        "needs_kb": False,
        "needs_context": False,
        "reads_history": True,
        "default": False,
        "options": {},
    }
    assert [name for name, method in methods.items() if method["default"]] == ["adaptive"]
    assert methods["ralmspec"]["needs_kb"]
    assert methods["rapid"]["needs_context"]
    alone = {name for name, method in methods.items() if not method["reads_history"]}
    assert alone == {"ralmspec", "sequential", "speculative-rag"}
    # All there are, but for those that need what this server has not.
    assert set(methods) == {*method_names()} - {"cascade", "draft-model", "eagle-2"}
    assert methods["adaptive"]["options"]["tolerance"] == {
        "type": "number",
        "default": 3.0,
        "min": 0,
        "max": 20,
        "choices": None,
        "help": ANY,
        "symbol": "tau",
    }
    drafter = methods["adaptive"]["options"]["drafter"]
    assert (drafter["type"], drafter["choices"]) == ("choice", ["recycling", "lookup", "none"])
    stride = methods["ralmspec"]["options"]["stride"]
    assert (stride["type"], stride["default"]) == ("integer", "os3")
    assert stride["choices"] == ["os3", "cost-aware"]
    decoder = methods["standard-rag"]["options"]["decoder"]
    assert (decoder["type"], decoder["default"]) == ("choice", "adaptive")
    assert decoder["choices"] == decoder_names()
    # What a client may not name is not offered: folders, and models to be loaded.
    assert not {"drafter", "adapter", "verifier"} & methods["speculative-rag"]["options"].keys()
    assert "keep_prefix" not in methods["rapid"]["options"]
    without = methods["speculative-rag"]["options"]["without"]
    assert (without["type"], without["choices"]) == ("array", ["draft", "self-contain", "self-reflect"])
    # What is described can be sent.
    for method in methods.values():
        defaults = {name: option["default"] for name, option in method["options"].items()}
        assert all(option["help"] for option in method["options"].values())
        if not method["needs_kb"] and not method["needs_context"]:
            answer = post(
                server,
                "/v1/completions",
                {
                    "model": MODEL,
                    "prompt": "Copper",
                    "max_tokens": 1,
                    "specrag": {"method": method["name"], "options": defaults},
                },
            )
            assert answer.status_code == 200, answer.text
