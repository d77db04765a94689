"""Speculative RAG with real models: drafts, scores, verdict, and what happens where something is missing."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from specrag.engine.executor import run
from specrag.engine.outputs import Row
from specrag.engine.passes import Segment
from specrag.errors import ContextLengthError, DeadlineExceeded, EndpointUnavailable, InputError
from specrag.methods.answer import ABSTENTION, Sources
from specrag.methods.draft_format import CUE, LEAD, draft_prompt
from specrag.methods.draft_scores import Scoring
from specrag.methods.draft_task import Task
from specrag.methods.drafting import Drafting
from specrag.methods.local_generator import LocalGenerator
from specrag.methods.retriever import GivenPassages
from specrag.methods.speculative_rag import SpeculativeRAG
from specrag.methods.speculative_result import (
    NO_DRAFT,
    DraftDelta,
    DraftDone,
    DraftsScored,
    SpeculativeAnswer,
    SubsetsDrawn,
    Verdict,
)
from specrag.models.roles import ScoringRequest, TextPart
from specrag.models.scoring import LocalScorer
from specrag.retrieval.knowledge_base import KnowledgeBase
from tests.methods.rag_toys import CONFIDENCE, PASSAGES, QUESTION, SHORT, TINY, make
from tests.methods.scripted_drafter import ScriptedDrafter
from tests.sample import build_sample

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
        return Recorded(make(exact_llm).answer(QUESTION, passages=PASSAGES), segments)


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
        assert draft.completion_tokens <= SHORT.max_tokens
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
    other = make(exact_llm, drafter=drafter).answer(QUESTION, passages=PASSAGES)
    assert [draft.text for draft in other.drafts] == [draft.text for draft in answer.drafts]
    assert other.text == answer.text
    assert other.usage.drafter_passes < answer.usage.drafter_passes
    assert other.usage.drafter_read_tokens == other.usage.drafter_prompt_tokens


def test_the_stream_tells_everything_in_order(llm: LanguageModel) -> None:
    events = []
    stream = make(llm, k=1, drafting=TINY).stream(QUESTION, passages=PASSAGES)
    while True:
        try:
            events.append(next(stream))
        except StopIteration as end:
            found: SpeculativeAnswer = end.value
            break
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
    async def ask() -> list[object]:
        return [
            event async for event in make(llm, k=1, m=2, drafting=TINY).astream(QUESTION, passages=PASSAGES)
        ]

    events = asyncio.run(ask())
    assert isinstance(events[-1], SpeculativeAnswer)
    assert isinstance(events[-2], Verdict)
    assert events[-1].text == events[-2].text


def test_leaving_a_stream_ends_the_request(llm: LanguageModel, monkeypatch: pytest.MonkeyPatch) -> None:
    stream = make(llm, k=1, drafting=TINY).stream(QUESTION, passages=PASSAGES)
    for event in stream:
        if isinstance(event, DraftDelta):
            break
    stream.close()
    passes = count_passes(llm, monkeypatch)
    llm.generate("Hello", max_tokens=2)
    assert len(passes) == 3  # nothing of the drafts runs on


def test_a_timeout_ends_the_request(llm: LanguageModel) -> None:
    with pytest.raises(DeadlineExceeded):
        make(llm, strategy="random").answer(QUESTION, passages=PASSAGES, timeout=0.01)


# -- forms ------------------------------------------------------------------------------------------------------


def test_malformed_drafts_are_counted_and_come_last(exact_llm: LanguageModel) -> None:
    drafter = ScriptedDrafter(["", " I think so.", " It is unlikely.\nAnswer: xyzzy qwfp"], log_prob=-9.0)
    found = make(exact_llm, drafter=drafter, k=1).answer(QUESTION, passages=PASSAGES)
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
    found = make(exact_llm, drafter=drafter, k=1).answer(QUESTION, passages=PASSAGES)
    assert (found.text, found.best, found.malformed) == ("Marie Curie", None, 3)
    assert found.fallback == "no draft keeps to the form; this is draft 2 as it was written"
    assert found.usage.verifier_read_tokens == 0


def test_empty_drafts(exact_llm: LanguageModel) -> None:
    found = make(exact_llm, drafter=ScriptedDrafter(["", " ", "\n"]), k=1).answer(QUESTION, passages=PASSAGES)
    assert (found.text, found.best, found.fallback) == (NO_DRAFT, None, "all drafts are empty")


# -- tasks ------------------------------------------------------------------------------------------------------


def test_options_are_shown_and_their_text_is_verified(exact_llm: LanguageModel) -> None:
    task = Task(QUESTION, "multiple-choice", {"A": "Isaac Newton", "B": "Marie Curie"})
    drafter = ScriptedDrafter([" She found it.\nAnswer: B", " He did.\nAnswer: A", " Who?\nAnswer: C"])
    found = make(exact_llm, drafter=drafter, k=1).answer(task, passages=PASSAGES)
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
    found = make(llm, k=1, m=2).answer(task, passages=PASSAGES[:2])
    assert all(draft.answer in task.labels for draft in found.drafts)
    assert found.text in task.labels
    assert all(draft.finish_reason == "stop" for draft in found.drafts)


# -- missing and bad ---------------------------------------------------------------------------------------------


def test_one_passage_and_duplicates(exact_llm: LanguageModel) -> None:
    twice = [PASSAGES[0], replace(PASSAGES[0], id=9, title="Copy", text=PASSAGES[0].text + " ")]
    drafter = ScriptedDrafter([" It says so.\nAnswer: Curie"] * 5)
    found = make(exact_llm, drafter=drafter, m=5).answer(QUESTION, passages=twice)
    assert [source.passage.title for source in found.sources] == ["Marie Curie"]
    assert [draft.sources for draft in found.drafts] == [(1,)]
    assert found.sampling is not None
    assert found.sampling.notes == (
        "1 of the passages found say the same as others and were left out",
        "k is 1 in place of 2: there are no more passages",
        "m is 1 in place of 5: there are no more distinct subsets",
    )


def test_at_most_n_passages_are_used(exact_llm: LanguageModel) -> None:
    drafter = ScriptedDrafter([" It says so.\nAnswer: Curie"] * 5)
    found = make(exact_llm, drafter=drafter, m=5, k=1, passages=2).answer(QUESTION, passages=PASSAGES)
    assert len(found.sources) == len(found.drafts) == 2


def test_nothing_found_is_an_abstention(exact_llm: LanguageModel) -> None:
    found = make(exact_llm, knowledge_base=GivenPassages([])).answer(QUESTION)
    assert (found.text, found.abstained, found.drafts) == (ABSTENTION, True, ())


def test_passages_that_are_given_are_answered_from_however_unlike(
    llm: LanguageModel, model_home: Path, tmp_path: Path
) -> None:
    with KnowledgeBase.open(build_sample(tmp_path / "kb")) as kb:
        rag = SpeculativeRAG(llm, llm, kb, m=1, k=1, passages=3, drafting=SHORT, min_score=0.9)
        found = rag.answer("How do I reset my router password?")
        assert (found.text, found.abstained, len(found.sources)) == (ABSTENTION, True, 3)
        assert not rag.answer("How do I reset my router?", passages=PASSAGES[3:]).abstained
        assert rag.vectors.name.startswith(kb.encoder().name)


class Narrow(LocalGenerator):
    """A drafter of few tokens."""

    @property
    def context_length(self) -> int:
        return 420


def test_long_passages_are_shortened_and_it_is_said(llm: LanguageModel) -> None:
    long = [replace(PASSAGES[0], text=PASSAGES[0].text + " It is so." * 90), PASSAGES[2]]
    found = make(llm, drafter=Narrow(llm), strategy="random", k=2).answer(QUESTION, passages=long)
    assert [draft.shortened for draft in found.drafts] == [True]
    assert 340 < found.drafts[0].prompt_tokens <= 420 - SHORT.max_tokens
    whole = make(llm, drafter=Narrow(llm), strategy="random", k=1, m=1)
    assert not whole.answer(QUESTION, passages=[PASSAGES[2]]).drafts[0].shortened


def test_a_question_without_room_for_a_passage(llm: LanguageModel) -> None:
    rag = make(llm, drafter=Narrow(llm), strategy="random")
    with pytest.raises(ContextLengthError, match=r"tokens before any passage and room for 388; shorten"):
        rag.answer("Why? " * 200, passages=PASSAGES)


def test_a_drafter_that_dies_in_the_middle(exact_llm: LanguageModel) -> None:
    dead = EndpointUnavailable("endpoint: it went away")
    drafter = ScriptedDrafter([" It says so.\nAnswer: Curie"] * 3, dies=dead)
    rag = make(exact_llm, drafter=drafter, k=1)
    with pytest.raises(EndpointUnavailable, match="it went away"):
        rag.answer(QUESTION, passages=PASSAGES)
    drafter.dies = None
    assert rag.answer(QUESTION, passages=PASSAGES).text == "Curie"


def test_a_drafter_without_log_probabilities(exact_llm: LanguageModel) -> None:
    drafter = ScriptedDrafter([" It says so.\nAnswer: Curie"] * 3, log_prob=None)
    with pytest.raises(
        InputError, match="its model gives no log-probabilities: leave the draft's factor out"
    ):
        make(exact_llm, drafter=drafter, k=1).answer(QUESTION, passages=PASSAGES)
    rag = make(exact_llm, drafter=drafter, k=1, scoring=Scoring(draft=False))
    assert rag.answer(QUESTION, passages=PASSAGES).text == "Curie"


def test_a_verifier_that_cannot_score_is_refused_before_drafting(exact_llm: LanguageModel) -> None:
    class Mute(LocalScorer):
        def check_scoring(self) -> None:
            raise InputError("verifier", self.name, "it cannot score")

    drafter = ScriptedDrafter([" It says so.\nAnswer: Curie"] * 3)
    rag = SpeculativeRAG(drafter, Mute(exact_llm.loaded), k=1)
    with pytest.raises(InputError, match="it cannot score"):
        rag.answer(QUESTION, passages=PASSAGES)
    assert not drafter.requests
    with pytest.raises(InputError, match="it cannot score"):
        rag.prepare()


def test_the_drafter_alone(exact_llm: LanguageModel) -> None:
    texts = [" It says so.\nAnswer: Curie", " It is so.\nAnswer: Pierre"]
    found = SpeculativeRAG(ScriptedDrafter(texts), None, m=2, k=1, scoring=CONFIDENCE).answer(
        QUESTION, passages=PASSAGES
    )
    assert found.verifier is None
    assert found.text == "Curie"
    with pytest.raises(InputError, match="give a model, or a scoring of the drafter's confidence alone"):
        SpeculativeRAG(LocalGenerator(exact_llm), None)


def test_bad_values(exact_llm: LanguageModel) -> None:
    rag = make(exact_llm)
    for passages, said in (([], "give at least one passage"), (None, "give passages, or a knowledge base")):
        with pytest.raises(InputError, match=said):
            rag.answer(QUESTION, passages=passages)
    with pytest.raises(InputError, match="give at least one word"):
        rag.answer(" ", passages=PASSAGES)
    with pytest.raises(InputError, match="timeout: 0 is not usable"):
        rag.answer(QUESTION, passages=PASSAGES, timeout=0)
    with pytest.raises(InputError, match="passages: 0 is not usable"):
        make(exact_llm, passages=0)
    with pytest.raises(InputError, match="leave draft, self_contain or self_reflect switched on"):
        Scoring(draft=False, self_contain=False, self_reflect=False)
    with pytest.raises(InputError, match="take one of rationale, passages, both, all-passages"):
        Scoring(evidence="all")  # type: ignore[arg-type]
    with pytest.raises(InputError, match="give fewer than max_tokens, 40, or no answer would fit"):
        Drafting(max_tokens=40, rationale_tokens=40)
