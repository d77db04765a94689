"""``python -m benchmarks.exactness.contexts``."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from benchmarks.exactness import contexts
from benchmarks.exactness.contexts import METHODS, PLAIN, TEMPERATURES, table

MODEL = "smollm2-135m"


def test_a_text_that_differs_is_counted_at_its_temperature() -> None:
    def record(method: str, number: int, temperature: float, tokens: list[int]) -> dict[str, object]:
        told = {"model": MODEL, "id": str(number), "temperature": temperature, "method": method}
        return {**told, "tokens": tokens, "accepted": 3}

    plain = [record(PLAIN, number, heat, [number, 1]) for number in range(2) for heat in TEMPERATURES]
    rapid = [record("rapid", 0, 0.0, [0, 1]), record("rapid", 1, 0.0, [1]), record("rapid", 1, 0.8, [1, 1])]
    told = table([*plain, *rapid])
    assert "| rapid | 0.0 | 2 | 1 | 6 |" in told
    assert "| rapid | 0.8 | 1 | 1 | 3 |" in told


def test_a_context_by_all_methods(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], smollm2: Path
) -> None:
    facts = "\n\n".join(f"The harbour of town {number} was built in {1800 + number}." for number in range(90))
    prompt = f"Answer the question.\n\n{facts}\n\nQuestion: When was the harbour of town 7 built?\nAnswer:"
    row = {"id": "hotpotqa-0", "task": "hotpotqa", "prompt": prompt, "answers": ["1807"]}
    (tmp_path / "longbench_v1_mini.jsonl").write_text(json.dumps(row))
    words = ["contexts", str(tmp_path / "out"), "--data", str(tmp_path), "--model", MODEL, "--new", "8"]
    monkeypatch.setattr(sys, "argv", words)
    contexts.main()
    records = (tmp_path / "out" / "texts.jsonl").read_text()
    assert len(records.splitlines()) == len(METHODS) * len(TEMPERATURES)
    told = capsys.readouterr().out
    for method in METHODS:
        for heat in TEMPERATURES:
            assert f"| {method} | {heat} | 1 | 1 | " in told
    guessed = {one["method"] for one in map(json.loads, records.splitlines()) if one["accepted"]}
    assert {"rapid", "naive-sd", "streaming-drafter"} <= guessed
    contexts.main()
    assert (tmp_path / "out" / "texts.jsonl").read_text() == records
