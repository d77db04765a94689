"""Speculative RAG where something is missing, too long, bad or dies."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from specrag.errors import ContextLengthError, EndpointUnavailable, InputError
from specrag.methods.generator import LocalGenerator
from specrag.methods.retriever import GivenPassages
from specrag.methods.speculative_rag.drafting import Drafting
from specrag.methods.speculative_rag.pipeline import SpeculativeRAGPipeline
from specrag.methods.speculative_rag.scoring import Scoring
from specrag.models.scoring import LocalScorer
from specrag.request import ABSTENTION
from specrag.retrieval.knowledge_base import KnowledgeBase
from tests.methods.rag_toys import CONFIDENCE, PASSAGES, QUESTION, SHORT, make
from tests.methods.run import answer_of
from tests.methods.scripted_drafter import ScriptedDrafter
from tests.sample import build_sample

if TYPE_CHECKING:
    from specrag import LanguageModel


def test_one_passage_and_duplicates(exact_llm: LanguageModel) -> None:
    twice = [PASSAGES[0], replace(PASSAGES[0], id=9, title="Copy", text=PASSAGES[0].text + " ")]
    drafter = ScriptedDrafter([" It says so.\nAnswer: Curie"] * 5)
    found = answer_of(make(exact_llm, drafter=drafter, m=5), QUESTION, passages=twice)
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
    found = answer_of(make(exact_llm, drafter=drafter, m=5, k=1, passages=2), QUESTION, passages=PASSAGES)
    assert len(found.sources) == len(found.drafts) == 2


def test_nothing_found_is_an_abstention(exact_llm: LanguageModel) -> None:
    found = answer_of(make(exact_llm, knowledge_base=GivenPassages([])), QUESTION)
    assert (found.text, found.abstained, found.drafts) == (ABSTENTION, True, ())


def test_passages_that_are_given_are_answered_from_however_unlike(
    llm: LanguageModel, model_home: Path, tmp_path: Path
) -> None:
    with KnowledgeBase.open(build_sample(tmp_path / "kb")) as kb:
        rag = SpeculativeRAGPipeline(llm, llm, kb, m=1, k=1, passages=3, drafting=SHORT, min_score=0.9)
        found = answer_of(rag, "How do I reset my router password?")
        assert (found.text, found.abstained, len(found.sources)) == (ABSTENTION, True, 3)
        assert not answer_of(rag, "How do I reset my router?", passages=PASSAGES[3:]).abstained
        assert rag.vectors.name.startswith(kb.encoder().name)


class Narrow(LocalGenerator):
    """A drafter of few tokens."""

    @property
    def context_length(self) -> int:
        return 420


def test_long_passages_are_shortened_and_it_is_said(llm: LanguageModel) -> None:
    long = [replace(PASSAGES[0], text=PASSAGES[0].text + " It is so." * 90), PASSAGES[2]]
    found = answer_of(make(llm, drafter=Narrow(llm), strategy="random", k=2), QUESTION, passages=long)
    assert [draft.shortened for draft in found.drafts] == [True]
    assert 340 < found.drafts[0].prompt_tokens <= 420 - SHORT.max_tokens
    whole = make(llm, drafter=Narrow(llm), strategy="random", k=1, m=1)
    assert not answer_of(whole, QUESTION, passages=[PASSAGES[2]]).drafts[0].shortened


def test_a_question_without_room_for_a_passage(llm: LanguageModel) -> None:
    rag = make(llm, drafter=Narrow(llm), strategy="random")
    with pytest.raises(ContextLengthError, match=r"tokens before any passage and room for 388; shorten"):
        answer_of(rag, "Why? " * 200, passages=PASSAGES)


def test_a_drafter_that_dies_in_the_middle(exact_llm: LanguageModel) -> None:
    dead = EndpointUnavailable("endpoint: it went away")
    drafter = ScriptedDrafter([" It says so.\nAnswer: Curie"] * 3, dies=dead)
    rag = make(exact_llm, drafter=drafter, k=1)
    with pytest.raises(EndpointUnavailable, match="it went away"):
        answer_of(rag, QUESTION, passages=PASSAGES)
    drafter.dies = None
    assert answer_of(rag, QUESTION, passages=PASSAGES).text == "Curie"


def test_a_drafter_without_log_probabilities(exact_llm: LanguageModel) -> None:
    drafter = ScriptedDrafter([" It says so.\nAnswer: Curie"] * 3, log_prob=None)
    with pytest.raises(
        InputError, match="its model gives no log-probabilities: leave the draft's factor out"
    ):
        answer_of(make(exact_llm, drafter=drafter, k=1), QUESTION, passages=PASSAGES)
    rag = make(exact_llm, drafter=drafter, k=1, scoring=Scoring(draft=False))
    assert answer_of(rag, QUESTION, passages=PASSAGES).text == "Curie"


def test_a_verifier_that_cannot_score_is_refused_before_drafting(exact_llm: LanguageModel) -> None:
    class Mute(LocalScorer):
        def check_scoring(self) -> None:
            raise InputError("verifier", self.name, "it cannot score")

    drafter = ScriptedDrafter([" It says so.\nAnswer: Curie"] * 3)
    rag = SpeculativeRAGPipeline(drafter, Mute(exact_llm.loaded), k=1)
    with pytest.raises(InputError, match="it cannot score"):
        answer_of(rag, QUESTION, passages=PASSAGES)
    assert not drafter.requests
    with pytest.raises(InputError, match="it cannot score"):
        rag.prepare()


def test_the_drafter_alone(exact_llm: LanguageModel) -> None:
    texts = [" It says so.\nAnswer: Curie", " It is so.\nAnswer: Pierre"]
    found = answer_of(
        SpeculativeRAGPipeline(ScriptedDrafter(texts), None, m=2, k=1, scoring=CONFIDENCE),
        QUESTION,
        passages=PASSAGES,
    )
    assert found.verifier is None
    assert found.text == "Curie"
    with pytest.raises(InputError, match="give a model, or a scoring of the drafter's confidence alone"):
        SpeculativeRAGPipeline(LocalGenerator(exact_llm), None)


def test_bad_values(exact_llm: LanguageModel) -> None:
    rag = make(exact_llm)
    for passages, said in (([], "give at least one passage"), (None, "give passages, or a knowledge base")):
        with pytest.raises(InputError, match=said):
            answer_of(rag, QUESTION, passages=passages)
    with pytest.raises(InputError, match="give at least one word"):
        answer_of(rag, " ", passages=PASSAGES)
    with pytest.raises(InputError, match="timeout: 0 is not usable"):
        exact_llm.generate(QUESTION, method="speculative-rag", passages=PASSAGES, timeout=0)
    with pytest.raises(InputError, match="passages: 0 is not usable"):
        make(exact_llm, passages=0)
    with pytest.raises(InputError, match="leave draft, self_contain or self_reflect switched on"):
        Scoring(draft=False, self_contain=False, self_reflect=False)
    with pytest.raises(InputError, match="take one of rationale, passages, both, all-passages"):
        Scoring(evidence="all")  # type: ignore[arg-type]
    with pytest.raises(InputError, match="give fewer than max_tokens, 40, or no answer would fit"):
        Drafting(max_tokens=40, rationale_tokens=40)
