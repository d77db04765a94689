"""Bringing a knowledge base up to date: what changed, what is gone, several paths."""

from __future__ import annotations

import contextlib
import os
import random
import shutil
from collections.abc import Sequence
from pathlib import Path

import pytest

from specrag.errors import InputError
from specrag.retrieval import reading
from specrag.retrieval.manifest import Manifest
from specrag.retrieval.passage_store import PassageStore
from specrag.retrieval.reading import find_changes
from tests.retrieval.library import (
    ROWS,
    answers,
    assert_same_but_rounding,
    contents,
    index,
    passages,
    run_python,
    state,
    write_rows,
)

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
    assert state(kb).version == 2


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


def test_what_is_ignored_now_is_removed_and_what_cannot_be_read_is_told_first(
    library: Path, kb: Path
) -> None:
    index(library, kb=kb)
    (library / ".gitignore").write_text("copper.md\n")
    (library / "photo.txt").write_bytes(b"\x89PNG\r\n\x1a\n")
    report = index(library, kb=kb)
    assert (report.added, report.removed) == (0, 1)
    assert "copper.md" not in {passage.source for passage in passages(kb)}
    assert [entry.source for entry in report.skipped] == ["photo.txt", ".gitignore", "copper.md"]


def test_nothing_changed_writes_nothing(library: Path, kb: Path) -> None:
    index(library, kb=kb)
    before = {
        path: path.stat().st_mtime_ns for path in kb.rglob("*") if path.name not in ("writer.lock", "000001")
    }
    report = index(library, kb=kb)
    assert (report.added, report.updated, report.removed, report.unchanged) == (0, 0, 0, 3)
    assert report.encoded == 0
    assert {path: path.stat().st_mtime_ns for path in before} == before
    assert {path.name for path in kb.rglob("*.*")} == {
        "writer.lock",
        "manifest.json",
        "passages.sqlite",
        "vectors.f32",
    }


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


def _disturb(folders: Sequence[Path], draw: random.Random) -> None:
    """Make, change or remove some files, whose few names meet in different folders."""
    for _ in range(draw.randrange(4)):
        path = draw.choice(folders) / f"{draw.choice('abc')}.txt"
        if path.exists() and draw.random() < 0.7:
            path.unlink()
        else:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(f"Herons, part {draw.randrange(5)}.", encoding="utf-8")


@pytest.mark.parametrize("seed", range(6))
def test_looking_at_few_documents_finds_what_looking_at_all_finds(
    seed: int, kb: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    draw, top = random.Random(seed), tmp_path / "texts"
    folders = [top / name for name in ("x", "x/deep", "x-", "y", "y/deep")]
    anchor = top / "anchor.txt"
    for path in (*(folder / "a.txt" for folder in folders), anchor):
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"Birds in {path}.", encoding="utf-8")
    index(folders[0], anchor, kb=kb)
    spared = 0
    for _ in range(40):
        _disturb(folders, draw)
        with contextlib.closing(PassageStore(Manifest.read(kb).generation_folder(kb))) as store:
            known = [Path(file.path) for file in store.files()]
            present = [path for path in folders if any(path.rglob("*.txt"))]
            choice = [*present, *known, *([top] if draw.random() < 0.02 else [])]
            paths = draw.sample(choice, draw.randrange(1, 4))
            few = find_changes(paths, kb, store)
            with monkeypatch.context() as patched:
                patched.setattr(reading, "_FEW", -1)
                whole = find_changes(paths, kb, store)
        assert (few.roots, few.removed, few.skipped) == (whole.roots, whole.removed, whole.skipped)
        spare = set(whole.entries) - set(few.entries)
        assert set(few.entries) <= set(whole.entries)
        assert len(spare) == few.others
        assert all(entry.is_elsewhere for entry in spare)
        spared += few.others
        report = index(*paths, kb=kb)
        assert report.added + report.updated + report.unchanged + len(report.skipped) >= len(whole.entries)
    assert spared > 25


def test_touched_document_is_unchanged(library: Path, kb: Path) -> None:
    index(library, kb=kb)
    os.utime(library / "copper.md", (1, 1))
    report = index(library, kb=kb)
    assert (report.unchanged, report.encoded) == (3, 0)
    assert state(kb).version == 1


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
    expected = {os.path.realpath(tmp_path / name / "README.md") for name in ("one", "two")}
    assert {passage.source for passage in passages(kb)} == expected
    assert_same_but_rounding(kb, tmp_path / "scratch")


def test_moved_library_is_the_same_library(library: Path, kb: Path, tmp_path: Path) -> None:
    index(library, kb=kb)
    before = passages(kb)
    library.rename(tmp_path / "moved")
    report = index(tmp_path / "moved", kb=kb)
    assert (report.added, report.updated, report.removed, report.unchanged) == (0, 0, 0, 3)
    assert report.encoded == 0
    assert passages(kb) == before
    assert state(kb).roots == (os.path.realpath(tmp_path / "moved"),)
    assert index(tmp_path / "moved", kb=kb).unchanged == 3
    assert state(kb).version == 2


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


def test_a_path_that_is_no_utf8_is_refused(library: Path, kb: Path) -> None:
    index(library, kb=kb)
    strange = Path(os.fsdecode(os.fsencode(library) + b"/\xff"))
    link = library / "link"
    link.symlink_to(strange)
    for path in (strange, link):
        with pytest.raises(InputError, match="no UTF-8"):
            index(path, kb=kb)
    strange.mkdir()
    (strange / "a.txt").write_text("Gulls.", encoding="utf-8")
    for path in (strange, link):
        with pytest.raises(InputError, match="no UTF-8"):
            index(path, kb=kb)
    assert index(library, kb=kb).unchanged == 3


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
