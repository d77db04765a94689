"""One index of a knowledge base as iterative retrieval searches it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest

from specrag.errors import InputError
from specrag.retrieval.index import hnsw as hnsw_module
from specrag.retrieval.index.base import Index, Query
from specrag.retrieval.index.flat import FlatIndex
from specrag.retrieval.index.hnsw import HnswIndex, HnswSettings
from specrag.retrieval.knowledge_base import KnowledgeBase, SingleIndex
from tests.sample import build_sample


@pytest.fixture(scope="module")
def kb(model_home: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[KnowledgeBase]:
    with KnowledgeBase.open(build_sample(tmp_path_factory.mktemp("single") / "kb")) as kb:
        yield kb


@pytest.mark.parametrize("name", ["flat", "hnsw", "bm25", "hybrid"])
def test_it_finds_what_the_knowledge_base_finds(kb: KnowledgeBase, name: str) -> None:
    single = SingleIndex(kb, name)
    questions = ["Who discovered radium?", "Which sea does the Danube reach?"]
    rankings = single.search(single.encode(questions), 3)
    for ranking, hits in zip(rankings, kb.search(questions, 3, index=name), strict=True):
        assert single.passages(ranking.ids.tolist()) == [hit.passage for hit in hits]
        assert ranking.scores.tolist() == [hit.score for hit in hits]
    scores = single.score(single.encode(questions[:1]), rankings[0].ids)
    assert scores[0].tolist() == rankings[0].scores.tolist()
    assert len(single) == len(kb)


def test_conditions_narrow_what_is_found(kb: KnowledgeBase) -> None:
    single = SingleIndex(kb, "flat", {"title": ["Tin", "Bronze"]})
    assert len(single) == 2
    (ranking,) = single.search(single.encode(["Who discovered radium?"]), 5)
    titles = {passage.title for passage in single.passages(ranking.ids.tolist())}
    assert titles == {"Tin", "Bronze"}
    first = np.zeros(len(kb), dtype=bool)
    first[kb._store.rows.find(ranking.ids[1:2])] = True
    (narrower,) = single.search(single.encode(["Who discovered radium?"]), 5, first)
    assert narrower.ids.tolist() == [ranking.ids[1]]


def test_what_cannot_be_searched(kb: KnowledgeBase) -> None:
    with pytest.raises(InputError, match="did you mean flat"):
        SingleIndex(kb, "flatt")
    with pytest.raises(InputError, match="widen the conditions"):
        SingleIndex(kb, "flat", {"title": "Tungsten"})


class Graph:
    """A knowledge base that has nothing but a graph."""

    def __init__(self, index: HnswIndex) -> None:
        self._index = index

    def index(self, name: str) -> Index:
        assert name == "hnsw"
        return self._index

    def allowed(self, where: Mapping[str, Any] | None) -> None:
        assert where is None

    def __len__(self) -> int:
        return len(self._index)


@pytest.mark.parametrize("seed", range(4))
def test_the_first_passage_is_the_same_for_every_k(monkeypatch: pytest.MonkeyPatch, seed: int) -> None:
    """A wider walk finds better passages: they are left out, so that prefetching changes no output."""
    monkeypatch.setattr(hnsw_module, "EXACT_BELOW", 0)
    rng = np.random.default_rng(seed)
    vectors = rng.standard_normal((900, 16)).astype(np.float32)
    vectors[rng.random(900) < 0.3] = vectors[0]  # duplicates tear the graph
    index = HnswIndex.build(FlatIndex.build(vectors), HnswSettings(2, 4, 3), threads=1)
    single = SingleIndex(cast(KnowledgeBase, Graph(index)), "hnsw")
    queries = [Query("", vector) for vector in rng.standard_normal((60, 16)).astype(np.float32)]
    firsts = [ranking.ids[0] for ranking in single.search(queries, 1)]
    for k in (2, 3, 4, 20, 300):
        rankings = single.search(queries, k)
        assert [ranking.ids[0] for ranking in rankings] == firsts
        for ranking in rankings:
            assert len(ranking) <= k
            assert (np.diff(ranking.scores) <= 0).all()
    wide = [ranking.ids[0] for ranking in index.search(queries, 300)]
    assert wide != firsts, "the walks of this test are too good"
