"""The graph: shared vectors, recall, determinism, and exact search where a walk finds too little."""

from __future__ import annotations

import gc
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest

from specrag.errors import InputError
from specrag.retrieval.index.base import Query, Ranking
from specrag.retrieval.index.flat import FlatIndex
from specrag.retrieval.index.hnsw import HnswIndex, HnswSettings

DIMENSION = 48


@pytest.fixture(scope="module")
def vectors() -> npt.NDArray[np.float32]:
    rng = np.random.default_rng(0)
    centres = rng.standard_normal((100, DIMENSION))
    return (centres[rng.integers(0, 100, 6000)] + 0.5 * rng.standard_normal((6000, DIMENSION))).astype(
        np.float32
    )


@pytest.fixture(scope="module")
def index(vectors: npt.NDArray[np.float32]) -> HnswIndex:
    return HnswIndex.build(FlatIndex.build(vectors))


@pytest.fixture(scope="module")
def queries(vectors: npt.NDArray[np.float32]) -> list[Query]:
    rng = np.random.default_rng(1)
    near = vectors[:50] + 0.3 * rng.standard_normal((50, DIMENSION)).astype(np.float32)
    return [Query("", vector) for vector in near]


def _recall(found: list[Ranking], expected: list[Ranking]) -> float:
    shares = [np.isin(b.ids, a.ids).mean() for a, b in zip(found, expected, strict=True)]
    return float(np.mean(shares))


def test_it_finds_nearly_what_exact_search_finds(index: HnswIndex, queries: list[Query]) -> None:
    assert _recall(index.search(queries, 10), index.flat.search(queries, 10)) > 0.9


def test_it_walks_the_graph_and_does_not_search_everything(
    index: HnswIndex, queries: list[Query], monkeypatch: pytest.MonkeyPatch
) -> None:
    def not_called(*arguments: object) -> list[Ranking]:
        assert arguments[1] == []
        return []

    monkeypatch.setattr(FlatIndex, "search", not_called)
    assert len(index.search(queries, 10)) == len(queries)


def test_a_shorter_ranking_is_a_prefix_of_a_longer_one(index: HnswIndex, queries: list[Query]) -> None:
    for long, short in zip(index.search(queries, 40), index.search(queries, 1), strict=True):
        assert short.ids.tolist() == long.ids[:1].tolist()


def test_a_filter_keeps_recall(index: HnswIndex, queries: list[Query]) -> None:
    for share in (0.9, 0.5, 0.01):
        allowed = np.random.default_rng(2).random(len(index)) < share
        found = index.search(queries, 10, allowed)
        assert all(allowed[ranking.ids].all() for ranking in found)
        assert _recall(found, index.flat.search(queries, 10, allowed)) > 0.9


def test_few_allowed_passages_are_searched_exactly(index: HnswIndex, queries: list[Query]) -> None:
    allowed = np.zeros(len(index), dtype=bool)
    allowed[::50] = True
    for found, exact in zip(
        index.search(queries, 10, allowed), index.flat.search(queries, 10, allowed), strict=True
    ):
        assert found.ids.tolist() == exact.ids.tolist()


def test_a_graph_torn_by_duplicates_still_gives_k_passages() -> None:
    vectors = np.ones((3000, 4), dtype=np.float32)
    vectors[1500:] *= -1
    settings = HnswSettings(neighbors=2, ef_construction=4, ef_search=4)
    index = HnswIndex.build(FlatIndex.build(vectors), settings)
    for ranking in index.search([Query("", vector) for vector in vectors[[0, 2000]]], 8):
        assert len(ranking) == 8


def test_one_thread_builds_the_same_graph_each_time(vectors: npt.NDArray[np.float32], tmp_path: Path) -> None:
    written = []
    for name in ("first", "second"):
        HnswIndex.build(FlatIndex.build(vectors[:1500]), threads=1).save(tmp_path / name)
        written.append((tmp_path / name).read_bytes())
    assert written[0] == written[1]


def test_the_vectors_are_written_once(index: HnswIndex, queries: list[Query], tmp_path: Path) -> None:
    index.save(tmp_path / "graph")
    links = len(index) * 4 * (2 * index.settings.neighbors + 20)
    assert (tmp_path / "graph").stat().st_size < links
    loaded = HnswIndex.load(
        tmp_path / "graph", FlatIndex.build(index.flat.vectors), index.settings
    )  # nothing else keeps the mapped file open
    gc.collect()
    for found, expected in zip(loaded.search(queries, 10), index.search(queries, 10), strict=True):
        assert found.ids.tolist() == expected.ids.tolist()


def test_the_vectors_are_shared_in_memory(vectors: npt.NDArray[np.float32]) -> None:
    own = vectors[:100].copy()
    index = HnswIndex.build(FlatIndex.build(own))
    own[7] = 3.0
    assert (index._graph.storage.reconstruct(7) == 3.0).all()


def test_a_file_that_is_no_graph_is_named(index: HnswIndex, tmp_path: Path) -> None:
    path = tmp_path / "graph"
    index.save(path)
    whole = path.read_bytes()
    for damaged in (b"", b"no graph at all", whole[: len(whole) // 2]):
        path.write_bytes(damaged)
        with pytest.raises(InputError, match=r"^graph: "):
            HnswIndex.load(path, index.flat)
    path.write_bytes(whole)
    with pytest.raises(InputError, match=r"^graph: \[6000, 48\]"):
        HnswIndex.load(path, FlatIndex.build(index.flat.vectors[:100]))


@pytest.mark.parametrize("name", ["neighbors", "ef_construction", "ef_search"])
@pytest.mark.parametrize("value", [0, -3, 2.5, True])
def test_unusable_settings_are_named(name: str, value: int) -> None:
    with pytest.raises(InputError, match=f"^{name}: "):
        HnswSettings(**{name: value})
