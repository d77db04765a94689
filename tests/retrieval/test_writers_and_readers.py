"""A knowledge base with several processes at it: one writer, readers of a generation each."""

from __future__ import annotations

import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from specrag.artifacts import BUILDING, GENERATIONS
from specrag.retrieval.build import compact
from specrag.retrieval.manifest import KnowledgeBaseError
from tests.retrieval.library import (
    COPPER,
    index,
    open_base,
)


def test_second_writer_is_refused_at_once(library: Path, kb: Path) -> None:
    code = """
import sys, time
from pathlib import Path
from specrag.retrieval.build import build
def wait(progress):
    print("writing", flush=True)
    time.sleep(60)
build([Path(sys.argv[1])], Path(sys.argv[2]), progress=wait)
"""
    with subprocess.Popen([sys.executable, "-c", code, str(library), str(kb)], stdout=-1, text=True) as first:
        assert first.stdout is not None
        assert first.stdout.readline() == "writing\n"
        start = time.perf_counter()
        with pytest.raises(KnowledgeBaseError, match="being written by another process") as caught:
            index(library, kb=kb)
        assert time.perf_counter() - start < 1.0
        assert str(kb) in str(caught.value)
        first.kill()
    assert index(library, kb=kb).added == 3  # the lock ends with its process


@pytest.mark.parametrize("compacted", [False, True])
def test_reader_keeps_what_it_has_opened(library: Path, kb: Path, compacted: bool) -> None:
    index(library, kb=kb)
    with open_base(kb) as reader:
        assert reader.index("bm25")
        old = reader.passages(reader.ids.tolist())
        for number in range(3):
            (library / "copper.md").write_text(f"{COPPER}\nVersion {number}.\n", encoding="utf-8")
            index(library, kb=kb)
        if compacted:
            compact(kb)
        # What is read only now must still be there.
        for name in ("flat", "hnsw", "hybrid"):
            hits = reader.search(["copper"], len(reader), index=name)[0]
            assert sorted(hit.passage.id for hit in hits) == [passage.id for passage in old]
        assert reader.passages(reader.ids.tolist()) == old
        assert not reader.is_current()
        assert len(list((kb / GENERATIONS).iterdir())) == 1 + compacted
        with open_base(kb) as newer:
            assert newer.is_current()
            assert newer.state.version == 4 + compacted
            assert "Version 2." in newer.search(["version"], 1, index="bm25")[0][0].passage.text
    index(library, kb=kb)
    compact(kb)
    assert [path.name for path in (kb / GENERATIONS).iterdir()] == [f"{2 + compacted:06d}"]


def test_readers_open_while_a_writer_publishes(library: Path, kb: Path) -> None:
    note = library / "note.txt"
    note.write_text("Version 0 of the note.", encoding="utf-8")
    index(library, kb=kb)
    stop = threading.Event()
    failures: list[BaseException] = []
    seen: set[str] = set()

    def read() -> None:
        try:
            while not stop.is_set():
                with open_base(kb) as base:
                    hit = base.search(["version of the note"], 1, index="bm25")[0][0]
                    assert hit.passage.text == f"Version {base.state.version - 1} of the note."
                    seen.add(hit.passage.text)
                time.sleep(0.005)
        except BaseException as error:
            failures.append(error)

    readers = [threading.Thread(target=read) for _ in range(2)]

    def wait_for(text: str) -> None:
        ends = time.monotonic() + 30
        while text not in seen and not failures:
            assert time.monotonic() < ends
            time.sleep(0.005)

    for reader in readers:
        reader.start()
    try:
        wait_for("Version 0 of the note.")
        for number in range(1, 8):
            note.write_text(f"Version {number} of the note.", encoding="utf-8")
            index(library, kb=kb)
        wait_for("Version 7 of the note.")
    finally:
        stop.set()
        for reader in readers:
            reader.join()
    assert failures == []


def test_finished_build_leaves_nothing_behind(library: Path, kb: Path) -> None:
    index(library, kb=kb)
    assert sorted(path.name for path in kb.iterdir()) == [GENERATIONS, "manifest.json", "writer.lock"]
    assert not (kb / BUILDING).exists()
