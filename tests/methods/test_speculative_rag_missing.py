"""Speculative RAG where something is missing, too long, bad or dies."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from specrag.errors import ContextLengthError, EndpointUnavailable, InputError
from specrag.methods.generator import LocalGenerator
from specrag.methods.passages import retrieval
from specrag.methods.resources import Resources
from specrag.methods.retriever import GivenPassages
from specrag.methods.speculative_rag import SpeculativeRAG
from specrag.methods.speculative_rag.drafting import Drafting
from specrag.methods.speculative_rag.pipeline import SpeculativeRAGPipeline
from specrag.methods.speculative_rag.scoring import Scoring
from specrag.models.scoring import LocalScorer
from specrag.request import ABSTENTION, Request, SearchOptions
from specrag.retrieval.knowledge_base import KnowledgeBase
from specrag.retrieval.passage import Passage
from tests.methods.rag_toys import CONFIDENCE, PASSAGES, QUESTION, SHORT, among, make, paper
from tests.methods.run import answer_of
from tests.methods.scripted_drafter import ScriptedDrafter
from tests.sample import build_sample

if TYPE_CHECKING:
    from specrag import LanguageModel


def test_one_passage_and_duplicates(exact_llm: LanguageModel) -> None:
    twice = [PASSAGES[0], replace(PASSAGES[0], id=9, title="Copy", text=PASSAGES[0].text + " ")]
    drafter = ScriptedDrafter([" It says so.\nAnswer: Curie"] * 5)
    found = answer_of(make(exact_llm, twice, drafter=drafter, drafts=5), QUESTION)
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
    found = answer_of(make(exact_llm, drafter=drafter, drafts=5, passages_per_draft=1, n=2), QUESTION)
    assert len(found.sources) == len(found.drafts) == 2


def test_nothing_found_is_an_abstention(exact_llm: LanguageModel) -> None:
    rag = make(exact_llm)
    rag.retrieval = replace(rag.retrieval, retriever=GivenPassages([]), abstain=True)
    found = answer_of(rag, QUESTION)
    assert (found.text, found.abstained, found.drafts) == (ABSTENTION, True, ())


def test_passages_that_are_given_are_answered_from_however_unlike(
    llm: LanguageModel, model_home: Path, tmp_path: Path
) -> None:
    with KnowledgeBase.open(build_sample(tmp_path / "kb")) as kb:
        options = paper(drafts=1, passages_per_draft=1)

        def over(passages: Sequence[Passage] | None) -> SpeculativeRAGPipeline:
            search = SearchOptions(k=3, min_score=0.9 if passages is None else None)
            request = Request(QUESTION, search=search, passages=passages)
            found = retrieval(request, Resources(retriever=kb), "speculative-rag")
            return SpeculativeRAGPipeline(llm, llm, found, options)

        rag = over(None)
        found = answer_of(rag, "How do I reset my router password?")
        assert (found.text, found.abstained, len(found.sources)) == (ABSTENTION, True, 3)
        assert not answer_of(over(PASSAGES[3:]), "How do I reset my router?").abstained
        assert rag.vectors.name.startswith(kb.encoder().name)


class Narrow(LocalGenerator):
    """A drafter of few tokens."""

    @property
    def context_length(self) -> int:
        return 420


def test_long_passages_are_shortened_and_it_is_said(llm: LanguageModel) -> None:
    long = [replace(PASSAGES[0], text=PASSAGES[0].text + " It is so." * 90), PASSAGES[2]]
    found = answer_of(make(llm, long, drafter=Narrow(llm), strategy="random"), QUESTION)
    assert [draft.shortened for draft in found.drafts] == [True]
    assert 340 < found.drafts[0].prompt_tokens <= 420 - SHORT["draft_tokens"]
    whole = make(llm, [PASSAGES[2]], drafter=Narrow(llm), strategy="random", passages_per_draft=1, drafts=1)
    assert not answer_of(whole, QUESTION).drafts[0].shortened


def test_a_question_without_room_for_a_passage(llm: LanguageModel) -> None:
    rag = make(llm, drafter=Narrow(llm), strategy="random")
    with pytest.raises(ContextLengthError, match=r"tokens before any passage and room for 388; shorten"):
        answer_of(rag, "Why? " * 200)


def test_a_drafter_that_dies_in_the_middle(exact_llm: LanguageModel) -> None:
    dead = EndpointUnavailable("endpoint: it went away")
    drafter = ScriptedDrafter([" It says so.\nAnswer: Curie"] * 3, dies=dead)
    rag = make(exact_llm, drafter=drafter, passages_per_draft=1)
    with pytest.raises(EndpointUnavailable, match="it went away"):
        answer_of(rag, QUESTION)
    drafter.dies = None
    assert answer_of(rag, QUESTION).text == "Curie"


def test_a_drafter_without_log_probabilities(exact_llm: LanguageModel) -> None:
    drafter = ScriptedDrafter([" It says so.\nAnswer: Curie"] * 3, log_prob=None)
    with pytest.raises(
        InputError, match="its model gives no log-probabilities: leave the draft's factor out"
    ):
        answer_of(make(exact_llm, drafter=drafter, passages_per_draft=1), QUESTION)
    rag = make(exact_llm, drafter=drafter, passages_per_draft=1, without=("draft",))
    assert answer_of(rag, QUESTION).text == "Curie"


def test_a_verifier_that_cannot_score_is_refused_before_drafting(exact_llm: LanguageModel) -> None:
    class Mute(LocalScorer):
        def check_scoring(self) -> None:
            raise InputError("verifier", self.name, "it cannot score")

    drafter = ScriptedDrafter([" It says so.\nAnswer: Curie"] * 3)
    rag = make(exact_llm, drafter=drafter, verifier=Mute(exact_llm.loaded), passages_per_draft=1)
    with pytest.raises(InputError, match="it cannot score"):
        answer_of(rag, QUESTION)
    assert not drafter.requests


def test_the_drafter_alone(exact_llm: LanguageModel) -> None:
    texts = [" It says so.\nAnswer: Curie", " It is so.\nAnswer: Pierre"]
    options = paper(drafts=2, passages_per_draft=1, **CONFIDENCE)
    found = answer_of(
        SpeculativeRAGPipeline(ScriptedDrafter(texts), None, among(PASSAGES), options), QUESTION
    )
    assert found.verifier is None
    assert found.text == "Curie"
    with pytest.raises(InputError, match="give a model, or a scoring of the drafter's confidence alone"):
        SpeculativeRAGPipeline(LocalGenerator(exact_llm), None, among(PASSAGES), paper())


def test_bad_values(exact_llm: LanguageModel) -> None:
    calls: list[tuple[dict[str, Any], str]] = [
        ({"passages": []}, "passages: .* give at least one passage"),
        ({}, "kb: None is not usable: name a knowledge base"),
        ({"passages": PASSAGES, "timeout": 0}, "timeout: 0 is not usable"),
        ({"passages": PASSAGES, "k": 0}, "k: 0 is not usable"),
    ]
    for call, said in calls:
        with pytest.raises(InputError, match=said):
            exact_llm.generate(QUESTION, method="speculative-rag", **call)
    with pytest.raises(InputError, match="give at least one word"):
        answer_of(make(exact_llm), " ")
    with pytest.raises(InputError, match="leave draft, self_contain or self_reflect switched on"):
        Scoring(draft=False, self_contain=False, self_reflect=False)
    with pytest.raises(InputError, match="give fewer than max_tokens, 40, or no answer would fit"):
        Drafting(max_tokens=40, rationale_tokens=40)


@pytest.mark.parametrize(
    ("values", "said"),
    [
        ({"drafts": 0}, "drafts: 0 is not usable: give a whole number from 1 to 16"),
        ({"passages_per_draft": True}, "passages_per_draft: True is not usable"),
        ({"strategy": "topics"}, "give one of multi-perspective, balanced, random"),
        ({"evidence": "all"}, "give one of rationale, passages, both, all-passages"),
        ({"draft_tokens": 0}, "draft_tokens: 0 is not usable: give a whole number from 16"),
        ({"rationale_tokens": 0}, "rationale_tokens: 0 is not usable: give a whole number from 1"),
    ],
)
def test_options_that_cannot_be_used(values: dict[str, Any], said: str) -> None:
    with pytest.raises(InputError, match=said):
        SpeculativeRAG(**values)
