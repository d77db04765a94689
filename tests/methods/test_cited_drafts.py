"""Drafts that are cited sentences, and a verifier that weighs its Yes against its No."""

from __future__ import annotations

import math
from copy import copy
from dataclasses import replace
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest

from specrag.asking import Answerer
from specrag.engine.executor import run
from specrag.errors import InputError
from specrag.methods.generator import LocalGenerator
from specrag.methods.prompts import LEAD
from specrag.methods.resources import Resources
from specrag.methods.speculative_rag import SpeculativeRAG
from specrag.methods.speculative_rag.cited import NOT_HERE, cited_lead, cited_prompt, read_cited
from specrag.methods.speculative_rag.form import MalformedDraft, ParsedDraft
from specrag.methods.speculative_rag.pipeline import SpeculativeRAGPipeline
from specrag.methods.speculative_rag.result import DraftDone, DraftsScored, SpeculativeAnswer
from specrag.methods.speculative_rag.scoring import JUDGED, Scoring
from specrag.methods.speculative_rag.steps import judge
from specrag.methods.speculative_rag.task import Task
from specrag.models.roles import ScoringRequest, TextPart
from specrag.models.scoring import LocalScorer
from specrag.request import ABSTENTION
from specrag.retrieval.passage import passage_text
from tests.methods.rag_toys import PASSAGES, QUESTION, among, make
from tests.methods.run import answer_of, play
from tests.methods.scripted_drafter import ScriptedDrafter

if TYPE_CHECKING:
    from specrag import LanguageModel

TASK = Task(QUESTION)
#: Short cited drafts, dealt and scored as the paper does with its own.
CITED: dict[str, Any] = {
    "form": "cited",
    "draft_tokens": 24,
    "rationale_tokens": 8,
    "strategy": "multi-perspective",
    "evidence": "rationale",
    "without": (),
    "length_normalized": False,
}


def test_a_sentence_is_cited_by_the_numbers_of_the_sources() -> None:
    read = [PASSAGES[2], PASSAGES[0]]
    found = read_cited(
        TASK, " 1], Marie Curie discovered radium in 1898.\nQuestion: more", read, (7, 4), LEAD
    )
    assert isinstance(found, ParsedDraft)
    assert found.answer == "Marie Curie discovered radium in 1898. [4]"
    assert found.cited == (4,)
    assert found.rationale == "Marie Curie discovered radium together with Pierre Curie in 1898 in Paris."


def test_numbers_that_meet_are_not_given_twice() -> None:
    read = [PASSAGES[0], PASSAGES[2]]
    text = " 1], Marie Curie discovered radium. The Danube rises in the Black Forest."
    found = read_cited(TASK, text, read, (2, 1), LEAD)
    assert isinstance(found, ParsedDraft)
    assert found.answer == "Marie Curie discovered radium. [2] The Danube rises in the Black Forest. [1]"
    assert found.cited == (1, 2)


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("", "no sentence"),
        (" 1], ", "no sentence"),
        ("\nRadium.", "no sentence"),
        (" 1], Zeppelins fly slowly.", "none of its passages"),
    ],
)
def test_a_draft_that_says_nothing_of_its_passages_is_malformed(text: str, reason: str) -> None:
    found = read_cited(TASK, text, PASSAGES[:1], (1,), LEAD)
    assert isinstance(found, MalformedDraft)
    assert reason in found.reason


@pytest.fixture(scope="module")
def answer(exact_llm: LanguageModel) -> SpeculativeAnswer:
    found: SpeculativeAnswer = answer_of(make(exact_llm, **CITED, judge=True), QUESTION)
    return found


def test_there_is_no_answer_where_every_draft_says_so(
    exact_llm: LanguageModel, answer: SpeculativeAnswer, monkeypatch: pytest.MonkeyPatch
) -> None:
    gone = [replace(draft, malformed=NOT_HERE, scores=None, answer="") for draft in answer.drafts]
    assert judge([*gone[1:], answer.drafts[0]]).best == answer.drafts[0].number
    assert judge([*gone, replace(gone[0], malformed="it holds no sentence")]).best is None
    assert not judge([*gone, replace(gone[0], malformed="it holds no sentence")]).abstained
    monkeypatch.setattr(
        "specrag.methods.speculative_rag.cited.says_not_here", lambda line: bool(line.strip())
    )
    found = answer_of(make(exact_llm, **CITED, judge=True), QUESTION)
    assert found.abstained
    assert found.text == ABSTENTION
    assert found.fallback == "every draft says that its passages do not hold the answer"
    assert {draft.malformed for draft in found.drafts} == {NOT_HERE}


def test_a_sentence_that_its_citation_does_not_hold_is_told_from_one_that_it_does() -> None:
    for text, held in (
        (" 1], Marie Curie discovered radium in 1898.", True),
        (" 1], Marie Curie discovered helium beside Otto Hahn in Vienna, Austria, in 1912.", False),
    ):
        found = read_cited(TASK, text, PASSAGES[:1], (1,), LEAD)
        assert isinstance(found, ParsedDraft)
        assert found.cited == (1,)
        assert found.held is held


def test_a_draft_that_its_citations_do_not_hold_is_the_answer_only_if_there_is_no_other(
    answer: SpeculativeAnswer,
) -> None:
    first, second, *others = answer.ranked
    assert first.held
    assert second.scores
    assert judge([replace(first, held=False), second]).best == second.number
    assert judge([replace(first, held=False), replace(second, held=False)]).best == first.number
    assert judge([replace(first, held=False), replace(second, scores=None)]).best == first.number
    found = replace(answer, drafts=(replace(first, held=False), second, *others))
    assert [draft.number for draft in found.ranked][:1] == [second.number]
    scored = DraftsScored(found.drafts).describe()
    assert scored["winner"] == second.number - 1


def test_the_answer_cites_what_it_rests_on(answer: SpeculativeAnswer) -> None:
    assert answer.best is not None
    best = answer.drafts[answer.best - 1]
    assert answer.text == best.answer
    assert best.used
    assert set(best.used) <= set(best.sources)
    assert [source.number for source in answer.sources if source.cited] == list(best.used)
    assert all(f"[{number}]" in answer.text for number in best.used)
    assert any(best.rationale in passage.text for passage in PASSAGES)


def test_a_draft_is_what_standard_rag_would_write(
    exact_llm: LanguageModel, answer: SpeculativeAnswer
) -> None:
    draft = answer.ranked[0]
    prompt = exact_llm.tokenizer.chat_text(cited_prompt(TASK, [PASSAGES[n - 1] for n in draft.sources]))
    line = draft.text.split("\n")[0]
    parts = (TextPart("lead", LEAD, scored=False), TextPart("line", line))
    (scored,) = run(LocalScorer(exact_llm.loaded).scoring([ScoringRequest(prompt, parts)]))
    assert draft.measured is not None
    assert draft.measured.rationale is None
    assert draft.measured.answer is not None
    assert draft.measured.answer.log_probs == pytest.approx(scored.parts["line"].log_probs, abs=1e-4)
    assert draft.scores is not None
    assert draft.scores.draft == pytest.approx(draft.measured.answer.total)


def test_yes_is_weighed_against_no(exact_llm: LanguageModel, answer: SpeculativeAnswer) -> None:
    draft = answer.ranked[0]
    plain = draft.answer[: draft.answer.index(" [")]
    asked = f"{draft.rationale}\n\n{TASK.asked}\nAnswer: {plain}\n\n{JUDGED}"
    prompt = [{"role": "user", "content": asked}]
    yes, no = run(
        LocalScorer(exact_llm.loaded).scoring(
            [ScoringRequest(prompt, (TextPart("said", word),)) for word in ("Yes", "No")]
        )
    )
    said, denied = math.exp(yes.parts["said"].total), math.exp(no.parts["said"].total)
    assert draft.scores is not None
    assert draft.scores.self_reflect is not None
    assert math.exp(draft.scores.self_reflect) == pytest.approx(said / (said + denied), rel=1e-3)
    assert draft.scores.self_contain is not None


def test_what_the_verifier_would_believe_anyway_counts_for_nothing(exact_llm: LanguageModel) -> None:
    judged: dict[str, Any] = {
        **CITED,
        "judge": True,
        "without": ("draft", "self-contain"),
        "evidence": "passages",
    }
    plain, calibrated = (
        answer_of(make(exact_llm, **judged, calibrated=calibrated), QUESTION) for calibrated in (False, True)
    )
    both = [pair for pair in zip(plain.drafts, calibrated.drafts, strict=True) if pair[0].malformed is None]
    assert both
    for one, other in both:
        bare = one.answer[: one.answer.index(" [")]
        prompt = [{"role": "user", "content": f"{TASK.asked}\nAnswer: {bare}\n\n{JUDGED}"}]
        yes, no = run(
            LocalScorer(exact_llm.loaded).scoring(
                [ScoringRequest(prompt, (TextPart("said", word),)) for word in ("Yes", "No")]
            )
        )
        assert one.scores is not None
        assert other.scores is not None
        without = yes.parts["said"].total - no.parts["said"].total
        expected = log_odds(one.scores.total) - without
        assert log_odds(other.scores.total) == pytest.approx(expected, abs=1e-2)
    assert calibrated.usage.verifier_read_tokens > plain.usage.verifier_read_tokens


def log_odds(log_share: float) -> float:
    return log_share - math.log(-math.expm1(log_share))


def test_the_verdict_alone_may_count(exact_llm: LanguageModel) -> None:
    alone: dict[str, Any] = {**CITED, "judge": True, "without": ("draft", "self-contain")}
    found = answer_of(make(exact_llm, **alone), QUESTION)
    scored = [draft for draft in found.drafts if draft.malformed is None]
    assert scored
    for draft in scored:
        assert draft.scores is not None
        assert (draft.scores.draft, draft.scores.self_contain) == (None, None)
        assert draft.scores.self_reflect == draft.scores.total < 0
    assert 0 < found.usage.verifier_read_tokens < found.usage.verifier_tokens


def test_a_claim_is_checked_in_the_papers_form(exact_llm: LanguageModel) -> None:
    task = Task("Marie Curie discovered radium.", "claim-checking")
    found = answer_of(make(exact_llm, **CITED), task)
    assert found.text in {"SUPPORTED", "REFUTED", "NOT ENOUGH INFORMATION"} or found.fallback


CHOICES = Task(QUESTION, "multiple-choice", {"A": "Isaac Newton", "B": "Marie Curie", "C": "Nobody"})


def test_choices_are_weighed_and_nobody_drafts(exact_llm: LanguageModel) -> None:
    drafter = ScriptedDrafter([])
    played = play(make(exact_llm, drafter=drafter, form="cited"), CHOICES)
    found = played.answer
    assert [(draft.answer, draft.sources, draft.rationale) for draft in found.drafts] == [
        (letter, (1, 2, 3, 4, 5), "") for letter in "ABC"
    ]
    assert not drafter.requests
    texts = "\n".join(passage_text(passage.title, passage.text) for passage in PASSAGES)
    asked = [{"role": "user", "content": f"{texts}\n\n{CHOICES.asked}"}]
    parts = [(TextPart("choice", CHOICES.written(letter)),) for letter in "ABC"]
    own = run(LocalScorer(exact_llm.loaded).scoring([ScoringRequest(asked, part) for part in parts]))
    means = [one.parts["choice"].mean for one in own]
    assert [draft.scores.total for draft in found.drafts if draft.scores] == pytest.approx(means)
    assert found.text == "ABC"[means.index(max(means))]
    assert (found.sampling, found.timing.drafting, found.malformed) == (None, 0.0, 0)
    assert found.notes() == ["smollm2-135m weighed each choice; nobody had to draft"]
    told = [event for event in played.events if isinstance(event, DraftDone)]
    assert [event.draft.answer for event in told] == ["A", "B", "C"]


class NoDrafter(Resources):
    """Resources that load no drafter."""

    def writer(self, name: str | None = None, adapter: str | None = None, form: str = "paper") -> Any:
        raise InputError("drafter", name, "none is loaded here")


@pytest.mark.parametrize("asked", [{"claim": True}, {"choices": ("A=Isaac Newton", "B=Marie Curie")}])
def test_no_drafter_is_loaded_for_choices(asked: dict[str, Any], exact_llm: LanguageModel) -> None:
    host = Answerer(NoDrafter(exact_llm))
    found = host.generate(QUESTION, method=SpeculativeRAG(**asked), passages=PASSAGES)
    details = found.details
    assert isinstance(details, SpeculativeAnswer)
    assert details.drafter is None
    assert details.best is not None
    assert found.text == details.drafts[details.best - 1].answer
    for drafted in ({}, {"evidence": "passages", **asked}, {"decoder": "adaptive", **asked}):
        with pytest.raises(InputError, match="drafter"):
            host.generate(QUESTION, method=SpeculativeRAG(**drafted), passages=PASSAGES)


def test_without_a_drafter_only_choices_are_answered(exact_llm: LanguageModel) -> None:
    pipeline = SpeculativeRAGPipeline(
        None, LocalScorer(exact_llm.loaded), among(PASSAGES), SpeculativeRAG.Options()
    )
    assert answer_of(pipeline, CHOICES).best is not None
    with pytest.raises(InputError, match="drafter"):
        answer_of(pipeline, QUESTION)


@pytest.mark.parametrize("values", [{"evidence": "passages"}, {"without": ("self-reflect",)}])
def test_choices_are_drafted_where_the_verifier_alone_does_not_decide(
    values: dict[str, Any], exact_llm: LanguageModel
) -> None:
    drafter = ScriptedDrafter([" She found it.\nAnswer: B"])
    found = answer_of(make(exact_llm, drafter=drafter, form="cited", drafts=1, **values), CHOICES)
    assert [draft.rationale for draft in found.drafts] == ["She found it."]
    assert found.sampling is not None


def test_a_small_model_chooses_a_passage_first(exact_llm: LanguageModel) -> None:
    small = LocalGenerator(exact_llm)
    assert cited_lead(TASK, small) == LEAD
    model: Any = exact_llm.loaded.model
    config = copy(model.config)
    config.num_hidden_layers *= 40
    large: Any = SimpleNamespace(
        llm=SimpleNamespace(loaded=SimpleNamespace(model=SimpleNamespace(config=config)))
    )
    assert cited_lead(TASK, large) == ""
    endpoint: Any = SimpleNamespace(name="away")
    assert cited_lead(TASK, endpoint) == ""


def test_what_is_not_said_hangs_on_the_form() -> None:
    own, paper = SpeculativeRAG.Options(), SpeculativeRAG.Options(form="paper")
    assert own.drafting().form == "cited"
    assert own.scoring() == Scoring(
        draft=False, self_reflect=False, evidence="best-passages", length_normalized=True
    )
    assert paper.drafting().form == "paper"
    assert paper.scoring() == Scoring()
    assert (own.settled().strategy, paper.settled().strategy) == ("ranked", "multi-perspective")
    # A drafter that was trained on the paper's form has all of it, and what is said stays.
    assert own.settled("paper").scoring() == Scoring()
    said = SpeculativeRAG.Options(form="paper", strategy="random", without=("draft",), evidence="both")
    assert said.settled().strategy == "random"
    assert said.scoring() == Scoring(draft=False, evidence="both")
    # Who asks the verifier something wants its answer to count.
    judged = SpeculativeRAG.Options(judge=True).scoring()
    assert (judged.draft, judged.self_contain, judged.self_reflect) == (False, False, True)
    assert SpeculativeRAG.Options(statement="correct").scoring().self_reflect


def test_the_method_takes_both() -> None:
    options = SpeculativeRAG.Options(form="cited", judge=True)
    assert options.drafting().form == "cited"
    assert options.scoring().judge
    assert SpeculativeRAG.Options(judge=True, calibrated=True).scoring().calibrated
    with pytest.raises(InputError, match="calibrated: True is not usable: ask the verifier to judge"):
        Scoring(calibrated=True)
    with pytest.raises(InputError, match="give one of paper, cited"):
        SpeculativeRAG(form="letter")
