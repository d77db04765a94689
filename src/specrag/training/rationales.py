"""Rationales for rows, by a strong model (Speculative RAG, section 3.2), kept where the answer follows from them."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from specrag.errors import InputError
from specrag.methods.draft_format import MalformedDraft, read_draft, write_draft
from specrag.models.roles import TextGenerator
from specrag.retrieval.passage import Passage
from specrag.training.drafter_rows import DrafterRow
from specrag.training.question_prompts import Unfit
from specrag.training.rationale_prompts import (
    check_request,
    follows,
    rationale_request,
    read_rationale,
)
from specrag.training.row_run import RowRun, Status, write_texts


@dataclass(frozen=True, kw_only=True)
class RationaleSettings:
    """How rationales are written.

    Args:
        passages: most of a row; each gets as many as are drawn, from its evidence alone to this many.
        all_passages: show the writer all of them; otherwise the evidence alone, which is faster, if there is any.
        check: keep a rationale only if its writer gives the answer from it alone.
        batch: rows side by side.
        seed: of the passages drawn and of their order.

    Raises:
        InputError: a value is out of range.
    """

    passages: int = 5
    all_passages: bool = False
    check: bool = True
    batch: int = 16
    seed: int = 0

    def __post_init__(self) -> None:
        for name in ("passages", "batch"):
            if getattr(self, name) < 1:
                raise InputError(name, getattr(self, name), "give at least 1")
        if self.seed < 0:
            raise InputError("seed", self.seed, "give at least 0")


def write_rationales(
    writer: TextGenerator,
    rows: Sequence[DrafterRow],
    out: Path,
    settings: RationaleSettings,
    *,
    command: str = "",
    show: Callable[[Status], None] = lambda _: None,
) -> RowRun:
    """Write a rationale for each row. The same call goes on where one ended; rows may have been added meanwhile.

    Args:
        writer: writes, and answers from what it wrote.
        out: a folder; made if need be. Each batch is on the disk before the next begins.
        command: for the card.
        show: told how far it is.

    Raises:
        InputError: the folder was begun with other settings, or with another row of the same id.
        SpecragError: the writer dies, or the disk refuses; what was made is kept.
    """
    noted = {"writer": writer.name}
    noted |= {name: getattr(settings, name) for name in ("passages", "all_passages", "check", "seed")}
    run = RowRun.open(out, noted, command=command)
    _check_same_rows(rows, run)
    tried = run.tried
    for start in range(0, len(rows), settings.batch):
        show(run.status("rationales", len(rows)))
        batch = [row for row in rows[start : start + settings.batch] if row.identifier not in tried]
        if batch:
            with run.batch():
                _write_batch(writer, batch, settings, run)
    show(run.status("rationales", len(rows)))
    return run


def _check_same_rows(rows: Sequence[DrafterRow], run: RowRun) -> None:
    given = {row.identifier: row for row in rows}
    for made in run.rows:
        row = given.get(made.identifier)
        if row is not None and (row.task, row.answer) != (made.task, made.answer):
            remedy = "it was begun with another row of this id; take another --out"
            raise InputError("--out", f"{run.out}: {made.identifier}", remedy)


def _write_batch(
    writer: TextGenerator, rows: Sequence[DrafterRow], settings: RationaleSettings, run: RowRun
) -> None:
    dealt = [deal(row, settings) for row in rows]
    shown = [_shown(row, settings) for row in dealt]
    texts = write_texts(writer, [rationale_request(*pair) for pair in zip(dealt, shown, strict=True)])
    read: list[DrafterRow] = []
    for row, passages, text in zip(dealt, shown, texts, strict=True):
        found = read_rationale(row, passages, text.text, cut=text.finish_reason == "length")
        if isinstance(found, Unfit):
            run.reject(row.identifier, found.reason, text.text)
        elif isinstance(draft := read_draft(row.task, write_draft(found, row.answer)), MalformedDraft):
            run.reject(row.identifier, f"not in the form of a draft: {draft.reason}", found)
        else:
            read.append(replace(row, rationale=found))
    kept = read
    if settings.check:
        checks = write_texts(writer, [check_request(row, row.rationale or "") for row in read])
        kept = []
        for row, text in zip(read, checks, strict=True):
            if follows(row, text.text):
                kept.append(row)
            else:
                said = f"{row.rationale} | {row.answer} | {text.text.strip()}"
                run.reject(row.identifier, "the answer does not follow from it", said)
    run.add(kept)


def deal(row: DrafterRow, settings: RationaleSettings) -> DrafterRow:
    """The row with some of its passages: the evidence and others as drawn, in an order that is drawn too."""
    draws = random.Random(f"{settings.seed}/{row.identifier}/passages")
    evidence = list(row.evidence)
    others = [passage for passage in row.passages if passage not in evidence]
    most = max(settings.passages, len(evidence), 1)
    least = max(len(evidence), 1)
    wanted = draws.randint(least, max(least, min(most, len(row.passages))))
    dealt = evidence + draws.sample(others, min(wanted - len(evidence), len(others)))
    draws.shuffle(dealt)
    return replace(row, passages=tuple(dealt))


def _shown(row: DrafterRow, settings: RationaleSettings) -> Sequence[Passage]:
    return row.passages if settings.all_passages or not row.evidence else row.evidence
