"""RaLMSpec gives the tokens and the passages of sequential retrieval, on a model that betrays any slip."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from specrag import LanguageModel
from specrag.methods.ralmspec.speculative import RaLMSpecPipeline
from specrag.methods.ralmspec.text import chunk_seed
from specrag.speculation.schedule.guesses import CountedGuesses, GuessSchedule
from specrag.speculation.schedule.strides import StrideRound
from tests.methods.ralm_toys import (
    LETTERS,
    Case,
    Gate,
    ToyRetriever,
    WatchedExecutor,
    WholeContextModel,
    expected,
    outcome,
    ralmspec,
    sequential,
    toy_llm,
)
from tests.methods.run import answer_of


@dataclass
class Wild:
    """A schedule without any sense."""

    turn: int = 0

    def next(self) -> int:
        self.turn += 1
        return 1 + self.turn * 5 % 7

    def observe(self, round: StrideRound) -> None:
        assert 0 <= round.matched <= round.stride
        assert round.stride >= 1
        assert round.speculation_seconds > 0
        assert round.verification_seconds > 0


class WildPipeline(RaLMSpecPipeline):
    """RaLMSpec with such a schedule."""

    def _schedule(self) -> GuessSchedule:
        return CountedGuesses(Wild(), self.options.asynchronous)


@dataclass(frozen=True)
class World:
    """A model, a knowledge base and a question."""

    model_seed: int
    end_logit: float
    chat: bool
    store_seed: int
    size: int
    kind: str
    window: int
    case: Case
    kept_bytes: int = 0

    @contextmanager
    def open(self) -> Iterator[tuple[LanguageModel, WholeContextModel, ToyRetriever]]:
        model = WholeContextModel(self.model_seed, self.end_logit)
        llm = toy_llm(model, chat=self.chat, kept_bytes=self.kept_bytes)
        try:
            yield llm, model, ToyRetriever(self.store_seed, self.size, self.kind, self.window)
        finally:
            llm.close()


texts = st.text(LETTERS, min_size=1, max_size=12).filter(str.strip)
cases = st.builds(
    Case,
    question=texts,
    interval=st.integers(1, 6),
    query_tokens=st.integers(1, 12),
    passage_tokens=st.integers(1, 30),
    prompt_tokens=st.integers(40, 70),
    max_tokens=st.integers(1, 26),
    stop=st.lists(st.text("abcdé", min_size=1, max_size=3), max_size=2).map(tuple),
    temperature=st.sampled_from([0.0, 0.7, 1.5]),
    presence_penalty=st.sampled_from([0.0, 0.0, 1.0]),
    repetition_penalty=st.sampled_from([1.0, 1.0, 1.3]),
    seed=st.integers(-3, 2**70),
)
worlds = st.builds(
    World,
    model_seed=st.integers(0, 10**6),
    end_logit=st.sampled_from([-9.0, -1.0, 1.5]),
    chat=st.booleans(),
    store_seed=st.integers(0, 10**6),
    size=st.integers(1, 15),
    kind=st.sampled_from(["flat", "approximate", "bm25"]),
    window=st.integers(1, 9),
    case=cases,
    kept_bytes=st.sampled_from([0, 400, 10**6]),
)


def choices(size: int) -> st.SearchStrategy[dict[str, Any]]:
    """Every way to choose P, S and A, and everything else that may not change an output."""
    return st.fixed_dictionaries(
        {
            "make": st.sampled_from([RaLMSpecPipeline, RaLMSpecPipeline, WildPipeline]),
            "stride": st.one_of(st.integers(1, 6), st.sampled_from(["os3", "cost-aware"])),
            "prefetch": st.integers(1, size),
            "asynchronous": st.booleans(),
            "max_match": st.sampled_from([0.6, None]),
            "early": st.booleans(),
            "reuse": st.booleans(),
            "decoder": st.sampled_from(["plain", "plain", "prompt-lookup", "token-recycling", "respec"]),
        }
    )


@pytest.mark.slow
@settings(max_examples=150, deadline=None)
@given(worlds, st.data())
def test_the_output_is_sequential_retrievals(world: World, data: st.DataObject) -> None:
    case = world.case
    with world.open() as (llm, model, retriever):
        wanted = expected(model, retriever, case, chat=world.chat)
        for reuse in (True, False):
            waiting = sequential(llm, retriever, reuse=reuse, **case.limits)
            assert outcome(answer_of(waiting, case.question, **case.options)) == wanted
        for _ in range(3):
            chosen = data.draw(choices(world.size))
            method = ralmspec(llm, retriever, **case.limits, **chosen)
            method.capacity = data.draw(st.sampled_from([1, 3, 1024]))
            assert outcome(answer_of(method, case.question, **case.options)) == wanted, chosen
        assert all(cache.length == 0 for cache in model.caches), "a session was not closed"


@pytest.mark.parametrize("kind", ["flat", "bm25"])
@pytest.mark.parametrize("passes", range(6))
def test_a_search_may_end_behind_any_pass(passes: int, kind: str) -> None:
    """Asynchronous verification, its end forced between any two passes of the four or five beside it."""
    exact = kind == "flat" and 1 <= passes <= 3
    aborted = missed = 0
    for seed in range(6):
        case = Case("ab cd", interval=4, max_tokens=30, temperature=1.0, seed=seed)
        with World(seed, -9.0, True, seed, 12, kind, 4, case).open() as (llm, model, retriever):
            wanted = expected(model, retriever, case, chat=True)
            llm.executor = WatchedExecutor()
            Gate(model, retriever, llm.executor, passes, patience=0.05 if exact else 0.002)
            for stride in (1, 2, 4):
                method = ralmspec(llm, retriever, stride=stride, asynchronous=True, prefetch=2, **case.limits)
                answer = answer_of(method, case.question, **case.options)
                assert outcome(answer) == wanted
                aborted += answer.counts.aborted
                missed += sum(round.matched < round.stride == stride for round in answer.rounds)
    assert missed > 5
    if exact:
        assert aborted == missed  # each at the next token: there was at least one more


@settings(max_examples=60, deadline=None)
@given(worlds, st.integers(1, 6), st.booleans())
@example(World(0, -9.0, True, 0, 9, "flat", 2, Case("ab", max_tokens=26)), 3, True)
def test_a_round_is_the_paper_s(world: World, stride: int, asynchronous: bool) -> None:
    """s queries, s - 1 speculative decodings (s if asynchronous), one search, one decoding with the right passage."""
    case = world.case
    with world.open() as (llm, _, retriever):
        method = ralmspec(llm, retriever, stride=stride, asynchronous=asynchronous, **case.limits)
        answer = answer_of(method, case.question, **case.options)
    assert retriever.searches == [1, *(round.stride for round in answer.rounds)]
    settled = 1  # the first chunk needs no guess
    for round in answer.rounds[:-1]:
        settled += min(round.matched + 1, round.stride)
        # Shorter where no passage cached has a term of the query, or where a text that turned out wrong had ended.
        assert round.stride == stride or world.kind == "bm25" or round.matched < round.stride < stride
    if answer.rounds:
        last = answer.rounds[-1]
        assert last.stride <= stride
        settled += min(last.matched + 1, last.stride)
    assert settled == answer.counts.kept == len(answer.chunks)
    assert len(retriever.asked) == 1 + sum(round.stride for round in answer.rounds)  # each encoded once
    counts = answer.counts
    if world.kind != "bm25":
        # Where a text ends its chunk was written behind a guess, so that a wrong guess there costs one chunk more.
        more = [
            round.matched < round.stride and (asynchronous or round.stride < stride)
            for round in answer.rounds
        ]
        written = 1 + sum(round.stride for round in answer.rounds) + sum(more)
        assert counts.kept + counts.discarded + counts.aborted == written
    assert asynchronous or not counts.aborted


def test_a_stride_of_one_is_sequential_retrieval() -> None:
    case = Case("ab cd", max_tokens=24)
    with World(1, -9.0, True, 3, 12, "flat", 3, case).open() as (llm, _, retriever):
        answer = answer_of(ralmspec(llm, retriever, stride=1, **case.limits), case.question, **case.options)
    assert (answer.counts.kept, answer.counts.discarded, answer.counts.aborted) == (6, 0, 0)
    assert retriever.searches == [1] * 6


def test_passages_that_stay_are_read_once() -> None:
    """Keys and values are kept while the passage stays, also over a round whose last guesses were wrong."""
    case = Case("ab cd", max_tokens=24)
    for store in range(6):
        with World(1, -9.0, True, store, 12, "flat", 5, case).open() as (llm, model, retriever):
            prompts = {}
            rows = {}
            ways: dict[str, Callable[[bool], Any]] = {
                "sequential": lambda reuse: sequential(llm, retriever, reuse=reuse, **case.limits),
                "one": lambda reuse: ralmspec(llm, retriever, stride=1, reuse=reuse, **case.limits),
            }
            for name, make in ways.items():
                for reuse in (True, False):
                    before = model.rows
                    answer = answer_of(make(reuse), case.question, **case.options)
                    rows[name, reuse] = model.rows - before
                    prompts[name] = [
                        (chunk.source, answer.sources[(chunk.source or 1) - 1].passage.id)
                        for chunk in answer.chunks
                    ]
            assert rows["sequential", True] == rows["one", True]
            assert rows["sequential", False] == rows["one", False]
            changes = sum(a != b for a, b in zip(prompts["one"], prompts["one"][1:], strict=False))
            assert changes == 5 or rows["one", True] < rows["one", False]


@pytest.mark.parametrize("speculative", [False, True])
def test_a_passage_is_read_once_for_all_requests_of_a_tenant(speculative: bool) -> None:
    model = WholeContextModel(1, -9.0)
    llm = toy_llm(model, kept_bytes=10**6)
    retriever = ToyRetriever(3, size=1)
    retriever.texts[0] = "aa bb cc dd aé ab aa bb cc dd"

    def rows(question: str, tenant: str, *, reuse: bool = True) -> int:
        make: Callable[..., Any] = ralmspec if speculative else sequential
        before = model.rows
        answer_of(make(llm, retriever, reuse=reuse), question, max_tokens=8, tenant=tenant)
        return model.rows - before

    first, again = rows("ab cd", "alice"), rows("dc ba", "alice")
    assert first - again >= len(retriever.texts[0].replace("é", "??"))
    assert rows("dd", "bob") > again  # another tenant's passage is read anew
    assert rows("ab cd", "alice", reuse=False) >= first
    llm.close()


def test_the_end_of_a_prompt_is_read_with_its_first_token() -> None:
    model = WholeContextModel(1, -9.0)
    llm = toy_llm(model)
    before = model.passes
    answer = answer_of(sequential(llm, ToyRetriever(3, size=1)), "ab cd", max_tokens=4)
    assert model.passes - before == 4
    assert answer.timing.prefill > 0
    spans = [span for span in answer.timeline if span.activity in ("prefill", "decode")]
    assert spans[0].end == spans[1].start
    llm.close()


def test_chunks_draw_independently() -> None:
    """Two chunks that begin at the same length of the session do not share their noise."""
    assert len({chunk_seed(seed, place) for seed in range(-20, 20) for place in range(50)}) == 2000
    assert chunk_seed(7, 4) == chunk_seed(7, 4)
