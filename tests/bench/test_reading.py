"""The readings that Speculative RAG is compared with: grading, choosing and answering, with a real model."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import pytest

from benchmarks.answers.corrective_reading import CorrectiveReading, Statement, judging
from benchmarks.answers.draft_baselines import DRAFTER_ALONE, best_by, oracle, random_draft
from benchmarks.answers.passage_reading import PassageReading, choose
from benchmarks.answers.reflective_reading import Reflected, ReflectiveReading
from specrag.engine.executor import run
from specrag.engine.passes import Coroutine
from specrag.errors import ContextLengthError, InputError
from specrag.methods.generator import LocalGenerator
from specrag.methods.prompts import LEAD
from specrag.methods.speculative_rag.scoring import Measured, Scoring
from specrag.methods.speculative_rag.task import Task
from specrag.models.roles import PartScore, ScoredText, ScoringRequest, TextPrompt
from specrag.models.scoring import LocalScorer
from specrag.retrieval.passage import Passage

if TYPE_CHECKING:
    from specrag import LanguageModel

QUESTION = Task("What is the chemical symbol of copper?")
CHOICE = Task(
    "Which metal is red?", "multiple-choice", options={"A": "Zinc", "B": "Copper", "C": "A copper alloy"}
)
CLAIM = Task("Copper is red.", "claim-checking")
PASSAGES = [
    Passage(number, "test", title, "", text, {})
    for number, (title, text) in enumerate(
        [
            ("Ferry", "A ferry carries people and vehicles across a river, a lake or a strait."),
            ("Copper", "Copper is a soft reddish metal. Its chemical symbol is Cu, from the Latin cuprum."),
            ("Moon", "The Moon is the only natural satellite of the Earth. It causes most of the tides."),
        ]
    )
]


class GradesByWord:
    """A scorer that finds "Yes" likely behind texts that hold a word."""

    name = "grades-by-word"
    context_length = None

    def __init__(self, grades: Mapping[str, float]) -> None:
        self.grades = grades
        self.requests: list[ScoringRequest] = []

    def count(self, prompt: TextPrompt, lead: str = "") -> int:
        return 1

    def check_scoring(self) -> None:
        pass

    def scoring(self, requests: Sequence[ScoringRequest]) -> Coroutine[list[ScoredText]]:
        self.requests += requests
        return self._scoring(requests)

    def _scoring(self, requests: Sequence[ScoringRequest]) -> Coroutine[list[ScoredText]]:
        scored = []
        for request in requests:
            yes = next((grade for word, grade in self.grades.items() if word in request.parts[0].text), 0.01)
            share = yes if request.parts[-1].text == " Yes" else 1 - yes
            scored.append(ScoredText({"answer": PartScore((math.log(share),))}, 7, 7))
        return scored
        yield


@pytest.fixture(scope="module")
def reading(exact_llm: LanguageModel) -> PassageReading:
    return PassageReading(LocalGenerator(exact_llm), max_tokens=12)


@pytest.mark.parametrize(
    ("text", "chosen"),
    [
        ("B", "B"),
        ("B. Copper", "B"),
        (" (B) because it is red", "B"),
        ("The answer is B", "B"),
        ("The right option is: B.", "B"),
        ("It must be copper, not zinc", "B"),
        ("A copper alloy", "C"),
        ("B it is", "B"),
        ("I do not know", ""),
        ("Because zinc is grey, (B).", "B"),
        ("", ""),
    ],
)
def test_options_are_recognised(text: str, chosen: str) -> None:
    assert choose(CHOICE, text) == chosen


@pytest.mark.parametrize(
    ("text", "chosen"),
    [
        ("Supported", "SUPPORTED"),
        ("The claim is REFUTED by passage 2, not supported.", "REFUTED"),
        ("Not enough information.", "NOT ENOUGH INFORMATION"),
        ("Unsupported", ""),
        ("The claim is not supported by the passages.", ""),
        ("It isn't refuted, it is supported.", "SUPPORTED"),
    ],
)
def test_labels_are_recognised(text: str, chosen: str) -> None:
    assert choose(CLAIM, text) == chosen


def test_an_answer_in_free_form_is_the_text() -> None:
    assert choose(QUESTION, "Cu, I think") == "Cu, I think"


def test_all_passages_are_read(reading: PassageReading) -> None:
    found = run(reading.answering(QUESTION, PASSAGES))
    assert "reddish" in found.text or "Cu" in found.text  # words of the second passage alone
    assert found.text.startswith(LEAD)
    assert found.kept == (1, 2, 3)
    assert found.prompt_tokens == found.read_tokens > 80
    assert 0 < found.completion_tokens <= 12


def test_a_plain_prompt_is_gone_on_with(llm: LanguageModel) -> None:
    plain = PassageReading(LocalGenerator(llm), form="plain", max_tokens=16)
    prompt = plain.request(QUESTION, PASSAGES).prompt
    assert isinstance(prompt, str)
    assert prompt.endswith("\nAnswer:")
    assert "\n" not in run(plain.answering(QUESTION, PASSAGES)).text


@pytest.mark.parametrize("task", [CHOICE, CLAIM], ids=["choice", "claim"])
def test_closed_tasks_give_a_choice(reading: PassageReading, task: Task) -> None:
    found = run(reading.answering(task, PASSAGES))
    assert found.answer in {"", *task.options, *task.labels}


def test_the_last_passages_give_way(llm: LanguageModel) -> None:
    many = [Passage(number, "test", "", "", " ".join(["copper"] * 3000), {}) for number in range(4)]
    short = PassageReading(LocalGenerator(llm), max_tokens=2)
    with pytest.raises(ContextLengthError, match="best passage"):
        run(short.answering(QUESTION, [Passage(0, "test", "", "", " ".join(["copper"] * 9000), {})]))
    assert short._fit(QUESTION, many) == 2


def test_grades_are_shares_of_yes(llm: LanguageModel) -> None:
    scorer = LocalScorer(llm.loaded)
    statements = [Statement("Question: red?", f"\nPassage: {p.text}", "Does it help?") for p in PASSAGES]
    judged = run(judging(scorer, statements))
    assert len(judged.shares) == 3
    assert all(0 < share < 1 for share in judged.shares)
    alone = [run(judging(scorer, [statement])).shares[0] for statement in statements]
    assert judged.shares == pytest.approx(alone, abs=0.06)  # bf16
    words = " Yes", " No"
    asked = "\nDoes it help? (Yes or No)\nAnswer:"
    texts = [f"Question: red?\nPassage: {PASSAGES[0].text}{asked}{word}" for word in words]
    assert judged.read_tokens < sum(3 * len(llm.tokenizer.encode(text, special=True)) for text in texts)


@pytest.mark.parametrize(
    ("grades", "kept"),
    [
        ({"Copper": 0.9, "Moon": 0.3}, [2]),
        ({"Copper": 0.4, "Moon": 0.3}, [2, 3]),
        ({"Copper": 0.15, "Moon": 0.1}, [2]),
        ({"Copper": 0.9, "Moon": 0.9, "Ferry": 0.9}, [1, 2, 3]),
    ],
    ids=["correct", "ambiguous", "incorrect", "all correct"],
)
def test_corrective_reading_keeps_the_good_passages(
    reading: PassageReading, grades: Mapping[str, float], kept: list[int]
) -> None:
    evaluator = GradesByWord(grades)
    found = run(CorrectiveReading(evaluator, reading).answering(QUESTION, PASSAGES))
    assert found.kept == tuple(kept)
    assert found.judged_tokens == 7 * len(evaluator.requests) == 7 * 6
    if len(kept) == 2:
        alone = run(reading.answering(QUESTION, [PASSAGES[number - 1] for number in kept]))
        assert found.text == alone.text


def test_reflective_reading_takes_what_is_judged_best(reading: PassageReading) -> None:
    answers = {
        word: run(reading.answering(QUESTION, [passage])).text
        for word, passage in zip(("Ferry", "Copper", "Moon"), PASSAGES, strict=True)
    }
    for number, word in enumerate(answers, 1):
        reflective = ReflectiveReading(GradesByWord({word: 0.99}), reading)
        found = run(reflective.answering(QUESTION, PASSAGES))
        assert (found.kept, found.text) == ((number,), answers[word])
    limited = ReflectiveReading(GradesByWord({"Moon": 0.99}), reading, passages=2)
    assert run(limited.answering(QUESTION, PASSAGES)).kept[0] < 3


def test_reflective_reading_weighs_confidence_and_grades(reading: PassageReading) -> None:
    one, two, _ = run(ReflectiveReading(GradesByWord({}), reading).reflecting(QUESTION, PASSAGES))
    assert 0 < one.confidence <= 1
    assert one.relevant == one.supported == pytest.approx(0.01)
    graded = Reflected(two.reading, 0.5, 0.25, 0.125)
    assert graded.score(2.0, 4.0) == 0.5 + 0.5 + 0.5


def part(*values: float) -> PartScore:
    return PartScore(values)


MEASURED = [
    Measured(part(-9.0), part(-9.0), part(-0.1), part(-0.1)),
    None,
    Measured(part(-0.1), part(-0.1), part(-5.0), part(-3.0)),
    Measured(part(-2.0, -2.0, -2.0), part(-2.0), part(-1.0), part(-0.05)),
]


def test_verdicts_differ_by_what_counts() -> None:
    assert best_by(MEASURED, DRAFTER_ALONE) == 2
    assert best_by(MEASURED, Scoring(draft=False)) == 0
    assert best_by(MEASURED, Scoring(draft=False, self_contain=False)) == 3
    assert best_by([None], DRAFTER_ALONE) is None


def test_a_random_draft_is_one_that_can_be_scored() -> None:
    chosen = {random_draft(MEASURED, seed) for seed in range(40)}
    assert chosen == {0, 2, 3}
    assert random_draft(MEASURED, 7) == random_draft(MEASURED, 7)
    assert random_draft([None], 0) is None


def test_the_oracle_finds_a_right_draft() -> None:
    assert oracle(["tin", "", "Cu"], lambda answer: answer == "Cu") == 2
    assert oracle(["tin", ""], bool) == 0
    assert oracle(["", ""], bool) is None
    with pytest.raises(InputError):
        oracle([], bool)


def test_bad_values_are_refused(reading: PassageReading) -> None:
    grades = GradesByWord({})
    for make in (
        lambda: PassageReading(reading.generator, form="poem"),  # type: ignore[arg-type]
        lambda: PassageReading(reading.generator, max_tokens=0),
        lambda: CorrectiveReading(grades, reading, upper=0.1),
        lambda: CorrectiveReading(grades, reading, lower=-0.1),
        lambda: ReflectiveReading(grades, reading, passages=0),
        lambda: ReflectiveReading(grades, reading, support=-1.0),
    ):
        with pytest.raises(InputError):
            make()
    for method in (reading, CorrectiveReading(grades, reading), ReflectiveReading(grades, reading)):
        with pytest.raises(InputError, match="at least one passage"):
            run(method.answering(QUESTION, []))
