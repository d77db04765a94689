"""``python -m benchmarks.exactness.defaults``."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from benchmarks.exactness import defaults
from benchmarks.exactness.defaults import PLAIN, RUNS, lossless, table

MODEL = "smollm2-135m"


def _record(method: str, run: str, prompt: int, tokens: list[int], cached: int = 0) -> dict[str, object]:
    told = {"model": MODEL, "new": 24, "method": method, "run": run}
    return {**told, "prompt": prompt, "tokens": tokens, "cached": cached}


def test_a_text_that_differs_is_counted() -> None:
    plain = [_record(PLAIN, "alone", number, [1, 2, number]) for number in range(3)]
    same = [_record("respec", "16", number, [1, 2, number], 4) for number in range(2)]
    told = table([*plain, *same, _record("respec", "16", 2, [1, 2])])
    assert "| respec | 16 | 3 | 2 | 8 |" in told
    assert "| plain | alone | 3 | 3 | 0 |" in told


def test_two_prompts_by_all_methods(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    texts = ["Name a metal.", "x" * 2000, "Count to three, and then to four."]
    rows = [{"question_id": number, "category": "qa", "turns": [text]} for number, text in enumerate(texts)]
    (tmp_path / "specbench_480.jsonl").write_text("\n".join(map(json.dumps, rows)))
    words = ["defaults", str(tmp_path / "out"), "--data", str(tmp_path), "--model", MODEL, "--new", "8"]
    words.append("--batch-invariant")
    monkeypatch.setattr(sys, "argv", words)
    defaults.main()
    records = (tmp_path / "out" / "texts.jsonl").read_text()
    assert len(records.splitlines()) == 2 * (1 + 2 * len(lossless(MODEL)))
    told = capsys.readouterr().out
    for run in list(RUNS)[1:]:
        for method in lossless(MODEL):
            assert f"| {method} | {run} | 2 | 2 | " in told
    defaults.main()
    assert (tmp_path / "out" / "texts.jsonl").read_text() == records
