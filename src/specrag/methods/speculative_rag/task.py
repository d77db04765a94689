"""What is to be answered: a question, a multiple choice, or a claim to check; with an example of each."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, TypeAlias, get_args

from specrag.errors import InputError
from specrag.retrieval import Passage

#: A short answer in free words; one letter of several options; one label for a claim.
TaskKind: TypeAlias = Literal["free-form", "multiple-choice", "claim-checking"]
TASK_KINDS: tuple[TaskKind, ...] = get_args(TaskKind)

#: The default labels of a claim.
CLAIM_LABELS = ("SUPPORTED", "REFUTED", "NOT ENOUGH INFORMATION")


@dataclass(frozen=True, slots=True)
class Task:
    """What is to be answered.

    Args:
        text: the question or the claim.
        kind: one of :data:`TASK_KINDS`.
        options: of a multiple choice: letter to text.
        labels: of a claim.

    Raises:
        InputError: a value cannot be used, or does not go with the kind.
    """

    text: str
    kind: TaskKind = "free-form"
    options: Mapping[str, str] = field(default_factory=dict)
    labels: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if not isinstance(self.text, str) or not self.text.strip():
            raise InputError("question", self.text, "give at least one word")
        if self.kind not in TASK_KINDS:
            raise InputError("task", self.kind, f"take one of {', '.join(TASK_KINDS)}")
        if (self.kind == "multiple-choice") != bool(self.options):
            raise InputError("options", dict(self.options), "give them for a multiple choice, and only there")
        if any(not re.fullmatch(r"[A-Za-z0-9]", letter) for letter in self.options) or len(self.options) == 1:
            raise InputError("options", dict(self.options), "give two or more, each by one letter or digit")
        if self.kind != "claim-checking":
            if self.labels:
                raise InputError("labels", self.labels, "give them for a claim only")
        elif not self.labels:
            object.__setattr__(self, "labels", CLAIM_LABELS)
        elif isinstance(self.labels, str) or len({plain(label) for label in self.labels}) < 2:
            raise InputError("labels", self.labels, "give two or more different ones")

    @property
    def asked(self) -> str:
        """The question as a model reads it, with its options or labels."""
        lines = [f"{'Claim' if self.kind == 'claim-checking' else 'Question'}: {self.text.strip()}"]
        lines += [f"{letter}. {text}" for letter, text in self.options.items()]
        if self.labels:
            lines.append(f"Is the claim {listed(self.labels)}?")
        return "\n".join(lines)

    @property
    def choices(self) -> tuple[str, ...]:
        """The possible answers; empty for a free-form task."""
        return tuple(self.options) or self.labels

    def written(self, answer: str) -> str:
        """An answer in words: an option's letter with its text."""
        return f"{answer}. {self.options[answer]}" if answer in self.options else answer


@dataclass(frozen=True, slots=True)
class Example:
    """A task with passages and a draft, written for this project, to show the form."""

    task: Task
    passages: Sequence[Passage]
    rationale: str
    answer: str


def example_of(task: Task) -> Example | None:
    """An example of a task's kind; none for a claim whose labels do not say which of them means yes."""
    if task.kind == "multiple-choice":
        options = {
            letter: _METALS[place] for place, letter in zip(range(len(_METALS)), task.options, strict=False)
        }
        asked = Task(_QUESTION, "multiple-choice", options)
        return Example(asked, _EXAMPLE_PASSAGES, _RATIONALE, list(options)[1])
    if task.kind == "claim-checking":
        label = next((label for label in task.labels if plain(label) in _AFFIRMATIVE), None)
        if label is None:
            return None
        claim = Task("The main part of bronze is copper.", "claim-checking", labels=task.labels)
        return Example(claim, _EXAMPLE_PASSAGES, _RATIONALE, label)
    return Example(Task(_QUESTION), _EXAMPLE_PASSAGES, _RATIONALE, "copper")


def plain(text: str) -> str:
    """The text without case, marks and surplus space."""
    return " ".join(re.sub(r"[\W_]+", " ", text).lower().split())


def listed(labels: Sequence[str]) -> str:
    """The labels in words: a, b or c."""
    return ", ".join(labels[:-1]) + f" or {labels[-1]}"


_QUESTION = "Which metal is the main part of bronze?"
_AFFIRMATIVE = frozenset({"supported", "supports", "support", "true", "yes", "correct"})
_METALS = ("tin", "copper", "zinc", "iron")
_RATIONALE = "Bronze consists mostly of copper, with about 12 percent tin."
_EXAMPLE_PASSAGES = tuple(
    Passage(number, "example", title, "", text, {})
    for number, (title, text) in enumerate(
        (
            (
                "Bronze",
                "Bronze is an alloy that consists mostly of copper, commonly with about 12 percent tin.",
            ),
            ("Brass", "Brass is an alloy of copper and zinc, used for locks, gears and instruments."),
        )
    )
)
