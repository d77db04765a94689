"""The calls of iterative retrieval: streams, early display, dead stores, cancellation, bad input."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator, Mapping
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from specrag import (
    Cancelled,
    ContextLengthError,
    DeadlineExceeded,
    InputError,
    LanguageModel,
    RaLMSpec,
    Result,
    Step,
)
from specrag.engine.passes import Coroutine, gather
from specrag.methods.ralmspec.result import IterativeAnswer, Retraction
from specrag.methods.ralmspec.sequential import SequentialPipeline
from specrag.methods.ralmspec.speculative import RaLMSpecPipeline
from specrag.request import Options
from tests.methods.ralm_toys import (
    Case,
    StoreError,
    ToyRetriever,
    WholeContextModel,
    outcome,
    ralmspec,
    sequential,
    toy_llm,
)
from tests.methods.run import answer_of, events_of

QUESTION = "ab cd"
LIMITS = Case(QUESTION).limits
MISSING = Case(QUESTION, max_tokens=40, temperature=1.0, seed=3)


@pytest.fixture
def model() -> WholeContextModel:
    return WholeContextModel(3, -9.0)


@pytest.fixture
def llm(model: WholeContextModel) -> Iterator[LanguageModel]:
    llm = toy_llm(model)
    yield llm
    llm.close()


@pytest.fixture
def retriever() -> ToyRetriever:
    return ToyRetriever(3, window=2)


class Screen:
    """What a user sees of a stream."""

    def __init__(self) -> None:
        self.text = ""
        self.tokens: list[int] = []
        self.retractions = 0
        self.most = 0

    def show(self, event: object) -> None:
        if isinstance(event, Step):
            self.text += event.text
            self.tokens += [token.token for token in event.tokens]
            self.most = max(self.most, len(self.tokens))
        if isinstance(event, Retraction):
            assert self.text.endswith(event.text)
            self.text = self.text[: len(self.text) - len(event.text)]
            del self.tokens[len(self.tokens) - event.tokens :]
            self.retractions += 1


def play(method: RaLMSpecPipeline | SequentialPipeline, case: Case) -> tuple[Screen, IterativeAnswer]:
    """A stream to its end."""
    screen = Screen()
    stream = events_of(method, case.question, **case.options)
    while True:
        try:
            event = next(stream)
        except StopIteration as end:
            return screen, end.value
        screen.show(event)
        if isinstance(method, SequentialPipeline) or not method.options.early:
            assert screen.retractions == 0


@settings(max_examples=40, deadline=None)
@given(
    seed=st.integers(0, 10**6),
    early=st.booleans(),
    asynchronous=st.booleans(),
    stop=st.lists(st.text("abcdé", min_size=1, max_size=3), max_size=2).map(tuple),
    stride=st.integers(1, 5),
)
def test_a_stream_shows_the_text(
    seed: int, early: bool, asynchronous: bool, stop: tuple[str, ...], stride: int
) -> None:
    """Shown when verified it is never taken back; shown early, what is left at the end is the text."""
    model = WholeContextModel(seed, -3.0)
    llm = toy_llm(model)
    case = Case(QUESTION, max_tokens=30, temperature=1.0, seed=seed, stop=stop)
    method = ralmspec(
        llm,
        ToyRetriever(seed, window=2),
        stride=stride,
        early=early,
        asynchronous=asynchronous,
        **case.limits,
    )
    screen, answer = play(method, case)
    llm.close()
    assert screen.text == answer.text
    assert tuple(screen.tokens) == tuple(token.token for token in answer.tokens)
    assert screen.retractions == 0 or early
    assert not early or bool(screen.retractions) == bool(answer.counts.discarded)


def test_text_is_taken_back_visibly(llm: LanguageModel, retriever: ToyRetriever) -> None:
    early = ralmspec(llm, retriever, stride=4, prefetch=1, early=True, **LIMITS)
    screen, answer = play(early, MISSING)
    assert screen.retractions > 0
    late = ralmspec(llm, retriever, stride=4, prefetch=1, **LIMITS)
    assert outcome(answer_of(late, QUESTION, **MISSING.options)) == outcome(answer)


def test_asynchronous_calls_give_the_same(llm: LanguageModel, retriever: ToyRetriever) -> None:
    alone = answer_of(ralmspec(llm, retriever, stride=3, prefetch=1, **LIMITS), QUESTION, **MISSING.options)
    method = RaLMSpec(stride=3, prefetch=1, asynchronous=True, **LIMITS)
    call: dict[str, Any] = {"kb": retriever, "method": method, **MISSING.options}

    async def ask() -> tuple[Result, list[object]]:
        events: list[object] = [event async for event in llm.astream(QUESTION, **call)]
        return await llm.agenerate(QUESTION, **call), events

    answer, events = asyncio.run(ask())
    assert isinstance(events[-1], Result)
    for result in (answer, events[-1]):
        assert isinstance(result.details, IterativeAnswer)
        assert outcome(result.details) == outcome(alone)
    assert "".join(event.text for event in events if isinstance(event, Step)) == alone.text


def test_requests_side_by_side_change_nothing(llm: LanguageModel, retriever: ToyRetriever) -> None:
    """Their passes are packed, their searches run in turns; caches and sessions are each request's own."""
    methods = [
        sequential(llm, retriever, **LIMITS),
        ralmspec(llm, retriever, stride=2, **LIMITS),
        ralmspec(llm, retriever, stride=3, prefetch=4, asynchronous=True, **LIMITS),
        ralmspec(llm, retriever, stride="os3", asynchronous=True, early=True, **LIMITS),
    ]
    cases = [Case(question, max_tokens=30, seed=5, temperature=1.0) for question in ("ab", "dd c", "é")]
    alone = [outcome(answer_of(methods[0], case.question, **case.options)) for case in cases]

    def all_at_once() -> Coroutine[list[IterativeAnswer]]:
        running = [method.answering(case.question, **case.options) for case in cases for method in methods]
        return (yield from gather(running))

    found = llm.executor.run(llm.executor.submit(all_at_once()))
    assert [outcome(answer) for answer in found] == [wanted for wanted in alone for _ in methods]


def test_the_result_adds_up(llm: LanguageModel, retriever: ToyRetriever) -> None:
    method = ralmspec(llm, retriever, stride=3, asynchronous=True, **LIMITS)
    options: Options = {**MISSING.options, "log_probs": 2}
    answer = answer_of(method, QUESTION, **options)
    assert (
        len(answer.tokens) == answer.usage.completion_tokens == sum(chunk.tokens for chunk in answer.chunks)
    )
    assert [chunk.first for chunk in answer.chunks] == list(range(0, 40, 4))
    assert [source.number for source in answer.sources] == list(range(1, len(answer.sources) + 1))
    used = [chunk.source for chunk in answer.chunks if chunk.source is not None]
    assert list(dict.fromkeys(used)) == [source.number for source in answer.sources]
    assert all(chunk.verified for chunk in answer.chunks)
    assert all(len(token.alternatives) == 2 for token in answer.tokens)
    timing = answer.timing
    assert timing.generation + timing.encoding + timing.lookup - timing.overlapped <= timing.total
    assert 0 <= timing.discarded <= timing.generation
    assert timing.retrieval == timing.encoding + timing.searching - timing.overlapped
    assert answer.tokens_per_second == pytest.approx(40 / timing.total)
    kept = [span for span in answer.timeline if span.activity == "decode" and span.kept]
    thrown = [span for span in answer.timeline if span.activity == "decode" and not span.kept]
    assert len(kept) == answer.counts.kept
    # A chunk cut off before its first pass has no span.
    assert answer.counts.discarded <= len(thrown) <= answer.counts.discarded + answer.counts.aborted
    assert all(0 <= span.start <= span.end <= timing.total for span in answer.timeline)


def test_speculative_decoders_inside_count_their_guesses(llm: LanguageModel, retriever: ToyRetriever) -> None:
    plain = answer_of(ralmspec(llm, retriever, stride=3, prefetch=1, **LIMITS), QUESTION, max_tokens=40)
    copied = answer_of(ralmspec(llm, retriever, decoder="prompt-lookup", **LIMITS), QUESTION, max_tokens=40)
    assert outcome(plain) == outcome(copied)
    assert (plain.usage.drafted, plain.usage.passes) == (0, 40)
    assert copied.usage.drafted > 0
    assert copied.usage.accepted == sum(token.source != "target" for token in copied.tokens)
    assert 40 - copied.usage.accepted <= copied.usage.passes <= 40


# -- a store that goes away ---------------------------------------------------------------------------------


@pytest.mark.parametrize("asynchronous", [False, True])
@pytest.mark.parametrize("fail_from", range(1, 4))
def test_a_dead_store_is_an_error(
    llm: LanguageModel, model: WholeContextModel, asynchronous: bool, fail_from: int
) -> None:
    retriever = ToyRetriever(3, window=2, fail_from=fail_from)
    for method in (
        ralmspec(llm, retriever, stride=3, prefetch=1, asynchronous=asynchronous, **LIMITS),
        sequential(llm, retriever, **LIMITS),
    ):
        retriever.searches.clear()
        events: list[object] = []
        with pytest.raises(StoreError, match="does not answer"):
            events.extend(events_of(method, QUESTION, **MISSING.options))
        assert isinstance(events[0], Step)  # what was verified has been shown
    assert all(cache.length == 0 for cache in model.caches)


@pytest.mark.parametrize("asynchronous", [False, True])
@pytest.mark.parametrize("fail_from", range(1, 4))
def test_a_request_may_go_on_from_its_cache(llm: LanguageModel, asynchronous: bool, fail_from: int) -> None:
    whole = ralmspec(llm, ToyRetriever(3, window=2), stride=2, prefetch=3, **LIMITS)
    retriever = ToyRetriever(3, window=2, fail_from=fail_from)
    method = ralmspec(
        llm, retriever, stride=2, prefetch=3, asynchronous=asynchronous, on_failure="cache", **LIMITS
    )
    screen, answer = play(method, MISSING)
    assert answer.failure == "store: it does not answer; start it again"
    assert screen.text == answer.text
    assert len(answer.tokens) == 40
    assert len(retriever.searches) == fail_from + 1  # it is not asked again
    verified = [chunk.verified for chunk in answer.chunks]
    settled = verified.index(False)
    assert verified == [True] * settled + [False] * (10 - settled)
    right = outcome(answer_of(whole, QUESTION, **MISSING.options))
    assert outcome(answer).tokens[: 4 * settled] == right.tokens[: 4 * settled]


class Remote(ToyRetriever):
    """From its first failure on it sends nothing; where ``scores`` is set it still scores what it has sent."""

    scores = True

    @property
    def dead(self) -> bool:
        return len(self.searches) > self.fail_from

    def check(self) -> None:
        if self.dead:
            raise StoreError("store: it does not answer; start it again")

    def score(self, *words: Any) -> Any:
        if not self.scores:
            self.check()
        return super().score(*words)

    def passages(self, *words: Any) -> Any:
        self.check()
        return super().passages(*words)


@pytest.mark.parametrize("scores", [True, False])
@pytest.mark.parametrize("prefetch", [1, 6])
@pytest.mark.parametrize("capacity", range(2, 9))
def test_a_request_goes_on_from_a_cache_of_any_size(
    llm: LanguageModel, capacity: int, prefetch: int, scores: bool
) -> None:
    """Every passage that the cache holds is there as text, whatever has been evicted from it."""
    for seed in range(4):
        for fail_from in (1, 2, 3):  # a round writes at most three of the ten chunks
            retriever = Remote(seed, window=2, fail_from=fail_from)
            retriever.scores = scores
            method = ralmspec(llm, retriever, stride=3, prefetch=prefetch, on_failure="cache", **LIMITS)
            method.capacity = capacity
            answer = answer_of(method, QUESTION, **MISSING.options)
            assert answer.failure == "store: it does not answer; start it again"
            assert len(answer.tokens) == 40
            unverified = [chunk for chunk in answer.chunks if not chunk.verified]
            assert unverified
            assert all(chunk.source is not None for chunk in unverified)
            assert len(retriever.searches) == fail_from + 1


@pytest.mark.parametrize("on_failure", ["error", "cache"])
def test_a_store_may_stop_scoring_before_it_is_searched(llm: LanguageModel, on_failure: Any) -> None:
    class Deaf(ToyRetriever):
        def score(self, *_: Any) -> Any:
            raise StoreError("store: it does not answer; start it again")

    retriever = Deaf(3, window=2)
    method = ralmspec(llm, retriever, stride=3, prefetch=3, on_failure=on_failure, **LIMITS)
    if on_failure == "error":
        with pytest.raises(StoreError, match="does not answer"):
            answer_of(method, QUESTION, **MISSING.options)
        return
    answer = answer_of(method, QUESTION, **MISSING.options)
    assert answer.failure is not None
    assert [chunk.verified for chunk in answer.chunks] == [True] + 9 * [False]
    # Nothing ranks the cache any more, so that the newest passage stands in front of all that follows.
    assert len({chunk.source for chunk in answer.chunks}) == 1
    assert len(retriever.searches) == 1


def test_a_slow_store_does_not_hold_up_other_requests(llm: LanguageModel) -> None:
    """While five requests wait for their store, one goes on whose knowledge base is on this machine."""
    release = threading.Event()
    slow, here = (ToyRetriever(seed, window=2) for seed in (1, 2))
    slow.during_search = lambda: assert_soon(release)
    here.remote = False
    method = ralmspec(llm, here, stride=3, prefetch=3, **LIMITS)
    right = outcome(answer_of(method, QUESTION, **MISSING.options))
    waiting = ralmspec(llm, slow, stride=3, prefetch=3, **LIMITS)
    tasks = [llm.executor.submit(waiting.answering(QUESTION, **MISSING.options)) for _ in range(5)]
    try:
        assert outcome(answer_of(method, QUESTION, **MISSING.options)) == right
        assert not any(task.done for task in tasks)
    finally:
        release.set()
    assert len({outcome(llm.executor.run(task)) for task in tasks}) == 1


def assert_soon(event: threading.Event) -> None:
    assert event.wait(20)


def test_a_first_search_that_fails_is_always_an_error(llm: LanguageModel) -> None:
    method = ralmspec(llm, ToyRetriever(3, fail_from=0), on_failure="cache", **LIMITS)
    with pytest.raises(StoreError):
        answer_of(method, QUESTION)


def test_an_error_that_is_none_of_the_store_s_is_not_taken_for_one(llm: LanguageModel) -> None:
    class Broken(ToyRetriever):
        def search(self, *_: Any) -> Any:
            raise KeyError("a bug")

    with pytest.raises(KeyError):
        answer_of(ralmspec(llm, Broken(3), on_failure="cache", **LIMITS), QUESTION)


# -- ends from outside --------------------------------------------------------------------------------------


class Held(ToyRetriever):
    """Its searches behind the first wait until they are let go."""

    def search(self, *words: Any) -> Any:
        if self.searches:
            self.waiting.set()
            assert self.let_go.wait(timeout=30)
        return super().search(*words)

    def hold(self) -> None:
        self.waiting, self.let_go = threading.Event(), threading.Event()


@pytest.mark.parametrize("asynchronous", [False, True])
def test_leaving_a_stream_frees_the_sessions(
    llm: LanguageModel, model: WholeContextModel, asynchronous: bool
) -> None:
    """Also while a search runs, and a chunk beside it; the search's own end is not waited for."""
    retriever = Held(3, window=2)
    retriever.hold()
    method = ralmspec(llm, retriever, stride=3, prefetch=1, asynchronous=asynchronous, early=True, **LIMITS)
    stream = events_of(method, QUESTION, **MISSING.options)
    for _ in range(3):  # the first chunk, and the two guesses of the round
        assert isinstance(next(stream), Step)
    assert any(cache.length for cache in model.caches)
    stream.close()
    assert not any(cache.length for cache in model.caches)
    assert not retriever.let_go.is_set()
    retriever.let_go.set()


def test_cancelling_a_task_frees_the_sessions(llm: LanguageModel, model: WholeContextModel) -> None:
    retriever = Held(3, window=2)
    retriever.hold()
    method = ralmspec(llm, retriever, stride=3, prefetch=1, asynchronous=True, **LIMITS)
    task = llm.executor.submit(method.answering(QUESTION, **MISSING.options))

    def cancel() -> None:
        retriever.waiting.wait(timeout=30)
        task.cancel()

    watcher = threading.Thread(target=cancel)
    watcher.start()
    with pytest.raises(Cancelled):
        llm.executor.run(task)
    watcher.join()
    assert not any(cache.length for cache in model.caches)
    retriever.let_go.set()


def test_a_timeout_ends_an_answer(llm: LanguageModel, model: WholeContextModel) -> None:
    retriever = Held(3, window=2)
    retriever.hold()
    for method in (
        ralmspec(llm, retriever, stride=3, prefetch=1, asynchronous=True, **LIMITS),
        sequential(llm, retriever, **LIMITS),
    ):
        with pytest.raises(DeadlineExceeded):
            answer_of(method, QUESTION, timeout=0.05)
    assert not any(cache.length for cache in model.caches)
    retriever.let_go.set()


# -- bad input ----------------------------------------------------------------------------------------------


class Untouched(ToyRetriever):
    def encode(self, *_: Any) -> Any:
        raise AssertionError("the knowledge base was touched")

    def search(self, *_: Any) -> Any:
        raise AssertionError("the knowledge base was searched")


@pytest.mark.parametrize(
    ("values", "field"),
    [
        ({"stride": 0}, "stride"),
        ({"stride": -1}, "stride"),
        ({"stride": True}, "stride"),
        ({"stride": 1.5}, "stride"),
        ({"stride": 17}, "stride"),
        ({"stride": "os4"}, "from 1 to 16 or one of os3, cost-aware"),
        ({"prefetch": 0}, "prefetch"),
        ({"prefetch": "many"}, "prefetch"),
        ({"max_match": 1.0}, "max_match"),
        ({"max_match": float("nan")}, "max_match"),
        ({"on_failure": "hope"}, "on_failure"),
        ({"interval": 0}, "interval"),
        ({"query_tokens": 0}, "query_tokens"),
        ({"passage_tokens": 0}, "passage_tokens"),
        ({"prompt_tokens": -5}, "prompt_tokens"),
        ({"decoder": "plane"}, "did you mean plain"),
    ],
)
def test_settings_that_cannot_be_used(llm: LanguageModel, values: Mapping[str, Any], field: str) -> None:
    with pytest.raises(InputError, match=field) as caught:
        llm.generate(QUESTION, kb=Untouched(3), method=RaLMSpec(**values))
    assert "\n" not in str(caught.value)


def test_an_empty_knowledge_base_is_refused(llm: LanguageModel) -> None:
    class Empty(Untouched):
        def __len__(self) -> int:
            return 0

    for method in ("ralmspec", "sequential"):
        with pytest.raises(InputError, match="index a document first"):
            llm.generate(QUESTION, kb=Empty(3), method=method)


def test_a_search_brings_no_more_than_there_is(llm: LanguageModel) -> None:
    assert ralmspec(llm, ToyRetriever(3), prefetch=13).prefetch == len(ToyRetriever(3)) == 12


@pytest.mark.parametrize(
    ("question", "options", "field"),
    [
        ("", {}, "question"),
        (" \n", {}, "question"),
        (None, {}, "question"),
        ("a\ud800", {}, "UTF-8"),
        (QUESTION, {"method": "respec"}, "decoder"),
        (QUESTION, {"max_tokens": 0}, "max_tokens"),
        (QUESTION, {"temperature": -1}, "temperature"),
        (QUESTION, {"timeout": 0}, "timeout"),
        (QUESTION, {"stop": ""}, "stop"),
        (QUESTION, {"tempreature": 1}, "did you mean temperature"),
    ],
)
def test_calls_that_cannot_be_used(
    llm: LanguageModel, model: WholeContextModel, question: Any, options: Any, field: str
) -> None:
    for method in (
        ralmspec(llm, Untouched(3), **LIMITS),
        sequential(llm, Untouched(3), **LIMITS),
    ):
        for call in (method.answering, method.check):
            with pytest.raises(InputError, match=field):
                call(question, **options)
    assert model.passes == 0


def test_a_question_without_room_for_a_passage_is_refused_before_any_work(llm: LanguageModel) -> None:
    method = ralmspec(llm, Untouched(3), prompt_tokens=64)
    fits = "a" * (64 - 16 - 2)  # the template has two tokens
    method.check(fits)
    with pytest.raises(ContextLengthError, match="shorten the question"):
        method.check(fits + "a")
    with pytest.raises(ContextLengthError, match="fewer tokens"):
        ralmspec(llm, Untouched(3)).check(QUESTION, max_tokens=llm.context_length - 10)


def test_a_system_message_needs_a_template(model: WholeContextModel) -> None:
    llm = toy_llm(model, chat=False)
    with pytest.raises(InputError, match="system"):
        sequential(llm, Untouched(3), system="Be brief.").check(QUESTION)
    llm.close()
