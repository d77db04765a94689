"""What every registered method has to keep to: its options, its plan, its stream, its result, its end."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import specrag
from specrag import DeadlineExceeded, InputError, LanguageModel, Needs, Resources, Result, Step
from specrag.asking import Answerer
from specrag.engine.session import Session
from specrag.methods.describe import describe_options
from specrag.methods.knn_lm.store.build import build_datastore
from specrag.methods.knn_lm.store.datastore import Datastore, model_record
from specrag.methods.registry import alternatives, make_method, method_class, method_names
from specrag.request import Event, SearchOptions
from specrag.retrieval.documents.contexts import documents_of
from specrag.retrieval.documents.reader import Document
from tests.methods.run import played
from tests.sample import SUMMARIES, VILLAGE, build_sample

QUESTION = "Who discovered radium?"
#: Options without which a method cannot work, or would take long here.
GIVEN: Mapping[str, dict[str, Any]] = {
    "draft-model": {"drafter": "smollm2-135m"},
    "eagle-2": {"drafter": "smollm2-135m"},
    "knn-lm": {"k": 16},
    "streaming-drafter": {"window": 64, "retrieval_tokens": 60},
    "rapid": {"retrieval_tokens": 60},
    "naive-sd": {"retrieval_tokens": 60},
    "speculative-rag": {
        "drafts": 2,
        "passages_per_draft": 1,
        "draft_tokens": 16,
        "strategy": "random",
        "adapter": None,
    },
    "cascade": {"confidence": 1.0},
}
NAMES = method_names()
#: One of each level: tokens, neighbours, a long context, passages, answers.
LEVELS = ("adaptive", "knn-lm", "rapid", "ralmspec", "speculative-rag", "standard-rag")


# -- options ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", NAMES)
def test_a_method_describes_itself(name: str) -> None:
    method = method_class(name)
    assert method.name == name
    assert method.summary
    assert "\n" not in method.summary
    assert len(method.summary) <= 110
    assert method.needs != Needs.NOTHING
    assert make_method(name).options == method.Options()


@pytest.mark.parametrize("name", NAMES)
def test_every_option_has_bounds_and_a_description(name: str) -> None:
    schema = method_class(name).Options.model_json_schema()
    json.dumps(schema)
    for option, described in schema.get("properties", {}).items():
        assert described["description"].endswith("."), option
        assert "default" in described, option
        for kind in alternatives(described):
            if kind.get("type") in ("integer", "number"):
                assert {"minimum", "exclusiveMinimum"} & kind.keys(), option
                assert {"maximum", "exclusiveMaximum"} & kind.keys(), option
            if kind.get("type") == "string":
                assert {"maxLength", "enum", "const"} & kind.keys(), option
            if kind.get("type") == "array":
                assert "maxItems" in kind, option
    for option, told in describe_options(method_class(name).Options).items():
        if told["type"] in ("integer", "number"):
            assert told["min"] <= told["max"], option


@pytest.mark.parametrize("name", NAMES)
def test_options_go_through_json_and_back(name: str) -> None:
    options = method_class(name).Options()
    written = json.loads(json.dumps(options.model_dump()))
    read = {key: tuple(value) if isinstance(value, list) else value for key, value in written.items()}
    assert make_method(name, read).options == options


@pytest.mark.parametrize("name", NAMES)
def test_an_unknown_option_is_refused_with_the_nearest(name: str) -> None:
    options = list(method_class(name).Options.model_fields)
    with pytest.raises(InputError, match=r"options\.xyzzy") as caught:
        make_method(name, {"xyzzy": 1})
    assert all(option in str(caught.value) for option in options)
    for option in options[:1]:
        with pytest.raises(InputError, match=f"did you mean {option}"):
            make_method(name, {f"{option}x": 1})


#: What the papers take; see PAPERS for what they leave open.
PUBLISHED: Mapping[str, dict[str, Any]] = {
    "respec": {
        "trigger": True,
        "feedback_rate": 0.3,
        "score_threshold": 0.2,
        "candidates": 3,
        "draft_size": 60,
        "drafter": "auto",
        "relaxed": False,
        "tolerance": 3.0,
        "relax_top_k": 5,
        "relax_attempts": 2,
        "relax_matches": 3,
        "cost_aware": False,
        "corpus": None,
    },
    "ralmspec": {
        "stride": "os3",
        "prefetch": 20,
        "asynchronous": True,
        "max_match": 0.6,
        "interval": 4,
        "query_tokens": 32,
        "passage_tokens": 256,
        "prompt_tokens": 512,
        "decoder": "plain",
    },
    "sequential": {"interval": 4, "query_tokens": 32, "passage_tokens": 256, "prompt_tokens": 512},
    "rapid": {
        "drafter": "self",
        "gamma": 10,
        "schedule": "fixed",
        "suffix": None,
        "eta": 0.0,
        "mask": 0.0,
        "scoring": "dense",
        "retrieval_tokens": None,
    },
    "streaming-drafter": {"window": 4096, "sinks": 4},
    "speculative-rag": {
        "drafts": 5,
        "passages_per_draft": 2,
        "decoder": "plain",
    },
    "knn-lm": {"k": None, "weight": 0.25, "knn_temperature": 1.0, "knn_reach": None, "index": "flat"},
}


@pytest.mark.parametrize("name", PUBLISHED)
def test_a_papers_name_gives_the_papers_values(name: str) -> None:
    options = make_method(name).options
    assert {option: getattr(options, option) for option in PUBLISHED[name]} == PUBLISHED[name]


def test_speculative_rags_own_values_come_with_the_papers_form() -> None:
    """Why they are not what its name gives: docs/decisions/0026."""
    options = specrag.SpeculativeRAG(form="paper").options.settled()
    assert (options.strategy, options.evidence) == ("multi-perspective", "rationale")
    assert (options.without, options.length_normalized) == ((), False)


def test_values_behind_the_options_are_the_papers_too(llm: LanguageModel) -> None:
    given = Resources(llm)
    respec: Any = specrag.ReSpec().decoder(given)
    trigger = respec.retrieval.trigger
    assert (trigger.max_key, trigger.threshold, trigger.length_weight) == (3, 1.5, 0.3)
    assert (respec.retrieval.combine, respec.cost_aware, respec.drafter) == (
        False,
        False,
        "eagle:smollm2-135m",
    )
    rapid: Any = specrag.RAPID()._method(given)
    assert (rapid.cost_aware, rapid.copies, rapid.gamma) == (False, False, 10)
    adaptive: Any = specrag.Adaptive().decoder(given)
    assert (adaptive.retrieval.combine, adaptive.cost_aware, adaptive.name) == (True, True, "adaptive")
    assert specrag.Adaptive().decoder(given) is adaptive  # so that equal requests learn together


# -- calls --------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class World:
    """All that methods need, and a façade over it that holds nothing between requests."""

    llm: LanguageModel
    small: LanguageModel
    kb: specrag.KnowledgeBase
    store: Datastore
    folder: Path
    documents: Sequence[Document]
    sessions: list[Session]

    def call(self, name: str, **more: Any) -> dict[str, Any]:
        needs = method_class(name).needs
        call: dict[str, Any] = {"method": make_method(name, GIVEN.get(name, {})), "max_tokens": 8, **more}
        if Needs.RETRIEVER in needs:
            call |= {"kb": self.kb, "k": 3}
        if Needs.CONTEXT in needs:
            call["documents"] = self.documents
        return call

    @property
    def facade(self) -> Answerer:
        given = Resources(
            self.llm, drafter=self.small, datastores={"village": self.store}, holds_documents=False
        )
        return Answerer(given)

    def open_sessions(self) -> list[Session]:
        return [session for session in self.sessions if session.cache.length]


@pytest.fixture(scope="module")
def world(llm: LanguageModel, tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    folder = tmp_path_factory.mktemp("store")
    tokens = np.array(llm.tokenizer.encode(VILLAGE, special=True), dtype=np.int32)
    build_datastore([tokens], folder, llm.model, model_record(llm.loaded))
    named = {document.title: document for document in documents_of(SUMMARIES)}
    sessions: list[Session] = []
    born = Session.__init__

    def noted(session: Session, *words: Any, **options: Any) -> None:
        born(session, *words, **options)
        sessions.append(session)

    small = specrag.load("smollm2-135m", device="cpu", adapter="smollm2-135m-drafter")
    with (
        pytest.MonkeyPatch.context() as patch,
        specrag.KnowledgeBase.open(build_sample(tmp_path_factory.mktemp("kb") / "kb")) as kb,
        Datastore.open(folder) as store,
    ):
        patch.setattr(Session, "__init__", noted)
        yield World(llm, small, kb, store, folder, (named["Danube"], named["Marie Curie"]), sessions)
    small.close()


@pytest.fixture(autouse=True)
def forgotten(request: pytest.FixtureRequest) -> Iterator[None]:
    """What one test leaves open is not told of the next."""
    yield
    if "world" in request.fixturenames:
        request.getfixturevalue("world").sessions.clear()


@dataclass
class Told:
    """A stream's text as a client builds it."""

    text: str = ""

    def hear(self, event: Any) -> None:
        if isinstance(event, Step):
            self.text += event.text
            return
        assert isinstance(event, Event)
        assert event.name
        json.dumps(event.describe())
        self.text = self.text[: len(self.text) - event.text_lost] + event.text_gained


@pytest.mark.parametrize("name", NAMES)
def test_a_stream_adds_up_to_the_result(world: World, name: str) -> None:
    stream = played(world.facade.stream(QUESTION, **world.call(name)))
    told = Told()
    for event in stream.events:
        told.hear(event)
    result = stream.answer
    assert isinstance(result, Result)
    assert told.text.strip() == result.text.strip() != ""
    assert world.open_sessions() == []
    check_result(result, method_class(name).needs)


def check_result(result: Result, needs: Needs) -> None:
    usage, timing = result.usage, result.timing
    assert result.finish_reason in ("stop", "length")
    assert usage.prompt_tokens > 0
    assert usage.completion_tokens > 0
    assert usage.passes > 0
    assert 0 <= usage.accepted <= usage.drafted
    assert timing.decode > 0
    assert timing.total > 0
    assert all(seconds >= 0 for seconds in timing.describe().values())
    if result.tokens:
        assert len(result.tokens) == usage.completion_tokens
        assert sum(token.source != "target" for token in result.tokens) == usage.accepted
    if Needs.RETRIEVER in needs:
        assert result.sources
        assert [source.number for source in result.sources] == list(range(1, len(result.sources) + 1))
        assert result.retrieved >= len(result.sources)
        assert timing.phases["retrieval"] > 0
        assert all(source.describe()["text"] for source in result.sources)
    if result.details is not None:
        json.dumps(result.details.summary())
        json.dumps(result.details.record(), default=str)
        assert all(isinstance(text, str) for text in [*result.details.notes(), *result.details.figures()])
        for table in result.details.tables():
            assert all(len(row) == len(table.columns or row) for row in table.rows)


@pytest.mark.parametrize("name", LEVELS)
def test_asynchronous_callers_hear_the_same(world: World, name: str) -> None:
    call = world.call(name)

    async def ask() -> tuple[Result, list[Any]]:
        events = [event async for event in world.facade.astream(QUESTION, **call)]
        return await world.facade.agenerate(QUESTION, **call), events

    result, (*events, last) = asyncio.run(ask())
    told = Told()
    for event in events:
        told.hear(event)
    assert isinstance(last, Result)
    assert told.text.strip() == last.text.strip() != ""
    assert isinstance(result, Result)
    assert result.usage.completion_tokens > 0


@pytest.mark.parametrize("name", LEVELS)
def test_a_batch_answers_each_prompt(world: World, name: str) -> None:
    results = world.facade.batch([QUESTION, "Which sea does the Danube reach?"], **world.call(name))
    assert len(results) == 2
    for result in results:
        check_result(result, method_class(name).needs)
    assert world.open_sessions() == []


@pytest.mark.parametrize("name", NAMES)
def test_leaving_a_stream_closes_every_session(world: World, name: str) -> None:
    stream = world.facade.stream(QUESTION, **world.call(name, max_tokens=200))
    for before, _ in pairwise(stream):
        if world.open_sessions() and isinstance(before, Step | Event):
            break
    stream.close()
    assert world.open_sessions() == []
    assert world.llm.executor._tasks == []


@pytest.mark.parametrize("name", NAMES)
def test_a_deadline_ends_a_request(world: World, name: str) -> None:
    with pytest.raises(DeadlineExceeded):
        world.facade.generate(QUESTION, **world.call(name, timeout=1e-6))
    assert world.open_sessions() == []


def test_a_deadline_ends_an_asynchronous_request(world: World) -> None:
    for name in LEVELS:
        with pytest.raises(DeadlineExceeded):
            asyncio.run(world.facade.agenerate(QUESTION, **world.call(name, timeout=1e-6)))


@pytest.mark.parametrize("name", NAMES)
def test_bad_input_is_refused_before_any_work(
    world: World, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def untouched(*_: object, **__: object) -> Any:
        raise AssertionError("work was done for a request that is refused")

    monkeypatch.setattr(world.llm.model, "forward", untouched)
    monkeypatch.setattr(type(world.kb), "search", untouched)
    call = world.call(name)
    wrong: list[tuple[Any, dict[str, Any]]] = [
        ("", {}),
        (QUESTION, {"temperature": -1}),
        (QUESTION, {"max_tokens": 0}),
        (QUESTION, {"timeout": 0}),
        (QUESTION, {"seed": "x"}),
        (QUESTION, {"tempreature": 1}),
        (QUESTION, {"k": 0}),
    ]
    needs = method_class(name).needs
    if Needs.RETRIEVER in needs:
        wrong += [(QUESTION, {"kb": None}), ([3, 1, 4], {}), ([{"role": "robot", "content": "Hello"}], {})]
    if Needs.CONTEXT in needs:
        wrong += [(QUESTION, {"documents": ()}), (QUESTION, {"kb": world.kb}), ([3, 1, 4], {})]
    for prompt, changed in wrong:
        for begin in (world.facade.generate, world.facade.stream):
            with pytest.raises(InputError) as caught:
                begin(prompt, **{**call, **changed})
            assert "\n" not in str(caught.value)
    if Needs.DATASTORE in needs:
        with pytest.raises(InputError, match="datastore"):
            Answerer(Resources(world.llm)).generate(QUESTION, **call)


def test_a_method_without_a_model_says_so() -> None:
    with pytest.raises(InputError, match="this method decodes a local model; name one"):
        Answerer(Resources()).generate("Hello")


def test_the_default_follows_what_is_given(world: World) -> None:
    alone = world.facade.generate(QUESTION, max_tokens=4)
    assert (alone.details, alone.sources) == (None, ())
    over = world.facade.generate(QUESTION, kb=world.kb, max_tokens=4)
    assert over.sources
    assert type(over.details).__name__ == "Answer"
    long = world.facade.generate(QUESTION, documents=world.documents, max_tokens=4)
    assert type(long.details).__name__ == "ContextAnswer"


@pytest.mark.parametrize("name", ["plain", "respec", "prompt-lookup"])
def test_a_decoding_method_works_over_passages_and_long_contexts(world: World, name: str) -> None:
    over = world.facade.generate(QUESTION, method=name, kb=world.kb, k=2, max_tokens=6)
    assert type(over.details).__name__ == "Answer"
    assert over.sources
    long = world.facade.generate(QUESTION, method=name, documents=world.documents, max_tokens=6)
    assert type(long.details).__name__ == "ContextAnswer"


def test_a_method_is_a_name_or_configured(world: World) -> None:
    with pytest.raises(InputError, match="did you mean respec"):
        world.facade.generate(QUESTION, method="respeck")
    with pytest.raises(InputError, match="a configured method"):
        world.facade.generate(QUESTION, method=3)


def test_search_options_are_every_methods(world: World) -> None:
    assert set(SearchOptions.model_fields) <= set(specrag.Call.__annotations__)
    with pytest.raises(InputError, match="min_score"):
        world.facade.generate(QUESTION, kb=world.kb, min_score=0.3, abstain=False)
    some = world.facade.generate(
        QUESTION, kb=world.kb, where=["title=Tin,Bronze"], abstain=False, max_tokens=2
    )
    assert {source.passage.title for source in some.sources} <= {"Tin", "Bronze"}


def test_options_open_what_they_name(llm: LanguageModel, world: World, tmp_path: Path) -> None:
    method = specrag.KnnLM(datastore=str(world.folder), k=8)
    made = llm.generate("The library of the village", method=method, raw=True, max_tokens=4)
    assert made.usage.completion_tokens == 4
    with pytest.raises(specrag.SpecragError):
        llm.generate("Hello", method=specrag.KnnLM(datastore=str(tmp_path / "none")))
