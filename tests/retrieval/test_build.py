"""Making a knowledge base and bringing it up to date."""

from __future__ import annotations

import os
import random
import shutil
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from specrag.errors import InputError
from specrag.retrieval.build import build
from specrag.retrieval.build_settings import BuildSettings
from specrag.retrieval.disk import KnowledgeBaseError
from specrag.retrieval.manifest import BUILDING, GENERATIONS, Manifest
from specrag.retrieval.progress import Progress
from tests.retrieval.library import (
    COPPER,
    HERONS,
    ROWS,
    answers,
    assert_same_but_rounding,
    contents,
    encoder,
    index,
    open_base,
    passages,
    run_python,
    write_library,
    write_rows,
)


@pytest.fixture
def library(tmp_path: Path) -> Path:
    return write_library(tmp_path / "library")


@pytest.fixture
def kb(tmp_path: Path) -> Path:
    return tmp_path / "kb"


def test_passages_keep_source_title_place_and_metadata(library: Path, kb: Path) -> None:
    report = index(library, kb=kb)
    assert (report.added, report.updated, report.removed, report.unchanged) == (3, 0, 0, 0)
    assert report.skipped == ()
    found = passages(kb)
    assert report.passages == len(found) == report.encoded
    assert [passage.id for passage in found] == list(range(len(found)))
    assert [passage.source for passage in found] == sorted(passage.source for passage in found)
    gold = next(passage for passage in found if passage.title == "Gold")
    assert (gold.source, gold.place, gold.text) == ("facts.jsonl", "line 1", ROWS[0]["text"])
    assert gold.metadata == {"year": 1999, "tags": ["metal", "coin"]}
    herons = next(passage for passage in found if passage.source == "my birds/Reiher, größere.txt")
    assert herons.text == HERONS.strip()
    assert next(passage for passage in found if passage.source == "copper.md").title == "Copper"


def test_manifest_says_what_the_knowledge_base_is(library: Path, kb: Path) -> None:
    settings = BuildSettings(chunk_tokens=40, chunk_overlap=0)
    report = build([library], kb, settings, encoder=encoder())
    manifest = Manifest.read(kb)
    assert (manifest.generation, manifest.documents, manifest.passages) == (1, 3, report.passages)
    assert (manifest.encoder.name, manifest.encoder.dtype) == ("minilm-l6-v2", "bf16")
    assert manifest.encoder.fingerprint == encoder().fingerprint
    assert (manifest.chunking.tokens, manifest.chunking.overlap) == (40, 0)
    assert manifest.roots == (os.path.realpath(library),)
    assert manifest.bytes == sum(path.stat().st_size for path in manifest.generation_folder(kb).iterdir())


def test_progress_goes_through_the_stages(library: Path, kb: Path) -> None:
    seen: list[Progress] = []
    build([library], kb, progress=seen.append, encoder=encoder())
    stages = list(dict.fromkeys(progress.stage for progress in seen))
    assert stages == ["reading", "encoding", "indexing"]
    for stage in stages:
        done = [progress.done for progress in seen if progress.stage == stage]
        assert done == sorted(done)
        assert [p for p in seen if p.stage == stage][-1].done == [p for p in seen if p.stage == stage][
            -1
        ].total


# -- updates ------------------------------------------------------------------------------------------------


def test_update_reads_what_changed_and_removes_what_is_gone(library: Path, kb: Path) -> None:
    index(library, kb=kb)
    write_rows(library / "facts.jsonl", [*ROWS, {"title": "Tin", "text": "Tin melts early."}])
    (library / "copper.md").unlink()
    (library / "new.txt").write_text("Silver is white.", encoding="utf-8")
    report = index(library, kb=kb)
    assert (report.added, report.updated, report.removed, report.unchanged) == (1, 1, 1, 1)
    assert report.encoded == 2  # tin and silver; the other rows of the changed file keep their vectors
    assert {passage.source for passage in passages(kb)} == {
        "facts.jsonl",
        "new.txt",
        "my birds/Reiher, größere.txt",
    }
    assert Manifest.read(kb).generation == 2


def _change_something(folder: Path, draw: random.Random) -> None:
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    action = draw.choice(["add", "add", "change", "remove", "rows", "rename"])
    number = draw.randrange(100)
    if action == "add" or len(files) < 3:
        (folder / f"{draw.choice('amz')}{number}.txt").write_text(
            f"Note {number} about herons.", encoding="utf-8"
        )
    elif action == "change":
        path = draw.choice(files)
        if path.suffix != ".jsonl":
            path.write_text(
                f"{path.read_text(encoding='utf-8')}\nLine {number} was added.\n", encoding="utf-8"
            )
    elif action == "remove":
        draw.choice(files).unlink()
    elif action == "rows":
        write_rows(folder / "facts.jsonl", draw.sample(ROWS, 3))
    else:
        path = draw.choice(files)
        path.rename(path.with_name(f"{draw.choice('bny')}{number}{path.suffix}"))


@pytest.mark.parametrize("seed", range(2))
def test_updated_equals_built_from_scratch(seed: int, library: Path, kb: Path, tmp_path: Path) -> None:
    draw = random.Random(seed)
    index(library, kb=kb)
    for step in range(3):
        for _ in range(draw.randrange(1, 4)):
            _change_something(library, draw)
        index(library, kb=kb)
        scratch = tmp_path / f"scratch-{step}"
        index(library, kb=scratch)
        assert_same_but_rounding(kb, scratch)
        assert [ids for ids, _ in answers(kb)["hybrid"]] == [ids for ids, _ in answers(scratch)["hybrid"]]


def test_nothing_changed_writes_nothing(library: Path, kb: Path) -> None:
    index(library, kb=kb)
    before = {path: path.stat().st_mtime_ns for path in kb.rglob("*") if path.name != "writer.lock"}
    report = index(library, kb=kb)
    assert (report.added, report.updated, report.removed, report.unchanged) == (0, 0, 0, 3)
    assert report.encoded == 0
    assert {path: path.stat().st_mtime_ns for path in kb.rglob("*") if path.name != "writer.lock"} == before


def test_nothing_changed_loads_no_network(library: Path, kb: Path) -> None:
    index(library, kb=kb)
    code = """
import sys, time
sys.modules["torch"] = None
from pathlib import Path
from specrag.retrieval.build import build
start = time.perf_counter()
print(build([Path(sys.argv[1])], Path(sys.argv[2])).unchanged, time.perf_counter() - start)
"""
    done = run_python(code, library, kb)
    assert done.returncode == 0, done.stderr
    unchanged, seconds = done.stdout.split()
    assert unchanged == "3"
    assert float(seconds) < 1.0


def test_removing_needs_no_network(library: Path, kb: Path) -> None:
    index(library, kb=kb)
    (library / "copper.md").unlink()
    code = """
import sys
sys.modules["torch"] = None
from pathlib import Path
from specrag.retrieval.build import build
print(build([Path(sys.argv[1])], Path(sys.argv[2])).removed)
"""
    done = run_python(code, library, kb)
    assert (done.returncode, done.stdout) == (0, "1\n"), done.stderr
    assert "copper.md" not in {passage.source for passage in passages(kb)}


def test_touched_document_is_unchanged(library: Path, kb: Path) -> None:
    index(library, kb=kb)
    os.utime(library / "copper.md", (1, 1))
    report = index(library, kb=kb)
    assert (report.unchanged, report.encoded) == (3, 0)
    assert Manifest.read(kb).generation == 1


def test_change_of_equal_size_is_seen(library: Path, kb: Path) -> None:
    path = library / "note.txt"
    path.write_text("Tin is soft.", encoding="utf-8")
    stamp = path.stat().st_mtime_ns
    index(library, kb=kb)
    path.write_text("Tin is hard.", encoding="utf-8")
    os.utime(path, ns=(stamp, stamp))  # as on a disk with coarse time stamps
    assert index(library, kb=kb).updated == 1
    assert "Tin is hard." in {passage.text for passage in passages(kb)}


def test_equal_passages_are_encoded_once(tmp_path: Path, kb: Path) -> None:
    rows: list[dict[str, object]] = [{"title": "Tin", "text": "Tin is soft."}] * 5
    write_rows(tmp_path / "rows.jsonl", rows)
    report = index(tmp_path / "rows.jsonl", kb=kb)
    assert (report.passages, report.encoded) == (5, 1)


# -- several paths ------------------------------------------------------------------------------------------


def test_documents_from_elsewhere_stay(library: Path, kb: Path, tmp_path: Path) -> None:
    other = tmp_path / "other"
    other.mkdir()
    (other / "tin.txt").write_text("Tin is soft.", encoding="utf-8")
    (other / "lead.txt").write_text("Lead is heavy.", encoding="utf-8")
    index(other, kb=kb)
    report = index(library, kb=kb)
    assert (report.added, report.removed) == (3, 0)
    (other / "tin.txt").unlink()
    assert index(library, kb=kb).removed == 0
    report = index(other, kb=kb)
    assert (report.removed, report.unchanged) == (1, 4)
    assert {"lead.txt", "copper.md"} <= {passage.source for passage in passages(kb)}


def test_folder_inside_an_indexed_folder_keeps_the_names(library: Path, kb: Path) -> None:
    index(library, kb=kb)
    (library / "my birds" / "owl.txt").write_text("Owls hunt at night.", encoding="utf-8")
    report = index(library / "my birds", kb=kb)
    assert (report.added, report.removed, report.unchanged) == (1, 0, 3)
    assert "my birds/owl.txt" in {passage.source for passage in passages(kb)}


def test_folder_around_an_indexed_folder_takes_it_in(library: Path, kb: Path, tmp_path: Path) -> None:
    index(library / "my birds", kb=kb)
    assert {passage.source for passage in passages(kb)} == {"Reiher, größere.txt"}
    index(library, kb=kb)
    assert "my birds/Reiher, größere.txt" in {passage.source for passage in passages(kb)}
    index(library, kb=tmp_path / "scratch")
    assert_same_but_rounding(kb, tmp_path / "scratch")


def test_equal_names_become_whole_paths_in_any_order(kb: Path, tmp_path: Path) -> None:
    for name in ("one", "two"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "README.md").write_text(f"Folder {name}.", encoding="utf-8")
    index(tmp_path / "one", kb=kb)
    assert [passage.source for passage in passages(kb)] == ["README.md"]
    index(tmp_path / "two", kb=kb)
    index(tmp_path / "two", tmp_path / "one", kb=tmp_path / "scratch")
    expected = [os.path.realpath(tmp_path / name / "README.md") for name in ("one", "two")]
    assert [passage.source for passage in passages(kb)] == expected
    assert_same_but_rounding(kb, tmp_path / "scratch")


def test_moved_library_is_the_same_library(library: Path, kb: Path, tmp_path: Path) -> None:
    index(library, kb=kb)
    before = passages(kb)
    library.rename(tmp_path / "moved")
    report = index(tmp_path / "moved", kb=kb)
    assert (report.added, report.updated, report.removed, report.unchanged) == (0, 0, 0, 3)
    assert report.encoded == 0
    assert passages(kb) == before
    assert Manifest.read(kb).roots == (os.path.realpath(tmp_path / "moved"),)
    assert index(tmp_path / "moved", kb=kb).unchanged == 3
    assert Manifest.read(kb).generation == 2


def test_file_that_was_named_and_is_gone_is_removed(library: Path, kb: Path) -> None:
    files = [library / "copper.md", library / "facts.jsonl"]
    index(*files, kb=kb)
    files[0].unlink()
    report = index(*files, kb=kb)
    assert (report.removed, report.unchanged) == (1, 1)


def test_folder_that_is_gone_is_an_error(library: Path, kb: Path) -> None:
    index(library, kb=kb)
    before = contents(kb)
    shutil.rmtree(library)
    with pytest.raises(InputError, match="no such file or folder"):
        index(library, kb=kb)
    library.mkdir()
    with pytest.raises(InputError, match="nothing to index"):
        index(library, kb=kb)
    assert contents(kb) == before


def test_last_document_stays(library: Path, kb: Path) -> None:
    index(library / "copper.md", kb=kb)
    (library / "copper.md").unlink()
    with pytest.raises(InputError, match="no document would be left"):
        index(library / "copper.md", kb=kb)
    assert len(passages(kb)) >= 1


def test_knowledge_base_inside_the_folder_is_left_out(library: Path) -> None:
    kb = library / "kb"
    index(library, kb=kb)
    before = passages(kb)
    assert index(library, kb=kb).added == 0
    assert passages(kb) == before


# -- documents that cannot be read --------------------------------------------------------------------------


def test_unreadable_documents_are_reported_and_their_old_version_stays(library: Path, kb: Path) -> None:
    index(library, kb=kb)
    before = passages(kb)
    (library / "copper.md").write_bytes(bytes(range(256)) * 8)
    (library / "junk.pdf").write_bytes(b"no PDF")
    report = index(library, kb=kb)
    assert (report.added, report.updated, report.removed, report.unchanged) == (0, 0, 0, 3)
    reasons = {item.source: item.reason for item in report.skipped}
    assert set(reasons) == {"copper.md", "junk.pdf"}
    assert "the version indexed before stays" in reasons["copper.md"]
    assert "the version" not in reasons["junk.pdf"]
    assert passages(kb) == before
    (library / "copper.md").write_text("Copper is back.", encoding="utf-8")
    assert index(library, kb=kb).updated == 1


def test_document_that_changes_while_it_is_read_keeps_its_old_version(
    library: Path, kb: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    index(library, kb=kb)
    before = passages(kb)
    note = library / "copper.md"
    note.write_text("Copper is changing.", encoding="utf-8")
    real_fstat = os.fstat

    def write_after_the_look(descriptor: int) -> os.stat_result:
        status = real_fstat(descriptor)
        if os.path.samestat(status, note.stat()):
            with note.open("a", encoding="utf-8") as file:
                file.write(" It changes again.")
        return status

    with monkeypatch.context() as patch:
        patch.setattr(os, "fstat", write_after_the_look)
        report = index(library, kb=kb)
    assert [item.source for item in report.skipped] == ["copper.md"]
    assert "changed while it was read" in report.skipped[0].reason
    assert "the version indexed before stays" in report.skipped[0].reason
    assert passages(kb) == before
    assert index(library, kb=kb).updated == 1


def test_nothing_readable_is_an_error(tmp_path: Path, kb: Path) -> None:
    (tmp_path / "junk").mkdir()
    (tmp_path / "junk" / "a.pdf").write_bytes(b"no PDF")
    with pytest.raises(InputError, match=r"none of the documents can be read, first a\.pdf"):
        index(tmp_path / "junk", kb=kb)
    assert not Manifest.exists(kb)


# -- settings -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("settings", "field", "value", "made"),
    [
        (BuildSettings(encoder="other-encoder"), "encoder", "other-encoder", "minilm-l6-v2"),
        (BuildSettings(encoder_dtype="fp32"), "encoder_dtype", "fp32", "bf16"),
        (BuildSettings(chunk_tokens=100), "chunk_tokens", "100", "200"),
        (BuildSettings(chunk_overlap=0), "chunk_overlap", "0", "32"),
    ],
)
def test_other_settings_than_before_are_refused(
    settings: BuildSettings, field: str, value: str, made: str, library: Path, kb: Path
) -> None:
    index(library, kb=kb)
    with pytest.raises(InputError) as caught:
        build([library], kb, settings)
    for part in (field, value, made, "another folder"):
        assert part in str(caught.value)
    assert build([library], kb, BuildSettings("minilm-l6-v2", "bf16", 200, 32)).unchanged == 3


@pytest.mark.parametrize(
    ("settings", "field"),
    [
        (BuildSettings(chunk_tokens=15), "chunk_tokens"),
        (BuildSettings(chunk_tokens=255), "chunk_tokens"),  # MiniLM reads 256 with the special tokens
        (BuildSettings(chunk_tokens=100, chunk_overlap=51), "chunk_overlap"),
        (BuildSettings(chunk_overlap=-1), "chunk_overlap"),
        (BuildSettings(encoder="no-such-encoder"), "no-such-encoder"),
        (BuildSettings(encoder_dtype="fp7"), "encoder_dtype"),
    ],
)
def test_settings_that_cannot_be_used(settings: BuildSettings, field: str, library: Path, kb: Path) -> None:
    with pytest.raises(InputError, match=field):
        build([library], kb, settings)
    assert not Manifest.exists(kb)


# -- writers and readers ------------------------------------------------------------------------------------


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


def test_reader_keeps_its_generation(library: Path, kb: Path) -> None:
    index(library, kb=kb)
    with open_base(kb) as reader:
        assert reader.index("bm25")
        old = [hit.passage.text for hit in reader.search(["copper"], len(reader), index="flat")[0]]
        for number in range(3):
            (library / "copper.md").write_text(f"{COPPER}\nVersion {number}.\n", encoding="utf-8")
            index(library, kb=kb)
        # Files that are read only now must still be there.
        assert [hit.passage.text for hit in reader.search(["copper"], len(reader), index="hnsw")[0]] == old
        assert len(list((kb / GENERATIONS).iterdir())) == 2
        with open_base(kb) as newer:
            assert newer.manifest.generation == 4
    index(library, kb=kb)
    assert [path.name for path in (kb / GENERATIONS).iterdir()] == ["000004"]


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
                    assert hit.passage.text == f"Version {base.manifest.generation - 1} of the note."
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
