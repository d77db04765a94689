"""Documents come and go: what is touched, what keeps its id, and that nothing tells a grown base from a new one."""

from __future__ import annotations

import json
import random
from contextlib import closing
from pathlib import Path

import numpy as np
import pytest

from specrag.errors import InputError
from specrag.retrieval import build as build_module
from specrag.retrieval import graph as graph_module
from specrag.retrieval import passage_writer
from specrag.retrieval.build import compact, remove
from specrag.retrieval.index import hnsw as hnsw_module
from specrag.retrieval.index.base import Query
from specrag.retrieval.index.bm25 import BM25Index
from specrag.retrieval.index.hnsw import HnswIndex
from specrag.retrieval.maintenance import check, export
from specrag.retrieval.manifest import VECTORS, KnowledgeBaseError, Manifest
from specrag.retrieval.passage_store import PassageStore, StoredFile, StoredPassage
from specrag.retrieval.passage_writer import PassageWriter, passage_ids
from tests.retrieval.library import (
    ROWS,
    contents,
    encoder,
    index,
    open_base,
    passages,
    state,
    write_library,
    write_passages,
    write_rows,
)

WORDS = [f"word{number:02d}" for number in range(30)]


# -- ids --------------------------------------------------------------------------------------------------------


def test_a_passage_keeps_its_id_while_others_change(library: Path, kb: Path) -> None:
    index(library, kb=kb)
    before = {passage.text: passage.id for passage in passages(kb)}
    rows: list[dict[str, object]] = [{"title": "Tin", "text": "Tin is soft."}, *ROWS[1:]]
    write_rows(library / "facts.jsonl", rows)  # the first has gone, another has come in its place
    (library / "a.txt").write_text("It comes before all others.", encoding="utf-8")
    index(library, kb=kb)
    after = {passage.text: passage.id for passage in passages(kb)}
    kept = before.keys() & after.keys()
    assert {text: before[text] for text in kept} == {text: after[text] for text in kept}
    assert len(kept) == len(before) - 1
    (library / "facts.jsonl").rename(library / "facts again.jsonl")
    report = index(library, kb=kb)
    assert report.encoded == 0
    renamed = {passage.text: passage.id for passage in passages(kb)}
    assert {text for text in after if after[text] != renamed[text]} == {str(row["text"]) for row in rows}


def test_an_id_tells_equal_passages_of_a_document_apart() -> None:
    one, other = StoredPassage("T", "line 1", "same", "{}"), StoredPassage("T", "line 2", "same", "{}")
    first, second = passage_ids("a", [one, other])
    assert first != second
    assert passage_ids("a", [other]) == [first]  # the place does not matter
    assert passage_ids("b", [one])[0] not in (first, second)


def test_equal_hashes_give_different_ids(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(passage_writer, "passage_ids", lambda _, held: [2**53 - 1] * len(held))
    held = [StoredPassage("", "", f"text {number}", "{}") for number in range(2)]
    with closing(write_passages(tmp_path / "store", [("a", held[:1]), ("b", held[1:])])) as store:
        assert store.rows.ids.tolist() == [2**53 - 1, 0]
        assert [passage.text for passage in store.passages([0, 2**53 - 1])] == ["text 1", "text 0"]


# -- what is touched ----------------------------------------------------------------------------------------------


def test_a_change_writes_only_what_changed(library: Path, kb: Path) -> None:
    index(library, kb=kb)
    vectors = Manifest.read(kb).generation_folder(kb) / VECTORS
    inode, old = vectors.stat().st_ino, vectors.read_bytes()
    first = state(kb)
    (library / "tin.txt").write_text("Tin is soft.", encoding="utf-8")
    write_rows(library / "facts.jsonl", [*ROWS[:1], {**ROWS[1], "text": "Iron is heavy."}, *ROWS[2:]])
    assert index(library, kb=kb).encoded == 2
    second = state(kb)
    assert (second.rows, second.passages) == (first.rows + 2, first.passages + 1)
    assert second.version == first.version + 1
    assert vectors.stat().st_ino == inode
    assert vectors.read_bytes()[: len(old)] == old
    check(kb)


@pytest.fixture
def small_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make a few passages take several blocks and chunks."""
    monkeypatch.setattr(passage_writer, "BLOCK", 5)
    monkeypatch.setattr(passage_writer, "_OPEN_CHUNK", 3)


def _texts(draw: random.Random) -> list[StoredPassage]:
    return [
        StoredPassage("", "", " ".join(draw.choices(WORDS, k=draw.randrange(12))), json.dumps({"n": number}))
        for number in range(draw.randrange(1, 7))
    ]


def _finds(store: PassageStore) -> object:
    """Whatever a search with words finds, to the bit."""
    sparse = BM25Index(store, store.lengths, store.settings, store.rows)
    draw = random.Random(0)
    texts = [" ".join(draw.choices(WORDS, k=size)) for size in (1, 2, 5, 5, 9)]
    rankings = sparse.search([Query(text, terms=sparse.terms(text)) for text in texts], 50)
    return [(ranking.ids.tolist(), ranking.scores.tobytes()) for ranking in rankings]


@pytest.mark.usefixtures("small_steps")
@pytest.mark.parametrize("seed", range(3))
def test_a_store_that_has_seen_much_finds_what_a_new_one_finds(seed: int, tmp_path: Path) -> None:
    draw = random.Random(seed)
    held: dict[str, list[StoredPassage]] = {f"d{number}": _texts(draw) for number in range(8)}
    write_passages(tmp_path / "grown", list(held.items())).close()
    for step in range(6):
        with closing(PassageWriter(tmp_path / "grown", 1)) as writer:
            numbers = {file.source: file.document for file in writer.files()}
            for source in draw.sample(sorted(held), 2):
                writer.drop(numbers[source])
                del held[source]
            for source in [*draw.sample(sorted(held), 2), f"new{step}", f"newer{step}"]:
                held[source] = draw.sample(held.get(source, []), len(held.get(source, [])) // 2) + _texts(
                    draw
                )
                number = numbers.get(source, 0)
                writer.put(StoredFile(f"/library/{source}", source, 1, 1, "", number), held[source])
            added = writer.rows - writer.before.rows
            writer.write_vectors(writer.before.rows, np.zeros((added, 1), dtype=np.float32))
            writer.index(lambda _: None)
            writer.commit([])
    with closing(PassageStore(tmp_path / "grown")) as grown:
        assert grown.rows.live is not None
        with closing(write_passages(tmp_path / "scratch", list(held.items()))) as scratch:
            assert grown.rows.sorted_ids().tolist() == scratch.rows.sorted_ids().tolist()
            assert _finds(grown) == _finds(scratch)
            (tmp_path / "compact").mkdir()
            with closing(PassageWriter(tmp_path / "compact", 1, new=True)) as writer:
                writer.copy(grown, lambda done, total: None)  # noqa: ARG005
                writer.commit([])
            with closing(PassageStore(tmp_path / "compact")) as compacted:
                assert compacted.state.rows == compacted.state.passages == scratch.state.passages
                assert _finds(compacted) == _finds(scratch)
                assert compacted.field_names() == scratch.field_names()


def test_a_change_that_is_given_up_leaves_nothing(tmp_path: Path) -> None:
    held = [StoredPassage("", "", "copper wire", "{}")]
    write_passages(tmp_path / "store", [("a", held)]).close()
    with closing(PassageWriter(tmp_path / "store", 1)) as writer:
        writer.put(StoredFile("/library/b", "b", 1, 1, ""), [StoredPassage("", "", "copper roof", "{}")])
        writer.write_vectors(1, np.ones((1, 1), dtype=np.float32))
        writer.index(lambda _: None)
    with closing(PassageStore(tmp_path / "store")) as store:
        assert (store.state.version, store.state.rows) == (1, 1)
        assert store.find(["copper", "roof"]).keys() == {"copper"}
    with pytest.raises(InputError, match="length"), closing(PassageWriter(tmp_path / "store", 1)) as writer:
        writer.write_vectors(1, np.full((1, 1), np.nan, dtype=np.float32))


def test_a_language_that_comes_later_is_read(library: Path, kb: Path) -> None:
    index(library, kb=kb)
    german = "Die Garantie auf das Glas der Objektive gilt zwei Jahre, und sie ist nicht zu verlängern."
    (library / "glas.txt").write_text(german, encoding="utf-8")
    index(library, kb=kb)
    assert state(kb).languages == ("english", "german")
    with open_base(kb) as base:
        assert base.search(["Gläser"], 1, index="bm25")[0][0].passage.source == "glas.txt"
        assert base.search(["red metals"], 1, index="bm25")[0][0].passage.title == "Copper"


# -- removing, compacting ---------------------------------------------------------------------------------------


def test_removed_documents_are_gone_until_they_are_indexed_again(library: Path, kb: Path) -> None:
    index(library, kb=kb)
    whole = contents(kb)
    assert remove(["copper.md", str(library / "facts.jsonl")], kb) == 1
    with open_base(kb) as base:
        assert [file.source for file in base.documents()] == ["my birds/Reiher, größere.txt"]
        assert base.search(["copper gold"], 1, index="bm25") == [[]]
        assert {hit.passage.source for hit in base.search(["copper"], 1, index="flat")[0]} == {
            "my birds/Reiher, größere.txt"
        }
        assert base.fields() == ["place", "source", "title"]
        assert not base.allowed({"title": "Copper"}).any()  # type: ignore[union-attr]
    check(kb)
    report = index(library, kb=kb)
    assert (report.added, report.encoded) == (2, 5)  # what was removed is not kept
    assert contents(kb, vectors=False) == {name: part for name, part in whole.items() if name != "vectors"}


def test_what_cannot_be_removed(library: Path, kb: Path) -> None:
    with pytest.raises(KnowledgeBaseError, match="does not exist"):
        remove(["copper.md"], kb)
    index(library, kb=kb)
    before = contents(kb)
    with pytest.raises(InputError, match=r"document: 'coper.md'.* did you mean 'copper.md'"):
        remove(["copper.md", "coper.md"], kb)
    with pytest.raises(InputError, match="no document would be left"):
        remove([file.source for file in open_base(kb).documents()], kb)
    assert contents(kb) == before


def test_compacting_changes_nothing_that_can_be_found(library: Path, kb: Path) -> None:
    index(library, kb=kb)
    (library / "tin.txt").write_text("Tin is soft.", encoding="utf-8")
    (library / "copper.md").unlink()
    index(library, kb=kb)
    before = contents(kb)
    assert state(kb).rows > state(kb).passages
    after = compact(kb)
    assert after.rows == after.passages == state(kb).passages
    assert contents(kb) == before
    check(kb)


def test_a_build_compacts_what_is_mostly_gone(
    library: Path, kb: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(build_module, "_MOST_GONE", 2)
    index(library, kb=kb)
    remove(["copper.md"], kb)
    assert state(kb).rows > state(kb).passages  # one row of six
    remove(["facts.jsonl"], kb)
    assert state(kb).rows == state(kb).passages == 1
    check(kb)


def test_what_is_exported_can_be_indexed(library: Path, kb: Path, tmp_path: Path) -> None:
    index(library, kb=kb)
    with open_base(kb) as base:
        assert export(base, tmp_path / "all.jsonl") == len(base)
        with pytest.raises(InputError, match="there already"):
            export(base, tmp_path / "all.jsonl")
    rows = [json.loads(line) for line in (tmp_path / "all.jsonl").read_text(encoding="utf-8").splitlines()]
    assert {row["text"] for row in rows} == {passage.text for passage in passages(kb)}
    gold = next(row for row in rows if row["title"] == "Gold")
    assert (gold["source"], gold["place"], gold["year"]) == ("facts.jsonl", "line 1", 1999)
    assert index(tmp_path / "all.jsonl", kb=tmp_path / "again").passages == len(rows)


# -- the graph ----------------------------------------------------------------------------------------------------


@pytest.fixture
def eager_graphs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Build a graph of a few rows, and walk it."""
    monkeypatch.setattr(graph_module, "_LEAST", 3)
    monkeypatch.setattr(graph_module, "_LAG", 1.0)
    monkeypatch.setattr(hnsw_module, "EXACT_BELOW", 0)


@pytest.mark.usefixtures("eager_graphs")
def test_a_graph_lags_and_is_built_anew(library: Path, kb: Path) -> None:
    index(library, kb=kb)
    first = state(kb).graph
    assert first is not None
    assert first.rows == state(kb).rows == 6
    (library / "tin.txt").write_text("Tin is soft.", encoding="utf-8")
    index(library, kb=kb)
    remove(["copper.md"], kb)
    assert state(kb).graph == first
    with open_base(kb) as base:
        graph = base.index("hnsw")
        assert isinstance(graph, HnswIndex)
        assert graph.linked == 6
        hits = base.search(["Tin is soft."], len(base), index="hnsw")[0]
        assert hits[0].passage.text == "Tin is soft."
        assert sorted(hit.passage.id for hit in hits) == base.ids.tolist()
    check(kb)
    with open_base(kb) as reader:
        for number in range(6):
            (library / f"{number}.txt").write_text(f"Mine number {number}.", encoding="utf-8")
        index(library, kb=kb)
        second = state(kb).graph
        assert second is not None
        assert second.rows == 13 + 1  # copper came again
        assert [path.name for path in kb.rglob("hnsw-*")] == [second.file]
        # The reader's graph has gone: it searches exactly.
        exact = reader.search(["Tin is soft."], 3, index="flat")
        assert reader.search(["Tin is soft."], 3, index="hnsw") == exact


@pytest.mark.usefixtures("eager_graphs")
def test_a_damaged_graph_is_named(library: Path, kb: Path) -> None:
    index(library, kb=kb)
    (path,) = kb.rglob("hnsw-*")
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)
    with open_base(kb) as base, pytest.raises(KnowledgeBaseError, match=r"hnsw-.*damaged"):
        base.index("hnsw")
    path.unlink()
    with open_base(kb) as base, pytest.raises(KnowledgeBaseError, match=r"hnsw-.*is missing"):
        base.index("hnsw")


def test_the_encoder_is_not_asked_for_what_is_known(tmp_path: Path, kb: Path) -> None:
    write_library(tmp_path / "library")
    index(tmp_path / "library", kb=kb)
    write_rows(tmp_path / "copy.jsonl", ROWS)  # another document with the same passages
    report = index(tmp_path / "copy.jsonl", kb=kb)
    assert (report.added, report.encoded) == (1, 0)
    with open_base(kb) as base:
        gold = [passage for passage in base.passages(base.ids.tolist()) if passage.title == "Gold"]
        first, second = base.vectors(np.array([passage.id for passage in gold]))
        assert first.tobytes() == second.tobytes()
        assert base.encoder() is encoder()
