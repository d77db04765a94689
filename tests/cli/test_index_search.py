"""``specrag index`` and ``specrag search``, run as real processes."""

from __future__ import annotations

import json
import re
import time
from pathlib import Path
from typing import Any

import pytest

from specrag.cli.printable import printable
from tests.cli.shell import Result, specrag
from tests.retrieval.library import index, write_library, write_rows


@pytest.fixture(scope="module")
def kb(model_home: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("knowledge")
    index(write_library(folder / "my library"), kb=folder / "kb")
    return folder / "kb"


def test_index_reports_what_it_did(model_home: Path, tmp_path: Path) -> None:
    library, kb = write_library(tmp_path / "my library"), tmp_path / "kb"
    for number in range(25):
        (library / f"bad {number:02}.pdf").write_bytes(b"no PDF")
    made = specrag("index", str(library), "--kb", str(kb))
    assert made.code == 0, made.err
    assert made.err == ""  # no bar where nobody looks
    assert "documents: 3 added, 0 updated, 0 removed, 0 unchanged" in made.out
    assert "skipped:   25" in made.out
    assert made.out.count("its content is something else, not a PDF") == 20
    assert "and 5 more; --json lists all" in made.out
    (library / "copper.md").unlink()
    (library / "tin.txt").write_text("Tin is soft.", encoding="utf-8")
    report = json.loads(specrag("index", str(library), "--kb", str(kb), "--json").out)
    assert {name: report[name] for name in ("added", "updated", "removed", "unchanged", "encoded")} == {
        "added": 1,
        "updated": 0,
        "removed": 1,
        "unchanged": 2,
        "encoded": 1,
    }
    assert len(report["skipped"]) == 25
    assert report["skipped"][0]["source"] == "bad 00.pdf"
    assert report["seconds"] > 0


def test_what_a_library_prints_is_not_in_the_json(
    model_home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from specrag.cli.main import run
    from specrag.retrieval.encoder import Encoder

    encode = Encoder.encode_passages

    def chatty(self: Encoder, *given: Any) -> Any:
        print("(raylet) The node has been marked dead")
        return encode(self, *given)

    monkeypatch.setattr(Encoder, "encode_passages", chatty)
    write_rows(tmp_path / "rows.jsonl", [{"text": "Tin is a soft metal."}])
    assert run(["index", str(tmp_path / "rows.jsonl"), "--kb", str(tmp_path / "kb"), "--json"]) == 0
    told = capsys.readouterr()
    assert json.loads(told.out)["encoded"] == 1
    assert "(raylet)" in told.err


def test_documents_in_another_language_are_noted(model_home: Path, tmp_path: Path) -> None:
    (tmp_path / "a.md").write_text(
        "Die Garantie auf das Glas der Objektive gilt zwei Jahre.\n", encoding="utf-8"
    )
    made = specrag("index", str(tmp_path / "a.md"), "--kb", str(tmp_path / "kb"))
    assert made.code == 0, made.err
    assert made.err.startswith("note: most documents are in German, and minilm-l6-v2 knows English; ")
    found = specrag("search", "Gläser", "--kb", str(tmp_path / "kb"), "--index", "bm25")
    assert "Die Garantie auf das Glas" in found.out


def test_search_shows_hits_and_the_time(kb: Path) -> None:
    result = specrag("search", "Which metal is red?", "--kb", str(kb), "-k", "2")
    assert result.code == 0, result.err
    lines = result.out.splitlines()
    assert lines[0].split()[:1] == ["1."]
    assert "Copper" in lines[0]
    assert "copper.md" in lines[0]
    assert float(lines[0].split()[1]) > 0
    assert "soft red metal" in result.out
    assert sum(line.startswith(" 2. ") for line in lines) == 1
    assert "2 of" in result.err
    assert " ms" in result.err


def test_search_as_json(kb: Path) -> None:
    words = ("--index", "bm25", "--where", "year>=2000", "--where", "title=Iron,Gold", "--json")
    began = time.perf_counter()
    result = specrag("search", "a metal that rusts", "--kb", str(kb), *words)
    assert result.code == 0, result.err
    assert result.err == ""
    found = json.loads(result.out)
    assert found["index"] == "bm25"
    assert [hit["title"] for hit in found["hits"]] == ["Iron"]
    hit = found["hits"][0]
    assert (hit["rank"], hit["source"], hit["place"]) == (1, "facts.jsonl", "line 2")
    assert hit["metadata"] == {"year": 2004, "tags": ["metal"]}
    assert found["search_seconds"] > 0
    assert found["load_seconds"] > 0
    assert found["search_seconds"] + found["load_seconds"] < time.perf_counter() - began


def test_fewer_passages_than_the_usual_number_of_hits(model_home: Path, tmp_path: Path) -> None:
    (tmp_path / "tin.txt").write_text("Tin is soft.", encoding="utf-8")
    index(tmp_path / "tin.txt", kb=tmp_path / "kb")
    result = specrag("search", "tin", "--kb", str(tmp_path / "kb"), "--json")
    assert len(json.loads(result.out)["hits"]) == 1


def test_documents_cannot_drive_the_terminal(model_home: Path, tmp_path: Path) -> None:
    text = "Tin \x1b[31mis\x1b]0;owned\x07 soft. [bold]markup[/bold]"
    write_rows(tmp_path / "rows.jsonl", [{"title": "T\x1b[2Jin", "text": text}])
    index(tmp_path / "rows.jsonl", kb=tmp_path / "kb")
    result = specrag("search", "tin", "--kb", str(tmp_path / "kb"), "--index", "bm25")
    assert result.code == 0, result.err
    assert "\x1b" not in result.out
    assert "\x07" not in result.out
    assert "[bold]markup[/bold]" in result.out


def test_printable() -> None:
    assert printable("größe\n\t  日本 \x1b[31m\u202e\x00x") == "größe 日本 [31m x"


def _assert_one_line(result: Result, code: int, named: tuple[str, ...]) -> None:
    assert result.code == code, result.err
    assert result.out == ""
    assert result.err.startswith("error: ")
    assert result.err.count("\n") == 1
    assert [part for part in named if part not in result.err] == [], result.err


@pytest.mark.parametrize(
    ("words", "code", "named"),
    [
        (("metal", "-k", "0"), 1, ("k: 0", "give 1 to")),
        (("metal", "-k", "1000"), 1, ("k: 1000", "passages; give 1 to")),
        (("metal", "-k", "many"), 2, ("'many'", "give an integer")),
        (("",), 1, ("query", "at least one character")),
        (("metal", "--index", "hybird"), 1, ("index", "'hybird'", "did you mean hybrid")),
        (("metal", "--where", "yaer>=2000"), 1, ("where", "'yaer'", "did you mean 'year'")),
        (("metal", "--where", "year!2000"), 1, ("--where", "'year!2000'", "FIELD>=VALUE")),
        (("metal", "--rerank", "no-such-model"), 1, ("no-such-model",)),
    ],
    ids=str,
)
def test_search_refuses(words: tuple[str, ...], code: int, named: tuple[str, ...], kb: Path) -> None:
    _assert_one_line(specrag("search", *words, "--kb", str(kb)), code, named)


def test_knowledge_base_that_is_not_there(tmp_path: Path) -> None:
    named = (str(tmp_path / "kb"), "does not exist", "specrag index")
    _assert_one_line(specrag("search", "metal", "--kb", str(tmp_path / "kb")), 1, named)
    assert specrag("search", "metal").code == 2  # --kb is needed


@pytest.mark.parametrize(
    ("words", "code", "named"),
    [
        (("nothing-here",), 1, ("path", "nothing-here", "no such file or folder")),
        ((), 2, ("PATH",)),
        ((".", "--chunk-tokens", "many"), 2, ("--chunk-tokens", "'many'")),
        ((".", "--chunk-tokens", "9"), 1, ("--chunk-tokens", "9", "at least 16")),
        ((".", "--encoder", "no-such-encoder"), 1, ("no-such-encoder",)),
    ],
    ids=str,
)
def test_index_refuses(
    words: tuple[str, ...],
    code: int,
    named: tuple[str, ...],
    model_home: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    (tmp_path / "tin.txt").write_text("Tin is soft.", encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    _assert_one_line(specrag("index", *words, "--kb", "kb"), code, named)


def test_index_with_another_encoder(kb: Path) -> None:
    result = specrag("index", str(kb.parent / "my library"), "--kb", str(kb), "--encoder", "other-encoder")
    _assert_one_line(result, 1, ("encoder", "'other-encoder'", "'minilm-l6-v2'", "another folder"))


def test_matching_words_are_bold_on_a_terminal_and_the_snippet_holds_them(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from specrag.cli.search import _print_hits
    from specrag.retrieval.passage import Hit, Passage

    text = f"{'Nothing of the kind stands here. ' * 20}Tin melts early, and copper is melting late."
    hits = [Hit(Passage(0, "a.md", "Metals", "", text, {}), 0.5)]
    _print_hits(hits, "When does tin melt?")
    plain = capsys.readouterr().out
    assert "\x1b" not in plain
    assert "... " in plain
    assert "Tin melts early, and copper" in " ".join(plain.split())
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.delenv("NO_COLOR", raising=False)
    monkeypatch.setenv("TERM", "xterm")
    _print_hits(hits, "When does tin melt?")
    bold = set(re.findall(r"\x1b\[1m(\w+)\x1b\[0m", capsys.readouterr().out))
    assert bold == {"Metals", "Tin", "melts", "melting"}  # the title, and equal stems; no stop words
