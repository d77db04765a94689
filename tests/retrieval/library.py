"""A small library of documents, the encoder, and what is compared of a knowledge base."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from contextlib import closing
from functools import cache
from pathlib import Path

import numpy as np

from specrag.retrieval.build import build
from specrag.retrieval.encoder.encoder import Encoder, load_encoder
from specrag.retrieval.index.base import Ranking
from specrag.retrieval.knowledge_base import KnowledgeBase
from specrag.retrieval.passage import Passage
from specrag.retrieval.passage_store import PassageStore, State, StoredFile, StoredPassage
from specrag.retrieval.passage_writer import PassageWriter
from specrag.retrieval.progress import BuildReport

QUESTIONS = ["Which metal is red?", "Where do herons nest?", "gold", "How long is the river?"]

COPPER = """# Copper

Copper is a soft red metal. It carries heat and electricity well.

## Uses

Wires, roofs and coins are made of copper.

## History

People have worked copper for ten thousand years.
"""
HERONS = "Herons nest in trees near the water. They eat fish and frogs.\n"
ROWS = [
    {
        "title": "Gold",
        "text": "Gold is a yellow metal that does not rust.",
        "year": 1999,
        "tags": ["metal", "coin"],
    },
    {"title": "Iron", "text": "Iron is a grey metal. It rusts.", "year": 2004, "tags": ["metal"]},
    {"title": "Rhine", "text": "The Rhine is a river of 1,233 kilometres.", "year": 2010, "tags": []},
    {"title": "Elbe", "text": "The Elbe is a river of 1,094 kilometres.", "year": 2010.5, "open": True},
]


@cache
def encoder() -> Encoder:
    """The default encoder, loaded once."""
    return load_encoder()


def write_rows(path: Path, rows: list[dict[str, object]]) -> None:
    """Write JSON lines."""
    path.write_text("".join(f"{json.dumps(row)}\n" for row in rows), encoding="utf-8")


def write_library(folder: Path) -> Path:
    """Three documents: Markdown, text in a folder with a space in its name, JSON lines."""
    (folder / "my birds").mkdir(parents=True)
    (folder / "copper.md").write_text(COPPER, encoding="utf-8")
    (folder / "my birds" / "Reiher, größere.txt").write_text(HERONS, encoding="utf-8")
    write_rows(folder / "facts.jsonl", ROWS)
    return folder


def index(*paths: Path, kb: Path) -> BuildReport:
    """Build with the default settings."""
    return build(paths, kb, encoder=encoder())


def open_base(folder: Path) -> KnowledgeBase:
    """Open with the encoder that is loaded already."""
    return KnowledgeBase.open(folder, encoder=encoder())


def write_passages(folder: Path, documents: Sequence[tuple[str, Sequence[StoredPassage]]]) -> PassageStore:
    """Passages on the disk, without a library or an encoder, in the rows of their order; all vectors are 0."""
    folder.mkdir()
    with closing(PassageWriter(folder, 1, new=True)) as writer:
        for source, held in documents:
            writer.put(StoredFile(f"/library/{source}", source, 1, 1, ""), held)
        writer.write_vectors(0, np.zeros((writer.rows, 1), dtype=np.float32))
        writer.index(lambda _: None)
        writer.commit([])
    return PassageStore(folder)


def state(folder: Path) -> State:
    """What a knowledge base says that it holds."""
    with KnowledgeBase.open(folder) as base:
        return base.state


def passages(folder: Path) -> list[Passage]:
    """All passages of a knowledge base."""
    with open_base(folder) as base:
        return base.passages(base.ids.tolist())


def contents(folder: Path, *, vectors: bool = True) -> dict[str, object]:
    """All that two knowledge bases of the same documents must share: passages, vectors, terms."""
    with open_base(folder) as base:
        store = base._store
        ids = store.rows.named(np.arange(store.state.rows)).tolist()
        live = np.ones(len(ids), dtype=bool) if store.rows.live is None else store.rows.live
        terms = {}
        for term, number in store.rows_of("SELECT term, id FROM terms"):
            found = store.occurrences(number)
            held = sorted(
                (ids[row], often)
                for row, often in zip(found.rows.tolist(), found.times.tolist(), strict=True)
                if live[row]
            )
            if held:
                terms[term] = held
        lengths = {id: int(length) for id, length, own in zip(ids, store.lengths, live, strict=True) if own}
        shared: dict[str, object] = {
            "passages": base.passages(base.ids.tolist()),
            "terms": terms,
            "lengths": lengths,
            "fields": base.fields(),
            "files": [(file.path, file.source, file.sha256) for file in base.documents()],
            "languages": store.state.languages,
        }
        if vectors:
            shared["vectors"] = vectors_of(base).tobytes()
        return shared


def vectors_of(base: KnowledgeBase) -> np.ndarray:
    """The vectors of all passages, by their ids."""
    return base.vectors(base.ids)


def assert_same_but_rounding(folder: Path, other: Path) -> None:
    """All that two knowledge bases share whose passages were encoded in other batches.

    The last bits of a passage's vector depend on its batch; those of a bf16 number are 2**-8 of it.
    """
    assert contents(folder, vectors=False) == contents(other, vectors=False)
    with open_base(folder) as first, open_base(other) as second:
        np.testing.assert_allclose(vectors_of(first), vectors_of(second), atol=2e-3)


def answers(folder: Path) -> dict[str, list[tuple[list[int], list[float]]]]:
    """What every index finds for every question."""
    with open_base(folder) as base:
        return {name: _find(base, name) for name in ("flat", "hnsw", "bm25", "hybrid")}


def _find(base: KnowledgeBase, name: str) -> list[tuple[list[int], list[float]]]:
    rankings: list[Ranking] = base.index(name).search(base.encode(QUESTIONS, name), len(base))
    return [(ranking.ids.tolist(), ranking.scores.tolist()) for ranking in rankings]


def run_python(code: str, *args: str | Path) -> subprocess.CompletedProcess[str]:
    """Run a script in a process of its own."""
    return subprocess.run(
        [sys.executable, "-c", code, *map(str, args)],
        capture_output=True,
        text=True,
        env=os.environ,
        timeout=240,
        check=False,
    )
