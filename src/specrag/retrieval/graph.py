"""The approximate index of a knowledge base: a file that may lag behind the passages; rebuilt when it lags too far."""

from __future__ import annotations

import contextlib
import os
from dataclasses import replace
from pathlib import Path

from specrag.artifacts import checksum, fsync
from specrag.retrieval.index.flat import FlatIndex
from specrag.retrieval.index.hnsw import EXACT_BELOW, HnswIndex, HnswSettings
from specrag.retrieval.manifest import DATABASE, Manifest
from specrag.retrieval.passage_store import Graph, PassageStore, State, connect
from specrag.retrieval.passage_writer import write_state

#: Up to this many rows are searched exactly anyway.
_LEAST = EXACT_BELOW * HnswSettings().ef_search

#: How far a graph may lag behind, as a share of its rows; the missing rows are searched exactly.
_LAG = 1 / 8


def refresh_graph(folder: Path, manifest: Manifest, state: State) -> None:
    """Rebuild the graph if too many rows are missing from it. Only the writer may call it.

    Raises:
        KnowledgeBaseError: the vectors are damaged.
        OSError, sqlite3.Error, RuntimeError: the disk refuses the write.
    """
    linked = 0 if state.graph is None else state.graph.rows
    place = manifest.generation_folder(folder)
    if state.rows > _LEAST and state.rows - linked > max(_LEAST, _LAG * linked):
        state = _build(place, manifest.encoder.dimension)
    for path in place.glob("hnsw-*"):
        if state.graph is None or path.name != state.graph.file:
            with contextlib.suppress(OSError):
                path.unlink()


def _build(place: Path, dimension: int) -> State:
    with contextlib.closing(PassageStore(place)) as store:
        state = store.state
        flat = FlatIndex(store.vectors(dimension), state.longest, store.rows)
        path = place / f"hnsw-{state.rows:09d}.faiss"
        HnswIndex.build(flat).save(path)
    with path.open("rb") as file:
        os.fsync(file.fileno())
    fsync(place)
    state = replace(state, graph=Graph(path.name, state.rows, checksum(path)))
    with contextlib.closing(connect(place / DATABASE, write=True)) as database:
        database.execute("PRAGMA synchronous = FULL")
        database.execute("BEGIN IMMEDIATE")
        write_state(database, state)
    return state
