"""``specrag train questions`` and ``specrag train rationales``, as people and scripts use them."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

pytest.importorskip("openai")

from recipes.passages import KnowledgeBasePassages
from specrag.cli import main as frame
from specrag.errors import InputError
from specrag.retrieval.knowledge_base import KnowledgeBase
from tests.recipes.rule_writer import write_passages
from tests.sample import build_sample

ROW = {
    "id": "a",
    "question": "What is bronze?",
    "answer": "copper",
    "passages": [{"title": "", "text": "copper"}],
}


@pytest.mark.parametrize(
    ("words", "named"),
    [
        (("questions",), ("--passages", "[]", "--kb")),
        (("questions", "--passages", "{passages}", "--kb", "kb"), ("--passages", "one of both")),
        (("questions", "--passages", "{folder}/none.jsonl"), ("none.jsonl", "readable")),
        (("questions", "--passages", "{rows}"), ("rows.jsonl:1: text", "title and a text")),
        (("questions", "--passages", "{passages}", "--rows", "0"), ("rows", "0", "at least 1")),
        (("questions", "--passages", "{passages}", "--choices", "2"), ("choices", "2.0", "from 0 to 1")),
        (("questions", "--passages", "{passages}", "--exclude", "{passages}"), ("--exclude", "no questions")),
        (("questions", "--passages", "{passages}", "--model", "http://127.0.0.1:9/v1#m"), ("127.0.0.1:9",)),
        (("rationales", "{bad}"), ("bad.jsonl:2: passages", "[]", "at least one")),
        (("rationales", "{folder}"), ("rows.jsonl",)),
        (("rationales", "{rows}", "--passages", "0"), ("passages", "0", "at least 1")),
        (("rationales", "{rows}", "--model", "smollm2-135n"), ("model", "smollm2-135n", "did you mean")),
    ],
)
def test_bad_input_is_told_in_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], words: tuple[str, ...], named: tuple[str, ...]
) -> None:
    folder = tmp_path / "folder"
    folder.mkdir()
    paths = {
        "folder": folder,
        "passages": write_passages(tmp_path, count=3),
        "rows": tmp_path / "rows.jsonl",
        "bad": tmp_path / "bad.jsonl",
    }
    paths["rows"].write_text(f"{json.dumps(ROW)}\n", encoding="utf-8")
    paths["bad"].write_text(f"{json.dumps(ROW)}\n{json.dumps({**ROW, 'passages': []})}\n", encoding="utf-8")
    given = [word.format(**paths) for word in words]
    assert frame.run(["train", *given, "--out", str(tmp_path / "out")]) == 1
    said = capsys.readouterr()
    assert said.out == ""
    assert said.err.startswith("error: ")
    assert said.err.count("\n") == 1
    assert [part for part in named if part not in said.err] == [], said.err
    assert not (tmp_path / "out").exists()


def test_an_installed_package_without_recipes_says_where_they_are(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in [name for name in sys.modules if name.split(".")[0] == "recipes"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "recipes", None)  # stops its import
    for words in (["questions", "--passages", "x"], ["rationales", "x"]):
        assert frame.run(["train", *words, "--out", str(tmp_path / "out")]) == 1
        said = capsys.readouterr()
        assert said.err.count("\n") == 1
        assert "clone of the repository" in said.err


def test_a_model_writes_rationales_for_rows_in_a_file(
    smollm2: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = tmp_path / "rows.jsonl"
    rows.write_text(f"{json.dumps(ROW)}\n", encoding="utf-8")
    evaluated = tmp_path / "evaluated.jsonl"
    evaluated.write_text('{"question": "Which metal?", "answers": ["tin"]}\n', encoding="utf-8")
    words = ["train", "rationales", str(rows), "--exclude", str(evaluated), "--model", "smollm2-135m"]
    words += ["--dtype", "bf16", "--out", str(tmp_path / "out"), "--no-check"]
    assert frame.run(words) == 0
    said = capsys.readouterr()
    assert "left out: 0 rows for their question, 0 for an answer with its passage" in said.err
    assert "rationales: " in said.err
    assert said.out.splitlines()[0].startswith("rows:     ")
    assert frame.run([*words, "--json"]) == 0
    card = json.loads(capsys.readouterr().out)
    assert card["rows"] + card["rejected"] == 1


def test_passages_of_a_knowledge_base_are_found_by_its_index(tmp_path: Path) -> None:
    with KnowledgeBase.open(build_sample(tmp_path / "kb")) as base:
        pool = KnowledgeBasePassages(base, "bm25")
        assert len(pool) == len(base)
        ((first, *_),) = pool.find(["Who discovered radium?"], 3)
        assert "radium" in pool.passage(first).text
        with pytest.raises(InputError, match="index"):
            KnowledgeBasePassages(base, "nonsense")
