"""The scores of drafts: their factors, and what the verifier reads for them."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest

from specrag.engine.executor import run
from specrag.methods.prompts import build_prompt
from specrag.methods.speculative_rag.form import CUE
from specrag.methods.speculative_rag.scoring import (
    STATEMENTS,
    Measured,
    Scores,
    Scoring,
    log_add_exp,
    score,
)
from specrag.models.roles import PartScore, ScoringRequest, TextPart
from specrag.models.scoring import LocalScorer
from tests.methods.rag_toys import PASSAGES, QUESTION, make
from tests.methods.run import answer_of
from tests.methods.scripted_drafter import ScriptedDrafter

if TYPE_CHECKING:
    from specrag import LanguageModel

MEASURED = Measured(
    rationale=PartScore((-1.0, -2.0)),
    answer=PartScore((-0.5,)),
    self_contain=PartScore((-3.0, -1.0)),
    self_reflect=PartScore((-0.25,)),
)


def test_factors() -> None:
    product = score(MEASURED, Scoring())
    draft = math.log(math.exp(-3.0) + math.exp(-0.5))
    assert product.draft == pytest.approx(draft)
    assert (product.self_contain, product.self_reflect) == (-4.0, -0.25)
    assert product.total == pytest.approx(draft - 4.25)
    mean = score(MEASURED, Scoring(length_normalized=True))
    assert mean.draft == pytest.approx(math.log(math.exp(-1.5) + math.exp(-0.5)))
    assert mean.self_contain == -2.0


@pytest.mark.parametrize("factor", ["draft", "self_contain", "self_reflect"])
def test_each_factor_can_be_left_out(factor: str) -> None:
    whole = score(MEASURED, Scoring())
    switches: dict[str, Any] = {factor: False}
    without = score(MEASURED, Scoring(**switches))
    assert getattr(without, factor) is None
    assert without.total == pytest.approx(whole.total - getattr(whole, factor))


def test_probabilities_that_would_underflow_do_not() -> None:
    assert log_add_exp(-2000.0, -2000.0) == pytest.approx(-2000 + math.log(2))
    assert log_add_exp(-1.0, -5000.0) == -1.0
    assert log_add_exp(-math.inf, -math.inf) == -math.inf


@pytest.mark.parametrize("evidence", ["passages", "both"])
def test_the_verifier_can_read_the_passages(exact_llm: LanguageModel, evidence: Any) -> None:
    drafter = ScriptedDrafter([" It says so.\nAnswer: Marie Curie"] * 2)
    two: dict[str, Any] = {"drafter": drafter, "drafts": 2, "passages_per_draft": 1}
    found = answer_of(make(exact_llm, **two, evidence=evidence), QUESTION)
    alone = answer_of(make(exact_llm, **two), QUESTION)
    for draft, other in zip(found.drafts, alone.drafts, strict=True):
        assert draft.measured is not None
        assert other.measured is not None
        assert draft.measured.self_contain is not None
        assert other.measured.self_contain is not None
        passage = PASSAGES[draft.sources[0] - 1]
        read = len(exact_llm.tokenizer.encode(f" {passage.title}\n{passage.text}", special=False))
        reason = len(exact_llm.tokenizer.encode(" It says so.", special=False))
        expected = other.measured.self_contain.count + read - (reason if evidence == "passages" else 0)
        assert draft.measured.self_contain.count == expected
    # The passage that names her makes the answer more believable than the others.
    assert len({draft.scores.total for draft in found.drafts if draft.scores}) == 2


def test_the_verifier_can_read_all_passages_once_for_all_drafts(exact_llm: LanguageModel) -> None:
    drafter = ScriptedDrafter([" No idea.\nAnswer: Marie Curie", " None.\nAnswer: the Danube"])
    rag = make(exact_llm, drafter=drafter, drafts=2, passages_per_draft=1, evidence="all-passages")
    found = answer_of(rag, QUESTION)
    encode = exact_llm.tokenizer.encode
    texts = "\n".join(f"{passage.title}\n{passage.text}" for passage in PASSAGES)
    for draft in found.drafts:
        assert draft.measured is not None
        assert draft.measured.self_contain is not None
        assert draft.measured.self_contain.count == len(encode(f" {draft.answer}", special=False))
    assert found.best == 1  # what the passages say, whichever of them a draft has seen
    together = len(encode(texts, special=False))
    assert found.usage.verifier_tokens > 2 * together
    assert together < found.usage.verifier_read_tokens < 1.6 * together


def test_a_draft_can_count_as_the_verifiers_own_answer(exact_llm: LanguageModel) -> None:
    drafter = ScriptedDrafter(
        [" None.\nAnswer: the Danube", " No idea.\nAnswer: Marie Curie discovered radium."]
    )
    own: dict[str, Any] = {
        "without": ("draft", "self-reflect"),
        "evidence": "best-passages",
        "length_normalized": True,
    }
    two: dict[str, Any] = {"drafter": drafter, "drafts": 2, "passages_per_draft": 1}
    passages = [*PASSAGES, replace(PASSAGES[0], id=9, text="A sixth passage.")]
    found = answer_of(make(exact_llm, passages, **two, **own), QUESTION)
    prompt = exact_llm.tokenizer.chat_text(build_prompt(QUESTION, PASSAGES))
    for draft in found.drafts:
        request = ScoringRequest(prompt, (TextPart("said", draft.answer),))
        (expected,) = run(LocalScorer(exact_llm.loaded).scoring([request]))
        assert draft.scores is not None
        assert draft.scores.total == draft.scores.self_contain
        assert draft.scores.total == pytest.approx(expected.parts["said"].mean, abs=1e-4)
    assert found.text == "Marie Curie discovered radium."
    # The passages are read once for both, and nothing is asked behind the answers.
    (first, second) = found.drafts
    together = len(exact_llm.encode(build_prompt(QUESTION, PASSAGES)))
    assert first.measured is not None
    assert second.measured is not None
    assert together < found.usage.verifier_read_tokens < together + 20

    asked: dict[str, Any] = {**own, "without": ("draft",)}
    (scored, _) = answer_of(make(exact_llm, passages, **two, **asked), QUESTION).drafts
    assert scored.scores is not None
    assert scored.scores.self_reflect is not None


def test_permuted_drafts_get_the_same_scores(exact_llm: LanguageModel) -> None:
    texts = [
        " Marie Curie found it in 1898.\nAnswer: Marie Curie",
        " The Danube is a river.\nAnswer: the Danube",
        " no form at all",
        " It was found in Paris.\nAnswer: Pierre",
    ]

    def scores(order: list[int]) -> dict[str, Scores | None]:
        drafter = ScriptedDrafter([texts[place] for place in order])
        found = answer_of(make(exact_llm, drafter=drafter, drafts=4, passages_per_draft=1), QUESTION)
        return {draft.text: draft.scores for draft in found.drafts}

    first, second = scores([0, 1, 2, 3]), scores([3, 2, 0, 1])
    for text in texts:
        one, other = first[text], second[text]
        assert (one is None) == (other is None) == (CUE not in text)
        if one is not None and other is not None:
            assert one.total == pytest.approx(other.total, abs=1e-4)


def test_the_verifiers_scores_are_those_of_question_answer_rationale_and_yes(
    exact_llm: LanguageModel,
) -> None:
    for draft in answer_of(make(exact_llm), QUESTION).drafts:
        parts = (
            TextPart("a", "\nAnswer:", scored=False),
            TextPart("answer", f" {draft.answer}"),
            TextPart("b", "\nRationale:", scored=False),
            TextPart("rationale", f" {draft.rationale}"),
            TextPart("statement", f"\n{STATEMENTS['explanation']}", scored=False),
            TextPart("yes", " Yes"),
        )
        alone = run(LocalScorer(exact_llm.loaded).scoring([ScoringRequest(f"Question: {QUESTION}", parts)]))
        read = alone[0].parts
        both = read["answer"].log_probs + read["rationale"].log_probs
        assert draft.scores is not None
        assert draft.measured is not None
        assert draft.measured.self_contain is not None
        assert draft.measured.self_contain.log_probs == pytest.approx(both, abs=1e-4)
        assert draft.scores.self_contain == pytest.approx(sum(both), abs=1e-3)
        assert draft.scores.self_reflect == pytest.approx(read["yes"].total, abs=1e-4)
