"""``python -m benchmarks.vllm``: what it asks, and its table."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import pytest

from benchmarks.server.subjects import VLLM, VLLM_SPECRAG, VLLM_VARIABLE
from benchmarks.vllm import __main__ as vllm_bench
from benchmarks.vllm.__main__ import _rounds, measure, table
from benchmarks.vllm.prompts import HOTPOTQA, HUMANEVAL, load_prompts, load_sources
from specrag.errors import InputError


def test_no_prompt_comes_twice_until_all_have_come() -> None:
    given = argparse.Namespace(rounds=2, tasks=["rag", "multi-turn"], clients=[1, 2], each=2)
    prompts = {task: [f"{task} {number}" for number in range(12)] for task in ("rag", "multi-turn")}
    rounds = list(_rounds(given, prompts))
    assert [(number, cell.task, cell.clients, len(asked)) for number, cell, asked in rounds] == [
        (number, task, clients, 2 * clients)
        for number in (0, 1)
        for task in ("rag", "multi-turn")
        for clients in (1, 2)
    ]
    assert sorted(prompt for _, _, asked in rounds for prompt in asked) == sorted(
        prompt for mine in prompts.values() for prompt in mine
    )


def test_the_table_compares_rounds_that_both_have() -> None:
    def run(method: str, number: int, seconds: float, accepted: int, second: str = "b") -> dict[str, object]:
        key = {"task": "rag", "clients": 4, "round": number, "method": method}
        counts = {"tokens": 100, "written": 120, "accepted": accepted, "drafted": 90}
        return {**key, **counts, "seconds": seconds, "texts": ["a", second]}

    records = [
        run(VLLM, 0, 2.0, 0),
        run(VLLM, 1, 4.0, 0),
        run(VLLM_SPECRAG, 0, 1.0, 60),
        run(VLLM_SPECRAG, 1, 4.0, 20, "x"),
    ]
    records.append(run(VLLM_SPECRAG, 2, 0.01, 0))
    assert table(records).splitlines()[2] == (
        "| rag | 4 | 2 | 37.5/s, 1.00 [1.00, 1.00], 100% equal, 0.00 accepted "
        "| 62.5/s, 1.41 [1.00, 2.00], 75% equal, 0.50 accepted |"
    )


def test_it_says_what_it_needs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(VLLM_VARIABLE, raising=False)
    with pytest.raises(InputError, match="make test-vllm makes one"):
        next(measure(argparse.Namespace(methods=None), {}, []))
    monkeypatch.setattr(vllm_bench, "vllm_methods", lambda: (VLLM, VLLM_SPECRAG))
    with pytest.raises(InputError, match=r"'eagle' .*: vllm; vllm\+specrag; vllm\+specrag, corpus$"):
        next(measure(argparse.Namespace(methods=["eagle"]), {}, []))
    monkeypatch.delenv("SPECRAG_DATA", raising=False)
    with pytest.raises(InputError, match="give the folder with Spec-Bench"):
        next(measure(argparse.Namespace(methods=["vllm+specrag"], data=None), {}, []))


def _lines(path: Path, rows: list[dict[str, object]]) -> None:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")


def test_prompts_hold_what_is_quoted_and_edited(tmp_path: Path) -> None:
    passages = [{"title": f"T{number}", "text": f"text {number}"} for number in range(8)]
    _lines(tmp_path / HOTPOTQA, [{"question": "Who?", "passages": passages}])
    _lines(
        tmp_path / HUMANEVAL,
        [
            {"prompt": "def f():\n", "canonical_solution": "    return 1\n"},
            {"prompt": "x" * 9000, "canonical_solution": ""},
        ],
    )
    _lines(
        tmp_path / "corpus_wiki_passages.jsonl",
        [{"id": n, "title": "W", "text": f"wiki {n}"} for n in range(5)],
    )
    found = load_prompts(tmp_path, ("quoting", "editing"))
    (quoting,), (editing,) = found["quoting"], found["editing"]
    assert "[6] T5\ntext 5\n\nQuestion: Who?" in quoting
    assert "text 6" not in quoting
    assert editing.startswith("```python\ndef f():\n    return 1\n```")
    sources = list(load_sources(tmp_path, 3))
    assert sources[0] == "T0\ntext 0"
    assert sources[7:] == ["T7\ntext 7", "wiki 0", "wiki 1", "wiki 2"]
