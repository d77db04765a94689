"""What a drafter is asked and what it must write: a rationale, then the answer; one form for each kind of task.

Training writes drafts in this form (:func:`write_draft`), drafting asks for it (:func:`draft_prompt`) and reads it
(:func:`read_draft`). The paper does not print its prompt (Appendix H); this one is ours.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from specrag.methods.speculative_rag.task import Task, TaskKind, example_of, listed, plain
from specrag.retrieval import Passage, passage_text

#: How a draft begins.
LEAD = "Rationale:"
#: The text between the rationale and the answer.
CUE = "\nAnswer:"

_FORM = "Write two lines:\nRationale: one or two sentences that quote what the passages say about it.\n"
_ASKS: Mapping[TaskKind, str] = {
    "free-form": f"Answer the question from the passages. {_FORM}Answer: the answer in a few words.",
    "multiple-choice": (
        f"Choose the right option; the passages may help. {_FORM}Answer: the letter of the option."
    ),
    "claim-checking": f"Check the claim against the passages. {_FORM}Answer: one of %s.",
}


@dataclass(frozen=True, slots=True)
class Span:
    """Characters ``start`` to ``end`` of a draft's text, including the space in front of them."""

    start: int
    end: int


@dataclass(frozen=True, slots=True)
class ParsedDraft:
    """A draft that follows the form.

    Attributes:
        rationale: the reason.
        answer: the letter or the label as the task gives it, if it has them.
        rationale_span, answer_span: where they stand in the text; a rationale that is not the drafter's has no place.
        cited: numbers of the sources that the answer cites; ``None`` for a form without citations.
        held: whether a source that it cites holds what it says; true for a form without citations.
    """

    rationale: str
    answer: str
    rationale_span: Span
    answer_span: Span
    cited: tuple[int, ...] | None = None
    held: bool = True


@dataclass(frozen=True, slots=True)
class MalformedDraft:
    """A draft that does not follow the form.

    Attributes:
        reason: for people.
    """

    reason: str


def draft_prompt(
    task: Task, passages: Sequence[Passage], *, example: bool = False
) -> tuple[dict[str, str], ...]:
    """The conversation that asks for a draft; the answer begins with :data:`LEAD`.

    The instruction and the question come first, so that all drafts of a question begin alike and are read once; the
    question also comes last, since small models follow what they read last. Passages have no numbers: small models
    answer with them.

    Args:
        example: show the form in an earlier turn; a drafter that was trained on it needs no example.
    """
    ask = _ASKS[task.kind]
    if task.kind == "claim-checking":
        ask %= listed(task.labels)
    shown = example_of(task) if example else None
    if shown is None:
        return ({"role": "user", "content": _asked(task, passages, ask)},)
    return (
        {"role": "user", "content": _asked(shown.task, shown.passages, ask)},
        {"role": "assistant", "content": LEAD + write_draft(shown.rationale, shown.answer)},
        {"role": "user", "content": _asked(task, passages, "")},
    )


def _asked(task: Task, passages: Sequence[Passage], ask: str) -> str:
    texts = [passage_text(passage.title, passage.text.strip()) for passage in passages]
    return "\n\n".join([f"{ask}\n{task.asked}" if ask else task.asked, *texts, task.asked])


def write_draft(rationale: str, answer: str) -> str:
    """A draft in the form, after :data:`LEAD`: what a drafter is trained to write."""
    return f" {' '.join(rationale.split())}{CUE} {' '.join(answer.split())}"


def read_draft(task: Task, text: str) -> ParsedDraft | MalformedDraft:
    """Read what a drafter wrote after :data:`LEAD`. Strict: what is not in the form is malformed, never guessed.

    What follows the answer's line is ignored. A letter may be followed by a mark or by the option's own text; a label
    may be written in any case.
    """
    place = text.find(CUE)
    rationale = text[:place] if place >= 0 else text
    if not rationale.strip():
        return MalformedDraft("it holds no rationale")
    if place < 0:
        return MalformedDraft("it holds no line that begins with 'Answer:'")
    line = text[place + len(CUE) :].split("\n", 1)[0]
    answer = line.strip()
    if not answer:
        return MalformedDraft("its answer is empty")
    if CUE in text[place + len(CUE) :]:
        return MalformedDraft("it holds several answers")
    chosen = _chosen(task, answer)
    if chosen is None:
        allowed = ", ".join(task.choices)
        return MalformedDraft(f"its answer is none of {allowed}")
    start = place + len(CUE)
    end = start + len(line.rstrip())
    return ParsedDraft(
        " ".join(rationale.split()), chosen, Span(0, len(rationale.rstrip())), Span(start, end)
    )


def _chosen(task: Task, answer: str) -> str | None:
    """The answer in the task's own words; ``None`` if it is not an allowed one."""
    if task.kind == "claim-checking":
        return next((label for label in task.labels if plain(label) == plain(answer)), None)
    if task.kind == "free-form":
        return answer
    found = re.fullmatch(r"\(?([A-Za-z0-9])(?:[.):]\s*(.*)|\))?", answer, flags=re.DOTALL)
    if found is None:
        return None
    letter = next((letter for letter in task.options if letter.lower() == found[1].lower()), None)
    said = found[2]
    if letter is None or (said and plain(said) != plain(task.options[letter])):
        return None
    return letter
