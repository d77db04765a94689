"""A knowledge base, open for searching."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from specrag.errors import InputError
from specrag.models import catalog
from specrag.retrieval.encoder.reranker import load_reranker
from specrag.retrieval.knowledge_base import INDEXES, KnowledgeBase, check_index
from specrag.retrieval.passage import passage_text
from tests.retrieval.encoder.tiny_networks import write_cross_encoder
from tests.retrieval.library import QUESTIONS, encoder, index, open_base, run_python, write_library


@pytest.fixture(scope="module")
def folder(model_home: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("knowledge")
    index(write_library(folder / "library"), kb=folder / "kb")
    return folder / "kb"


@pytest.fixture
def base(folder: Path) -> Iterator[KnowledgeBase]:
    with open_base(folder) as base:
        yield base


@pytest.mark.parametrize("name", INDEXES)
def test_finds_what_was_asked_for(name: str, base: KnowledgeBase) -> None:
    found = base.search(["Which metal is red?", "Where do herons nest?"], 1, index=name)
    assert found[0][0].passage.title == "Copper"
    assert found[1][0].passage.source == "my birds/Reiher, größere.txt"


def test_hybrid_is_the_default(base: KnowledgeBase) -> None:
    assert base.search(QUESTIONS, 2) == base.search(QUESTIONS, 2, index="hybrid")


@pytest.mark.parametrize("name", INDEXES)
def test_hits_are_ranked_and_scored_by_the_index(name: str, base: KnowledgeBase) -> None:
    for query, hits in zip(
        base.encode(QUESTIONS, name), base.search(QUESTIONS, len(base), index=name), strict=True
    ):
        ids = [hit.passage.id for hit in hits]
        keys = [(-hit.score, hit.passage.id) for hit in hits]
        assert keys == sorted(keys)
        scores = base.index(name).score([query], np.array(ids, dtype=np.int64))[0]
        assert [hit.score for hit in hits] == scores.tolist()
        assert [hit.passage for hit in hits] == base.passages(ids)


@pytest.mark.parametrize("name", INDEXES)
def test_a_batch_is_bit_for_bit_its_questions_one_by_one(name: str, base: KnowledgeBase) -> None:
    together = base.search(QUESTIONS, 4, index=name)
    assert together == [base.search([question], 4, index=name)[0] for question in QUESTIONS]
    assert together == base.search(QUESTIONS[::-1], 4, index=name)[::-1]


def test_threads_find_the_same(folder: Path) -> None:
    with open_base(folder) as base:  # indexes not yet read, so that threads meet while reading them
        found: dict[int, object] = {}

        def search(number: int) -> None:
            name = INDEXES[number % len(INDEXES)]
            found[number] = [
                base.search(QUESTIONS, 3, index=name, where={"year": {">": 0}}) for _ in range(5)
            ]

        threads = [threading.Thread(target=search, args=(number,)) for number in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        for number in range(8):
            alone = base.search(QUESTIONS, 3, index=INDEXES[number % len(INDEXES)], where={"year": {">": 0}})
            assert found[number] == [alone] * 5


@pytest.mark.parametrize("name", INDEXES)
def test_filter_keeps_only_what_fits(name: str, base: KnowledgeBase) -> None:
    where = {"year": {">=": 2004, "<": 2010.5}}
    allowed = base.allowed(where)
    assert allowed is not None
    hits = base.search(["metal or river"], len(base), index=name, where=where)[0]
    assert {hit.passage.title for hit in hits} <= {"Iron", "Rhine"}
    rows = base._store.rows
    fitting = set(rows.named(np.flatnonzero(allowed)).tolist())
    assert {hit.passage.id for hit in hits} <= fitting
    if name != "bm25":
        assert len(hits) == 2
    every = base.search(["metal or river"], len(base), index=name)[0]
    assert hits == [hit for hit in every if hit.passage.id in fitting]


def test_filter_that_nothing_fits_finds_nothing(base: KnowledgeBase) -> None:
    assert base.search(["metal"], 3, where={"title": "Copper", "year": {">": 0}}) == [[]]


def test_no_filter_is_none(base: KnowledgeBase) -> None:
    assert base.allowed(None) is None
    assert base.allowed({}) is None


def test_fields_are_named(base: KnowledgeBase) -> None:
    assert base.fields() == ["open", "place", "source", "tags", "title", "year"]


def test_passages_by_id(base: KnowledgeBase) -> None:
    ids = base.ids.tolist()
    every = base.passages(ids)
    assert [passage.id for passage in every] == ids == sorted(ids)
    assert base.passages([ids[2], ids[0], ids[2]]) == [every[2], every[0], every[2]]
    assert base.passage(ids[1]) == every[1]
    assert base.passages([]) == []
    for wrong in (-1, 0, 2**53):
        with pytest.raises(InputError, match="passage id"):
            base.passage(wrong)


def test_reranker_orders_anew(base: KnowledgeBase, tmp_path: Path) -> None:
    minilm = catalog.resolve("minilm-l6-v2").folder
    reranker = load_reranker(str(write_cross_encoder(tmp_path / "reranker", minilm)), device="cpu")
    question = "Which metal is red?"
    found = base.search([question], len(base))[0]
    texts = [passage_text(hit.passage.title, hit.passage.text) for hit in found]
    scores = dict(
        zip([hit.passage.id for hit in found], reranker.score(question, texts).tolist(), strict=True)
    )
    expected = sorted(scores, key=lambda id: (-scores[id], id))
    for k in (2, len(base)):
        hits = base.search([question], k, reranker=reranker)[0]
        assert [hit.passage.id for hit in hits] == expected[:k]
        assert [hit.score for hit in hits] == [scores[hit.passage.id] for hit in hits]
    assert base.search([question], 1, where={"title": "no such title"}, reranker=reranker) == [[]]


def test_sparse_search_loads_no_network(folder: Path) -> None:
    code = """
import sys
sys.modules["torch"] = sys.modules["transformers"] = None
from specrag.retrieval.knowledge_base import KnowledgeBase
with KnowledgeBase.open(sys.argv[1]) as base:
    print(base.search(["red metal"], 1, index="bm25")[0][0].passage.title)
"""
    done = run_python(code, folder)
    assert (done.returncode, done.stdout) == (0, "Copper\n"), done.stderr


def test_encoder_is_loaded_from_the_manifest(folder: Path, base: KnowledgeBase) -> None:
    with KnowledgeBase.open(folder) as own:
        assert own.search(QUESTIONS, 3) == base.search(QUESTIONS, 3)
        assert own.encoder().fingerprint == encoder().fingerprint


def test_no_questions_give_no_answers(base: KnowledgeBase) -> None:
    assert [base.search([], 3, index=name) for name in INDEXES] == [[]] * len(INDEXES)


# -- values that cannot be used -----------------------------------------------------------------------------


@pytest.mark.parametrize("k", [0, -1, 1000, True, 2.0])
def test_wrong_k(k: int, base: KnowledgeBase) -> None:
    with pytest.raises(InputError) as caught:
        base.search(["metal"], k)
    assert f"k: {k!r}" in str(caught.value)
    assert f"has {len(base)} passages; give 1 to {len(base)}" in str(caught.value)


@pytest.mark.parametrize("query", ["", " \n", "\ud800"])
def test_wrong_query(query: str, base: KnowledgeBase) -> None:
    with pytest.raises(InputError, match="query"):
        base.search(["metal", query])


def test_a_text_in_place_of_a_list(base: KnowledgeBase) -> None:
    with pytest.raises(InputError, match="give a list of questions"):
        base.search("metal")


@pytest.mark.parametrize(
    ("name", "near"), [("hybird", "did you mean hybrid"), ("bm52", "bm25"), ("", "flat, hnsw")]
)
def test_wrong_index(name: str, near: str, base: KnowledgeBase) -> None:
    for call in (
        lambda: base.search(["metal"], index=name),
        lambda: base.index(name),
        lambda: check_index(name),
    ):
        with pytest.raises(InputError, match=near) as caught:
            call()
        assert "take one of flat, hnsw, bm25, hybrid" in str(caught.value)


def test_question_longer_than_the_encoder_reads(base: KnowledgeBase) -> None:
    hits = base.search(["Which metal is red? " * 5000], 2)[0]
    assert len(hits) == 2
