"""``specrag kb`` and ``specrag index --watch``, run as real processes."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.cli.shell import specrag
from tests.retrieval.library import index, write_library


@pytest.fixture
def made(model_home: Path, tmp_path: Path) -> Path:
    index(write_library(tmp_path / "library"), kb=tmp_path / "kb")
    return tmp_path


def test_a_knowledge_base_is_shown_changed_and_checked(made: Path) -> None:
    kb = str(made / "kb")
    listed = specrag("kb", "list", "--kb", kb)
    assert listed.code == 0, listed.err
    assert [line.split()[0] for line in listed.out.splitlines()] == ["1", "4", "1"]
    assert listed.out.splitlines()[0].endswith("  copper.md")
    (made / "tin.txt").write_text("Tin is soft.", encoding="utf-8")
    added = json.loads(specrag("kb", "add", str(made / "tin.txt"), "--kb", kb, "--json").out)
    assert (added["added"], added["encoded"], added["passages"]) == (1, 1, 7)
    removed = specrag("kb", "remove", "copper.md", "facts.jsonl", "--kb", kb)
    assert removed.out == "passages:  2\n"
    info = specrag("kb", "info", "--check", "--kb", kb)
    assert info.code == 0, info.err
    assert "documents:  2\npassages:   2\nversion:    3\nlanguages:  english\n" in info.out
    assert "to compact: 5 of 7 rows\n" in info.out
    assert specrag("kb", "compact", "--kb", kb).out == "passages:  2\n"
    described = json.loads(specrag("kb", "info", "--kb", kb, "--json").out)
    assert (described["rows"], described["encoder"]["name"]) == (2, "minilm-l6-v2")
    exported = specrag("kb", "export", str(made / "all.jsonl"), "--kb", kb)
    assert exported.out == "passages:  2\n"
    rows = [json.loads(line) for line in (made / "all.jsonl").read_text(encoding="utf-8").splitlines()]
    assert {row["source"] for row in rows} == {"tin.txt", "my birds/Reiher, größere.txt"}
    updated = json.loads(specrag("kb", "update", "--kb", kb, "--json").out)
    assert (updated["added"], updated["unchanged"], updated["passages"]) == (2, 2, 7)


@pytest.mark.parametrize(
    ("words", "named"),
    [
        (["remove", "coper.md"], "did you mean 'copper.md'? `specrag kb list` names those that are there"),
        (["export", "library/copper.md"], "it is there already; name another file"),
        (["add", "./nothing.txt"], "no such file or folder"),
    ],
)
def test_what_cannot_be_done_is_one_line(made: Path, words: list[str], named: str) -> None:
    paths = [str(made / word) if "/" in word else word for word in words[1:]]
    done = specrag("kb", words[0], *paths, "--kb", str(made / "kb"))
    assert done.code == 1
    assert named in done.err
    assert done.err.count("\n") == 1


def test_a_knowledge_base_that_is_not_there(tmp_path: Path) -> None:
    done = specrag("kb", "info", "--kb", str(tmp_path / "nothing"))
    assert (done.code, done.err.count("\n")) == (1, 1)
    assert "does not exist: make it with `specrag index PATH --kb DIR`" in done.err
    assert specrag("kb", "add", str(tmp_path), "--kb", str(tmp_path / "nothing")).code == 1
    assert not (tmp_path / "nothing").exists()


def test_a_watched_folder_is_followed(model_home: Path, tmp_path: Path) -> None:
    library, kb = write_library(tmp_path / "library"), tmp_path / "kb"
    command = [sys.executable, "-m", "specrag", "index", str(library), "--kb", str(kb), "--watch", "--json"]
    with subprocess.Popen(command, stdout=-1, stderr=-1, text=True, env=os.environ) as following:
        assert following.stdout is not None
        assert following.stderr is not None
        assert json.loads(following.stdout.readline())["added"] == 3
        assert following.stderr.readline() == "watching; Ctrl-C ends it\n"
        (library / "tin.txt").write_text("Tin is soft.", encoding="utf-8")
        report = json.loads(following.stdout.readline())
        assert (report["added"], report["unchanged"], report["encoded"]) == (1, 3, 1)
        (library / "copper.md").unlink()
        assert json.loads(following.stdout.readline())["removed"] == 1
        following.send_signal(signal.SIGINT)
        assert following.wait(20) == 130
    found = specrag("search", "What is soft?", "--kb", str(kb), "-k", "1", "--index", "bm25")
    assert "Tin is soft." in found.out


def test_a_table_is_not_followed(tmp_path: Path) -> None:
    done = specrag("index", str(tmp_path), "--kb", str(tmp_path / "kb"), "--table", "t", "--watch")
    assert done.code == 1
    assert "--watch" in done.err
