"""Training examples for a drafter, with the exact tokens that it reads and writes at inference, and their batches."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from specrag.bench import normalize_answer
from specrag.errors import InputError
from specrag.methods import FEWEST_WORDS, cut_passage, most_that_fit
from specrag.methods.speculative_rag.cited import cited_prompt, write_cited
from specrag.methods.speculative_rag.drafting import Form
from specrag.methods.speculative_rag.form import (
    CUE,
    LEAD,
    MalformedDraft,
    draft_prompt,
    read_draft,
    write_draft,
)
from specrag.methods.wording import wording
from specrag.models import Tokenizer, encode_text
from specrag.training.drafter.rows import DrafterRow
from specrag.training.drafter.run import TuningSettings

#: Takes the rationale's place in drafts without one, since the form requires one.
NO_RATIONALE = "-"

_MARK = "answer0"


@dataclass(frozen=True, slots=True)
class Example:
    """A row to train on.

    Attributes:
        tokens: prompt and draft, the end of the turn included.
        begin: index of the draft's first token; the loss covers this token and all that follow.
        shortened: whether passages were cut.
    """

    tokens: tuple[int, ...]
    begin: int
    shortened: bool


class ExampleEncoder:
    """Turns rows into examples.

    Args:
        tokenizer: the drafter's.
        length: tokens of the longest example.
        rationales: whether drafts contain the rows' rationales.
        form: of drafts for questions.
    """

    def __init__(self, tokenizer: Tokenizer, *, length: int, rationales: bool, form: Form = "paper") -> None:
        self._tokenizer = tokenizer
        self._length = length
        self._rationales = rationales
        self._form = form
        self._cue = self._behind("0", CUE)
        self._end = end_of_turn(tokenizer)

    def example(self, row: DrafterRow) -> Example | None:
        """The row's example; ``None`` if its passages do not fit, or its draft would end the turn early.

        Raises:
            InputError: the row has no rationale where one is needed, or its draft would be malformed.
        """
        written = self.draft(row)
        if set(written[:-1]) & self._tokenizer.eos_tokens:
            return None
        room = self._length - len(written)
        prompt = self.prompt(row)
        shortened = len(prompt) > room
        if shortened:
            longest = max(len(passage.text.split()) for passage in row.passages)
            words = most_that_fit(longest, lambda words: len(self.prompt(_cut(row, words))) <= room)
            if words < FEWEST_WORDS:
                return None
            prompt = self.prompt(_cut(row, words))
        return Example((*prompt, *written), len(prompt), shortened)

    def prompt(self, row: DrafterRow) -> list[int]:
        """What the drafter reads."""
        if self._is_cited(row):
            lead = wording(row.task.text).lead
            return encode_text(self._tokenizer, cited_prompt(row.task, row.passages), lead)
        return encode_text(self._tokenizer, draft_prompt(row.task, row.passages, example=False), LEAD)

    def draft(self, row: DrafterRow) -> list[int]:
        """What the drafter should write after the prompt, the end of the turn included.

        The cue and the text after it are tokenised separately, as they are when a drafter is kept to the form
        (:class:`~specrag.models.roles.AnswerFormat`): some vocabularies would merge a full stop with the line end after
        it.
        """
        rationale = row.rationale if self._rationales else NO_RATIONALE
        if rationale is None:
            raise InputError(f"row {row.identifier!r}: rationale", None, _NEEDS_RATIONALE)
        if self._is_cited(row):
            evidence = row.evidence
            number = row.passages.index(evidence[0]) + 1 if evidence else None
            written = write_cited(rationale if self._rationales else row.answer, number)
            return [*self._behind(wording(row.task.text).lead, written), self._end]
        text = write_draft(rationale, row.answer)
        found = read_draft(row.task, text)
        if isinstance(found, MalformedDraft):
            raise InputError(
                f"row {row.identifier!r}: draft", text, f"it cannot be read back: {found.reason}"
            )
        place = text.index(CUE)
        first = self._behind(LEAD, text[:place])
        second = self._behind("0" + CUE, text[place + len(CUE) :])
        return [*first, *self._cue, *second, self._end]

    def _is_cited(self, row: DrafterRow) -> bool:
        return self._form == "cited" and row.task.kind == "free-form"

    def _behind(self, before: str, text: str) -> list[int]:
        """The tokens of a text that follows another."""
        clean = text.encode("utf-8", "replace").decode("utf-8")  # half a surrogate pair is not text
        placed = self._tokenizer.encode_with_starts(before + clean, special=False)
        both = zip(placed.tokens, placed.starts, strict=True)
        return [token for token, start in both if start >= len(before)]


_NEEDS_RATIONALE = (
    "write rationales first with `specrag train rationales`, or train with --without-rationales"
)


def _cut(row: DrafterRow, words: int) -> DrafterRow:
    return replace(row, passages=tuple(cut_passage(passage, words) for passage in row.passages))


def end_of_turn(tokenizer: Tokenizer) -> int:
    """The token that the chat template writes after an assistant's message; without one, one that ends a text.

    Raises:
        InputError: the tokenizer has none.
    """
    ends = tokenizer.eos_tokens
    if not ends:
        raise InputError("--model", sorted(ends), "it has no token that ends a text; take another model")
    if tokenizer.has_chat_template:
        turns = [{"role": "user", "content": "?"}, {"role": "assistant", "content": _MARK}]
        _, _, behind = tokenizer.chat_text(turns).rpartition(_MARK)
        for token in tokenizer.encode(behind, special=False):
            if token in ends:
                return token
    return min(ends)


@dataclass(frozen=True, slots=True)
class Split:
    """The rows to train on and the rows to measure on."""

    training: Sequence[DrafterRow]
    held_back: Sequence[DrafterRow]


def split(rows: Sequence[DrafterRow], settings: TuningSettings) -> Split:
    """Hold back whole questions, since rows of one question may differ only in their passages.

    Raises:
        InputError: there are too few rows, or some have no rationale.
    """
    bare = [row.identifier for row in rows if row.rationale is None] if settings.rationales else []
    if bare:
        shown = f"{len(bare)} of {len(rows)} rows, such as {bare[0]!r}"
        raise InputError("rationale", shown, f"they have none: {_NEEDS_RATIONALE}")
    questions = sorted({_question(row) for row in rows})
    random.Random(settings.seed).shuffle(questions)
    place = {question: number for number, question in enumerate(questions)}
    ordered = sorted(rows, key=lambda row: (place[_question(row)], row.identifier))
    most = min(settings.held_back, len(ordered) // 2)
    if not most:
        remedy = "there are too few to train on and to hold back; give at least two"
        raise InputError("rows", len(rows), remedy)
    last = place[_question(ordered[most - 1])]
    held_back = [row for row in ordered if place[_question(row)] <= last]
    training = [row for row in ordered if place[_question(row)] > last]
    if not training:
        raise InputError(
            "rows", len(rows), "they ask too few different questions to hold some back; give more"
        )
    if settings.rows > len(training):
        remedy = f"there are {len(training):,} to train on beside {len(held_back):,} held back"
        raise InputError("--rows", settings.rows, remedy)
    return Split(training[: settings.rows or None], held_back)


def _question(row: DrafterRow) -> str:
    return normalize_answer(row.task.text) or row.task.text


@dataclass(frozen=True, slots=True)
class Batch:
    """Some examples, padded at the end. No token sees the padding, since it comes last, so no mask is needed.

    Attributes:
        tokens: int64 ``[B, T]``.
        targets: the token after each place, int64 ``[B, T]``; -100 where it is not trained on.
    """

    tokens: torch.Tensor
    targets: torch.Tensor


def make_batch(examples: Sequence[Example], device: torch.device) -> Batch:
    """The batch of examples."""
    longest = max(len(example.tokens) for example in examples)
    tokens = torch.zeros(len(examples), longest, dtype=torch.int64)
    wanted = torch.full((len(examples), longest), -100)
    for place, example in enumerate(examples):
        tokens[place, : len(example.tokens)] = torch.tensor(example.tokens)
        wanted[place, example.begin - 1 : len(example.tokens) - 1] = torch.tensor(
            example.tokens[example.begin :]
        )
    return Batch(tokens.to(device), wanted.to(device))


def targets(examples: Sequence[Example]) -> int:
    """The number of tokens trained on."""
    return sum(len(example.tokens) - example.begin for example in examples)


def parts(examples: Sequence[Example], most: int) -> list[list[Example]]:
    """Group examples of similar length: at most ``most`` tokens with padding; a longer example is alone."""
    found: list[list[Example]] = []
    for example in sorted(examples, key=lambda example: len(example.tokens), reverse=True):
        if not found or len(found[-1][0].tokens) * (len(found[-1]) + 1) > most:
            found.append([])
        found[-1].append(example)
    return found


def plan(count: int, batch_rows: int, epochs: int, seed: int) -> list[list[list[int]]]:
    """The row numbers of each step of each epoch; every epoch has every row once, in its own order."""
    found: list[list[list[int]]] = []
    for epoch in range(epochs):
        order = list(range(count))
        random.Random(seed * 1009 + epoch).shuffle(order)
        found.append([order[start : start + batch_rows] for start in range(0, count, batch_rows)])
    return found
