"""Speculative RAG with real models: drafts, scores, verdict, events, and forms of answers."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import pytest

from specrag.engine.executor import run
from specrag.engine.outputs import Row
from specrag.engine.passes import Segment
from specrag.errors import DeadlineExceeded
from specrag.methods.generator import LocalGenerator
from specrag.methods.speculative_rag import SpeculativeRAG
from specrag.methods.speculative_rag.form import CUE, LEAD, draft_prompt
from specrag.methods.speculative_rag.result import (
    NO_DRAFT,
    DraftDelta,
    DraftDone,
    DraftsScored,
    SpeculativeAnswer,
    SubsetsDrawn,
    Verdict,
)
from specrag.methods.speculative_rag.task import Task
from specrag.models.roles import ScoringRequest, TextPart
from specrag.models.scoring import LocalScorer
from specrag.request import Result, Sources
from tests.methods.rag_toys import PASSAGES, QUESTION, SHORT, TINY, make
from tests.methods.run import answer_of, events_of, play
from tests.methods.scripted_drafter import ScriptedDrafter

if TYPE_CHECKING:
    from specrag import LanguageModel


def count_passes(llm: LanguageModel, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """A list that gets the number of segments of every pass from now on."""
    segments: list[int] = []
    forward = llm.model.forward

    def counting(given: Sequence[Segment]) -> list[list[Row]]:
        segments.append(len(given))
        return forward(given)

    monkeypatch.setattr(llm.model, "forward", counting)
    return segments


@dataclass(frozen=True)
class Recorded:
    """An answer, and how many segments each pass had that it took."""

    answer: SpeculativeAnswer
    segments: Sequence[int]


@pytest.fixture(scope="module")
def recorded(exact_llm: LanguageModel) -> Recorded:
    with pytest.MonkeyPatch.context() as patch:
        segments = count_passes(exact_llm, patch)
        return Recorded(answer_of(make(exact_llm), QUESTION), segments)


@pytest.fixture(scope="module")
def answer(recorded: Recorded) -> SpeculativeAnswer:
    return recorded.answer


def test_the_best_draft_is_the_answer(answer: SpeculativeAnswer) -> None:
    totals = [draft.scores.total for draft in answer.drafts if draft.scores is not None]
    assert len(totals) == 3
    best = answer.drafts[totals.index(max(totals))]
    assert (answer.best, answer.text) == (best.number, best.answer)
    assert answer.ranked[0] == best
    assert any("Curie" in draft.answer for draft in answer.drafts)
    assert (answer.malformed, answer.fallback, answer.abstained) == (0, None, False)
    assert [source.number for source in answer.sources if source.cited] == sorted(best.sources)


def test_every_draft_has_a_passage_of_each_cluster(answer: SpeculativeAnswer) -> None:
    assert answer.sampling is not None
    clusters = answer.sampling.clusters
    assert clusters is not None
    assert len({frozenset(draft.sources) for draft in answer.drafts}) == 3
    for draft in answer.drafts:
        assert {clusters[number - 1] for number in draft.sources} == {0, 1}
    assert answer.sampling.encoder == "minilm-l6-v2, question and passage together"


def test_the_result_counts_tokens_and_seconds(answer: SpeculativeAnswer) -> None:
    timing, usage = answer.timing, answer.usage
    parts = timing.retrieval + timing.embedding + timing.clustering + timing.drafting + timing.verification
    assert 0 < parts <= timing.total
    assert timing.without_embedding == timing.total - timing.embedding
    assert timing.embedding > 0
    assert usage.drafter_prompt_tokens == sum(draft.prompt_tokens for draft in answer.drafts)
    # The instruction, the example and the question are read once.
    assert usage.drafter_read_tokens < 0.6 * usage.drafter_prompt_tokens
    assert usage.drafter_completion_tokens == sum(draft.completion_tokens for draft in answer.drafts)
    assert 0 < usage.verifier_read_tokens < usage.verifier_tokens


def test_drafts_keep_to_the_form_and_to_their_passages(answer: SpeculativeAnswer) -> None:
    for draft in answer.drafts:
        assert draft.text.count(CUE) == 1
        assert draft.completion_tokens <= SHORT["draft_tokens"]
        assert draft.rationale
        assert draft.answer


def test_the_drafters_confidence_is_that_of_its_text_read_anew(
    exact_llm: LanguageModel, answer: SpeculativeAnswer
) -> None:
    """The sum in rho_draft comes from the generation itself; here the same text is scored behind the same prompt."""
    for draft in answer.drafts:
        place = draft.text.index(CUE)
        prompt = exact_llm.tokenizer.chat_text(
            draft_prompt(Task(QUESTION), [PASSAGES[n - 1] for n in draft.sources], example=True)
        )
        parts = (
            TextPart("lead", LEAD, scored=False),
            TextPart("rationale", draft.text[:place]),
            TextPart("cue", CUE, scored=False),
            TextPart("answer", draft.text[place + len(CUE) :].rstrip()),
        )
        read = run(LocalScorer(exact_llm.loaded).scoring([ScoringRequest(prompt, parts)]))[0].parts
        assert draft.measured is not None
        assert draft.measured.rationale is not None
        assert draft.measured.answer is not None
        assert draft.measured.rationale.log_probs == pytest.approx(read["rationale"].log_probs, abs=1e-4)
        assert draft.measured.answer.log_probs == pytest.approx(read["answer"].log_probs, abs=1e-4)


def test_drafting_is_one_batch_and_verification_one_pass(recorded: Recorded) -> None:
    segments, drafts = recorded.segments, recorded.answer.drafts
    longest = max(draft.completion_tokens for draft in drafts)
    assert segments[-1] == 1  # the verification, a tree of all drafts
    # What prompts begin with, then the rest of each, then a pass a token of the longest draft.
    assert len(segments) <= longest + 5
    assert sum(count == 3 for count in segments) >= min(draft.completion_tokens for draft in drafts)


def test_neither_batch_nor_speculation_changes_a_draft(
    exact_llm: LanguageModel, answer: SpeculativeAnswer
) -> None:
    drafter = LocalGenerator(exact_llm, method="respec", share=False)
    other = answer_of(make(exact_llm, drafter=drafter), QUESTION)
    assert [draft.text for draft in other.drafts] == [draft.text for draft in answer.drafts]
    assert other.text == answer.text
    assert other.usage.drafter_passes < answer.usage.drafter_passes
    assert other.usage.drafter_read_tokens == other.usage.drafter_prompt_tokens


def test_the_stream_tells_everything_in_order(llm: LanguageModel) -> None:
    stream = play(make(llm, passages_per_draft=1, **TINY), QUESTION)
    events, found = stream.events, stream.answer
    assert isinstance(events[0], Sources)
    assert events[0].sources[0].passage is PASSAGES[0]
    assert isinstance(events[1], SubsetsDrawn)
    assert events[1].subsets == tuple(draft.sources for draft in found.drafts)
    for draft in found.drafts:
        pieces = [e.text for e in events if isinstance(e, DraftDelta) and e.draft == draft.number]
        assert "".join(pieces).startswith(draft.text)
        assert len(pieces) > 3
    done = [event.draft.number for event in events if isinstance(event, DraftDone)]
    assert sorted(done) == [1, 2, 3]
    assert events[-2] == DraftsScored(found.drafts)
    assert events[-1] == Verdict(found.text, found.best, None)


def test_asynchronous_callers_get_the_same(llm: LanguageModel) -> None:
    method = SpeculativeRAG(passages_per_draft=1, drafts=2, draft_tokens=TINY["draft_tokens"])

    async def ask() -> list[object]:
        return [event async for event in llm.astream(QUESTION, method=method, passages=PASSAGES)]

    events = asyncio.run(ask())
    assert isinstance(events[-1], Result)
    assert isinstance(events[-1].details, SpeculativeAnswer)
    assert isinstance(events[-2], Verdict)
    assert events[-1].text == events[-2].text


def test_leaving_a_stream_ends_the_request(llm: LanguageModel, monkeypatch: pytest.MonkeyPatch) -> None:
    stream = events_of(make(llm, passages_per_draft=1, **TINY), QUESTION)
    for event in stream:
        if isinstance(event, DraftDelta):
            break
    stream.close()
    passes = count_passes(llm, monkeypatch)
    llm.generate("Hello", max_tokens=2, method="plain")
    assert passes == [1, 1]  # nothing of the drafts runs on


def test_a_timeout_ends_the_request(llm: LanguageModel) -> None:
    with pytest.raises(DeadlineExceeded):
        llm.generate(QUESTION, method=SpeculativeRAG(strategy="random"), passages=PASSAGES, timeout=0.01)


# -- forms ------------------------------------------------------------------------------------------------------


def test_malformed_drafts_are_counted_and_come_last(exact_llm: LanguageModel) -> None:
    drafter = ScriptedDrafter(["", " I think so.", " It is unlikely.\nAnswer: xyzzy qwfp"], log_prob=-9.0)
    found = answer_of(make(exact_llm, drafter=drafter, passages_per_draft=1), QUESTION)
    assert found.malformed == 2
    assert (found.text, found.best, found.fallback) == ("xyzzy qwfp", 3, None)
    assert [draft.number for draft in found.ranked] == [3, 1, 2]
    assert [draft.malformed for draft in found.drafts] == [
        "it holds no rationale",
        "it holds no line that begins with 'Answer:'",
        None,
    ]


def test_where_no_draft_keeps_to_the_form_the_first_text_is_given(exact_llm: LanguageModel) -> None:
    drafter = ScriptedDrafter(["", "  Marie\n Curie ", "Pierre"])
    found = answer_of(make(exact_llm, drafter=drafter, passages_per_draft=1), QUESTION)
    assert (found.text, found.best, found.malformed) == ("Marie Curie", None, 3)
    assert found.fallback == "no draft keeps to the form; this is draft 2 as it was written"
    assert found.usage.verifier_read_tokens == 0


def test_empty_drafts(exact_llm: LanguageModel) -> None:
    found = answer_of(
        make(exact_llm, drafter=ScriptedDrafter(["", " ", "\n"]), passages_per_draft=1), QUESTION
    )
    assert (found.text, found.best, found.fallback) == (NO_DRAFT, None, "all drafts are empty")


# -- tasks ------------------------------------------------------------------------------------------------------


def test_options_are_shown_and_their_text_is_verified(exact_llm: LanguageModel) -> None:
    task = Task(QUESTION, "multiple-choice", {"A": "Isaac Newton", "B": "Marie Curie"})
    drafter = ScriptedDrafter([" She found it.\nAnswer: B", " He did.\nAnswer: A", " Who?\nAnswer: C"])
    found = answer_of(make(exact_llm, drafter=drafter, passages_per_draft=1), task)
    assert [draft.answer for draft in found.drafts] == ["B", "A", ""]
    assert found.drafts[2].malformed == "its answer is none of A, B"
    assert found.text in ("A", "B")
    measured = found.drafts[0].measured
    assert measured is not None
    assert measured.self_contain is not None
    words = exact_llm.tokenizer.encode(" B. Marie Curie She found it.", special=False)
    assert measured.self_contain.count == len(words)


def test_a_claim_is_checked_by_a_real_drafter(llm: LanguageModel) -> None:
    task = Task("Marie Curie discovered radium.", "claim-checking")
    found = answer_of(make(llm, PASSAGES[:2], passages_per_draft=1, drafts=2), task)
    assert all(draft.answer in task.labels for draft in found.drafts)
    assert found.text in task.labels
    assert all(draft.finish_reason == "stop" for draft in found.drafts)
