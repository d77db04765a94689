"""``python -m benchmarks.vllm``: what it asks, and its table."""

from __future__ import annotations

import argparse
from pathlib import Path

import pytest

from benchmarks.server.subjects import VLLM, VLLM_SPECRAG, VLLM_VARIABLE
from benchmarks.vllm.__main__ import _rounds, measure, table
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
    def run(method: str, number: int, seconds: float, output: str = "same") -> dict[str, object]:
        key = {"task": "rag", "clients": 4, "round": number, "method": method}
        return {**key, "tokens": 100, "seconds": seconds, "output": output}

    records = [
        run(VLLM, 0, 2.0),
        run(VLLM, 1, 4.0),
        run(VLLM_SPECRAG, 0, 1.0),
        run(VLLM_SPECRAG, 1, 4.0, "x"),
    ]
    records.append(run(VLLM_SPECRAG, 2, 0.01))
    assert table(records).splitlines()[2] == ("| rag | 4 | 2 | 38/s, 1.00 (2 equal) | 62/s, 1.50 (1 equal) |")


def test_it_says_what_it_needs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(VLLM_VARIABLE, raising=False)
    with pytest.raises(InputError, match="make test-vllm makes one"):
        next(measure(argparse.Namespace(data=Path("x")), {}, []))
