"""The form of a draft: what is written is read back, and nothing else is guessed."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from specrag.errors import InputError
from specrag.methods.speculative_rag.form import (
    LEAD,
    MalformedDraft,
    ParsedDraft,
    draft_prompt,
    read_draft,
    write_draft,
)
from specrag.methods.speculative_rag.task import CLAIM_LABELS, Task, example_of
from specrag.retrieval.passage import Passage

QUESTION = Task("Which city is the capital of France?")
CHOICE = Task(
    "Which is the capital of France?",
    "multiple-choice",
    {"A": "Lyon", "B": "Paris", "C": "Nice, in the south"},
)
CLAIM = Task("Paris is the capital of France.", "claim-checking")
TASKS = [QUESTION, CHOICE, CLAIM]
WORDS = st.text(st.characters(exclude_categories=("C", "Z")), min_size=1, max_size=8)


@given(rationale=st.lists(WORDS, min_size=1, max_size=6), answer=st.lists(WORDS, min_size=1, max_size=3))
def test_what_is_written_is_read_back(rationale: list[str], answer: list[str]) -> None:
    text = write_draft(" ".join(rationale), " ".join(answer))
    found = read_draft(QUESTION, text)
    assert isinstance(found, ParsedDraft)
    assert (found.rationale, found.answer) == (" ".join(rationale), " ".join(answer))
    spans = (found.rationale_span, found.answer_span)
    assert [text[span.start : span.end] for span in spans] == [f" {found.rationale}", f" {found.answer}"]


@given(st.text(st.sampled_from("\nABab :.()Answer"), max_size=60), st.sampled_from(TASKS))
def test_any_text_is_read_or_refused(text: str, task: Task) -> None:
    found = read_draft(task, text)
    if isinstance(found, ParsedDraft):
        assert found.rationale
        assert found.answer in (task.options or task.labels or (found.answer,))
        assert 0 <= found.rationale_span.start < found.rationale_span.end <= found.answer_span.start
        assert text[found.answer_span.start : found.answer_span.end].strip()
    else:
        assert found.reason


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("", "it holds no rationale"),
        (" \nAnswer: Paris", "it holds no rationale"),
        (" It says so.", "it holds no line that begins with 'Answer:'"),
        (" It says so. Answer: Paris", "it holds no line that begins with 'Answer:'"),
        (" It says so.\nAnswer:", "its answer is empty"),
        (" It says so.\nAnswer:  \nParis", "its answer is empty"),
        (" It says so.\nAnswer: Paris\nAnswer: Lyon", "it holds several answers"),
    ],
)
def test_malformed_drafts(text: str, reason: str) -> None:
    assert read_draft(QUESTION, text) == MalformedDraft(reason)


def test_what_follows_the_answers_line_is_left_out() -> None:
    found = read_draft(QUESTION, " It says\nso. \nAnswer: Paris \n\nQuestion: next")
    assert isinstance(found, ParsedDraft)
    assert (found.rationale, found.answer) == ("It says so.", "Paris")


@pytest.mark.parametrize(
    ("answer", "letter"),
    [
        ("B", "B"),
        ("b", "B"),
        ("(B)", "B"),
        ("B.", "B"),
        ("B) Paris", "B"),
        ("B: paris.", "B"),
        ("C. Nice, in the south", "C"),
        ("B. Lyon", None),
        ("D", None),
        ("Paris", None),
        ("Because", None),
        ("A or B", None),
    ],
)
def test_letters(answer: str, letter: str | None) -> None:
    found = read_draft(CHOICE, f" It says so.\nAnswer: {answer}")
    if letter is None:
        assert found == MalformedDraft("its answer is none of A, B, C")
    else:
        assert isinstance(found, ParsedDraft)
        assert found.answer == letter


@pytest.mark.parametrize(
    ("answer", "label"),
    [
        ("SUPPORTED", "SUPPORTED"),
        ("refuted.", "REFUTED"),
        ("not enough_information", "NOT ENOUGH INFORMATION"),
        ("NOT SUPPORTED", None),
        ("It is refuted", None),
    ],
)
def test_labels(answer: str, label: str | None) -> None:
    found = read_draft(CLAIM, f" It says so.\nAnswer: {answer}")
    assert (found.answer if isinstance(found, ParsedDraft) else None) == label


def passages(*texts: str) -> list[Passage]:
    return [Passage(n, "s", f"Title {n}", "", text, {}) for n, text in enumerate(texts)]


@pytest.mark.parametrize("task", TASKS, ids=lambda task: task.kind)
@pytest.mark.parametrize("example", [False, True])
def test_prompts_of_one_question_begin_alike(task: Task, example: bool) -> None:
    first = draft_prompt(task, passages("Paris is large."), example=example)
    second = draft_prompt(task, passages("Lyon is old.", "Nice is warm."), example=example)
    assert first[:-1] == second[:-1]
    asked = first[-1]["content"]
    assert asked.count(task.asked) == 2
    assert asked.endswith(task.asked)
    assert "Title 0\nParis is large." in asked
    before = asked.index("Title 0")
    assert asked[:before] == second[-1]["content"][:before]
    for option in (*task.options.values(), *task.labels):
        assert option in asked


@pytest.mark.parametrize("task", TASKS, ids=lambda task: task.kind)
def test_the_example_keeps_to_the_form(task: Task) -> None:
    shown = example_of(task)
    assert shown is not None
    said = draft_prompt(task, passages("x"), example=True)[1]
    assert said["role"] == "assistant"
    found = read_draft(shown.task, said["content"].removeprefix(LEAD))
    assert isinstance(found, ParsedDraft)
    assert (found.rationale, found.answer) == (shown.rationale, shown.answer)


def test_a_claim_with_labels_that_say_nothing_has_no_example() -> None:
    strange = Task("x", "claim-checking", labels=("red", "green"))
    assert len(draft_prompt(strange, passages("x"), example=True)) == 1
    assert "one of red or green" in draft_prompt(strange, passages("x"))[0]["content"]


def test_answers_in_words() -> None:
    assert CHOICE.written("B") == "B. Paris"
    assert QUESTION.written("B") == "B"
    assert CLAIM.labels == CLAIM_LABELS


def test_bad_tasks() -> None:
    with pytest.raises(InputError, match="question: ' ' is not usable: give at least one word"):
        Task(" ")
    with pytest.raises(InputError, match="task: 'essay' is not usable: take one of free-form"):
        Task("x", "essay")  # type: ignore[arg-type]
    with pytest.raises(InputError, match="give them for a multiple choice, and only there"):
        Task("x", "multiple-choice")
    with pytest.raises(InputError, match="give them for a multiple choice, and only there"):
        Task("x", options={"A": "a", "B": "b"})
    with pytest.raises(InputError, match="give two or more, each by one letter or digit"):
        Task("x", "multiple-choice", {"AB": "a", "C": "b"})
    with pytest.raises(InputError, match="give them for a claim only"):
        Task("x", labels=("yes", "no"))
    with pytest.raises(InputError, match="give two or more different ones"):
        Task("x", "claim-checking", labels=("yes", "Yes."))
