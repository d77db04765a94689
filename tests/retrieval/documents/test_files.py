"""Folders to files: what is found, under which name, and what is left out aloud."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from specrag.errors import InputError
from specrag.retrieval.documents.files import FoundFiles, find_files


@pytest.fixture
def docs(tmp_path: Path) -> Path:
    folder = tmp_path / "docs"
    (folder / "sub folder").mkdir(parents=True)
    (folder / "b.md").write_text("b")
    (folder / "sub folder" / "Ünïcode 東京.txt").write_text("text")
    return folder


def sources(found: FoundFiles) -> list[str]:
    return [file.source for file in found.files]


def skipped(found: FoundFiles) -> dict[str, str]:
    reasons = {entry.source: entry.reason for entry in found.skipped}
    assert len(reasons) == len(found.skipped)
    return reasons


def test_folder_is_walked_in_order(docs: Path) -> None:
    found = find_files([docs])
    assert sources(found) == ["b.md", "sub folder/Ünïcode 東京.txt"]
    assert not found.skipped
    first = found.files[0]
    assert first.path == docs / "b.md"
    assert (first.size, first.mtime_ns) == (1, first.path.stat().st_mtime_ns)


def test_relative_paths_become_absolute(docs: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(docs.parent)
    assert find_files([Path("docs")]) == find_files([docs])
    assert find_files([Path("docs/b.md")]).files[0].path == docs / "b.md"


def test_file_reached_twice_is_found_once(docs: Path) -> None:
    assert sources(find_files([docs, docs / "b.md", docs / "sub folder"])) == [
        "b.md",
        "sub folder/Ünïcode 東京.txt",
    ]


def test_equal_names_in_two_folders_stay_apart(docs: Path, tmp_path: Path) -> None:
    other = tmp_path / "other"
    other.mkdir()
    (other / "b.md").write_text("other")
    (other / "c.md").write_text("c")
    found = find_files([docs, other])
    assert len(set(sources(found))) == 4
    assert {(docs / "b.md").as_posix(), (other / "b.md").as_posix(), "c.md"} <= set(sources(found))


def test_hidden_entries_are_named_once(docs: Path) -> None:
    (docs / ".git" / "objects").mkdir(parents=True)
    (docs / ".git" / "config").write_text("x")
    (docs / ".env").write_text("x")
    found = find_files([docs])
    assert skipped(found).keys() == {".git", ".env"}
    assert sources(find_files([docs / ".git"])) == ["config"]  # given itself


def test_gitignore_files_are_minded(docs: Path) -> None:
    inner = docs / "sub folder"
    for name in (
        "a.log",
        "keep.log",
        "build/x.txt",
        "sub folder/build/y.txt",
        "sub folder/a.tmp",
        "sub folder/b.log",
    ):
        (docs / name).parent.mkdir(exist_ok=True)
        (docs / name).write_text("x")
    (docs / ".gitignore").write_text("# a comment\n*.log\n!\n!keep.log\n/build/\n*.md\n")
    (inner / ".gitignore").write_text("*.tmp\n!b.log\n")
    found = find_files([docs])
    assert sources(found) == [
        "keep.log",
        "sub folder/b.log",  # the inner file decides
        "sub folder/build/y.txt",  # the outer one means its own folder only
        "sub folder/Ünïcode 東京.txt",
    ]
    reasons = skipped(found)
    ignored = {source for source, reason in reasons.items() if reason.startswith("left out by .gitignore")}
    assert ignored == {"a.log", "b.md", "build", "sub folder/a.tmp"}  # a folder is one entry
    assert reasons.keys() - ignored == {".gitignore", "sub folder/.gitignore"}
    assert set(found.ignored) == {docs / "a.log", docs / "b.md", docs / "build", inner / "a.tmp"}
    assert sources(find_files([docs / "a.log", docs / "build"])) == ["a.log", "x.txt"]  # given themselves


def test_folders_that_programs_fill_are_left_out(docs: Path) -> None:
    for name in (
        "node_modules/p/README.md",
        "sub folder/__pycache__/m.pyc",
        "env/pyvenv.cfg",
        "env/lib/m.py",
    ):
        (docs / name).parent.mkdir(parents=True, exist_ok=True)
        (docs / name).write_text("x")
    (docs / "sub folder" / "node_modules").write_text("a file of this name is a file")
    found = find_files([docs])
    assert sources(found) == ["b.md", "sub folder/node_modules", "sub folder/Ünïcode 東京.txt"]
    reasons = skipped(found)
    assert reasons.keys() == {"node_modules", "sub folder/__pycache__", "env"}
    assert reasons["env"].startswith("a virtual environment")
    assert "lib/m.py" in sources(find_files([docs / "env"]))


def test_excluded_folder(docs: Path) -> None:
    (docs / "kb").mkdir()
    (docs / "kb" / "passages.sqlite").write_text("x")
    assert skipped(find_files([docs], exclude=[docs / "kb"])) == {"kb": "left out as asked"}
    assert skipped(find_files([docs], exclude=[docs / "kb" / "passages.sqlite"])).keys() == {
        "kb/passages.sqlite"
    }


def test_links(docs: Path, tmp_path: Path) -> None:
    secret = tmp_path / "secret"
    secret.mkdir()
    (secret / "s.txt").write_text("secret")
    (docs / ".data").mkdir()
    (docs / ".data" / "d.txt").write_text("reached by its link only")
    (docs / "out.txt").symlink_to(secret / "s.txt")
    (docs / "out").symlink_to(secret)
    (docs / "again.md").symlink_to("b.md")
    (docs / "loop").symlink_to(docs)
    (docs / "self").symlink_to("self")
    (docs / "gone").symlink_to("nothing")
    (docs / "d.txt").symlink_to(".data/d.txt")
    found = find_files([docs])
    assert sources(found) == ["b.md", "d.txt", "sub folder/Ünïcode 東京.txt"]
    reasons = skipped(found)
    assert reasons.keys() == {".data", "out.txt", "out", "again.md", "loop", "self", "gone"}
    assert "leaves the folder" in reasons["out.txt"]
    assert "leaves the folder" in reasons["out"]
    assert reasons["again.md"] == "a link to b.md, which is indexed itself"
    assert "to nothing" in reasons["gone"]
    assert "to itself" in reasons["self"]


def test_link_that_was_given_is_followed(docs: Path, tmp_path: Path) -> None:
    link = tmp_path / "latest"
    link.symlink_to(docs)
    assert find_files([link]) == find_files([docs])


def test_name_that_is_no_utf8(docs: Path) -> None:
    bad = Path(os.fsdecode(os.fsencode(docs) + b"/bad\xff.txt"))
    bad.write_text("x")
    found = find_files([docs])
    assert skipped(found) == {"bad\\xff.txt": "its name is no UTF-8; rename it"}
    with pytest.raises(InputError, match="UTF-8"):
        find_files([bad])


def test_pipes_are_named(docs: Path) -> None:
    os.mkfifo(docs / "pipe")
    assert skipped(find_files([docs])) == {"pipe": "neither a file nor a folder"}
    with pytest.raises(InputError, match="neither"):
        find_files([docs / "pipe"])


def test_missing_path_comes_before_any_work(docs: Path, tmp_path: Path) -> None:
    missing = tmp_path / "missing"
    with pytest.raises(InputError, match="no such file or folder") as caught:
        find_files([docs, missing])
    assert caught.value.value == str(missing)
    with pytest.raises(InputError, match="no such file or folder"):
        find_files([docs / "b.md" / "x"])
    with pytest.raises(InputError, match="no path"):
        find_files([Path("a\0b")])


def test_nothing_to_index(docs: Path, tmp_path: Path) -> None:
    empty = tmp_path / "empty"
    (empty / "inner").mkdir(parents=True)
    with pytest.raises(InputError, match="nothing to index: it holds no files"):
        find_files([empty])
    with pytest.raises(InputError, match="at least one"):
        find_files([])
    assert skipped(find_files([docs, empty])) == {empty.as_posix(): "an empty folder"}
    (empty / ".git").mkdir()
    with pytest.raises(InputError, match=r"first \.git: hidden"):
        find_files([empty])
