"""Check a whole knowledge base, and export its passages to a JSON lines file."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from specrag.artifacts import checksum
from specrag.errors import InputError, SpecragError
from specrag.retrieval.knowledge_base import KnowledgeBase
from specrag.retrieval.manifest import DATABASE
from specrag.retrieval.passage_store import PassageStore, Scalar, damaged, flatten

_AT_ONCE = 1000  # passages read at a time


def check(folder: str | Path) -> None:
    """Read everything in a knowledge base and check it against its checksums and for consistency.

    A search only checks what it reads: all vectors, and what it needs of the rest.

    Raises:
        KnowledgeBaseError: a file is damaged.
    """
    with KnowledgeBase.open(folder) as base:
        base.index("flat")
        store = base._store
        path = store.folder / DATABASE
        wrong = [reason for (reason,) in store.rows_of("PRAGMA integrity_check") if reason != "ok"]
        if wrong:
            raise damaged(path, f"is not whole ({wrong[0]})")
        graph = store.state.graph
        if graph is not None and checksum(store.folder / graph.file) != graph.checksum:
            raise damaged(store.folder / graph.file, "has another checksum than the one recorded")
        documents = {file.document for file in store.files()}
        if len(documents) != store.state.documents or documents != store.counts().keys():
            raise damaged(path, "has other documents than it says")
        _check_passages(base, store)
        _check_terms(store)


def _check_passages(base: KnowledgeBase, store: PassageStore) -> None:
    live = np.ones(store.state.rows, dtype=bool) if store.rows.live is None else store.rows.live
    rows = np.flatnonzero(live)
    if [row for (row,) in store.rows_of("SELECT row FROM passages ORDER BY row")] != rows.tolist():
        raise _differs(store, "rows")
    runs: dict[tuple[str, Scalar], list[int]] = {}
    for field, value, first, last in store.rows_of("SELECT field, value, first, last FROM fields"):
        for row in (np.flatnonzero(live[first:last]) + first).tolist():
            _add(runs, field, value, row)
    held: dict[tuple[str, Scalar], list[int]] = {}
    for row, passage in zip(rows.tolist(), _passages(base, store.rows.named(rows).tolist()), strict=True):
        values = flatten(passage.metadata)
        values |= {"source": [passage.source], "title": [passage.title], "place": [passage.place]}
        for field, several in values.items():
            for value in several:
                _add(held, field, value, row)
    if runs != held:
        raise _differs(store, "values for filters")
    for _, _, passage in store.stored():
        if not store.rows_of("SELECT 1 FROM passages WHERE key = ? LIMIT 1", (passage.key,)):
            raise _differs(store, "hashes of texts")


def _add(sums: dict[tuple[str, Scalar], list[int]], field: str, value: Scalar, row: int) -> None:
    """Add a row to a value's power sums, which differ for other sets of as many rows."""
    known = sums.setdefault((field, value), [0, 0, 0])
    for power in range(3):
        known[power] += row**power


def _check_terms(store: PassageStore) -> None:
    numbers = [number for (number,) in store.rows_of("SELECT id FROM terms ORDER BY id")]
    lengths = np.zeros(store.state.rows, dtype=np.int64)
    for number in numbers:
        found = store.occurrences(number)
        lengths[found.rows] += found.times
    if numbers and (numbers[0] < 1 or numbers[-1] >= store.state.terms):
        raise _differs(store, "terms")
    if store.rows_of("SELECT 1 FROM postings WHERE term NOT IN (SELECT id FROM terms) LIMIT 1"):
        raise _differs(store, "postings")
    if not np.array_equal(lengths, store.lengths):
        raise _differs(store, "lengths of passages")


def _differs(store: PassageStore, what: str) -> SpecragError:
    return damaged(store.path, f"has {what} that do not fit its passages")


def _passages(base: KnowledgeBase, ids: list[int]) -> Iterator:  # type: ignore[type-arg]
    for start in range(0, len(ids), _AT_ONCE):
        yield from base.passages(ids[start : start + _AT_ONCE])


def export(base: KnowledgeBase, target: Path) -> int:
    """Write all passages as JSON lines, which `specrag index` can read; returns how many.

    Raises:
        InputError: the file already exists.
        OSError: the disk refuses the write.
    """
    written = 0
    try:
        with target.open("x", encoding="utf-8") as file:
            for passage in _passages(base, base.ids.tolist()):
                row = {
                    **passage.metadata,
                    "id": passage.id,
                    "source": passage.source,
                    "place": passage.place,
                    "title": passage.title,
                    "text": passage.text,
                }
                file.write(f"{json.dumps(row, ensure_ascii=False)}\n")
                written += 1
    except FileExistsError:
        raise InputError("to", str(target), "it is there already; name another file") from None
    return written
