"""README's figures are those of the committed records, with their prompts and their share of equal texts."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path

import pytest

from specrag.bench.measurement import Measurement, from_json_lines

ROOT = Path(__file__).resolve().parents[2]
RESULTS = ROOT / "docs" / "results"

#: The rows of README's table of speculation: model, method, and the measurement that it shows. When they were measured,
#: `adaptive` was called `respec`.
ROWS = {
    ("SmolLM2-135M, bf16, `batch_invariant`", "adaptive"): ("tokens", "ablation/overall", "respec"),
    ("SmolLM2-135M, bf16, `batch_invariant`", "prompt lookup, weighed by cost"): (
        "tokens", "ablation/overall", "prompt-lookup+cost-aware",
    ),
    ("SmolLM2-135M, bf16, `batch_invariant`", "SAM-Decoding, weighed by cost"): (
        "tokens", "ablation/overall", "sam-decoding+cost-aware",
    ),
    ("SmolLM2-135M, bf16, `batch_invariant`", "ReSpec (as published)"): (
        "tokens", "ablation/overall", "respec+published",
    ),
    ("SmolLM2-135M, bf16", "adaptive"): ("tokens", "overall", "respec"),
    ("SmolLM2-135M, bf16", "with an EAGLE-2 head"): ("tokens", "overall", "respec+eagle-2"),
    ("SmolLM2-135M, bf16", "prompt lookup"): ("tokens", "overall", "prompt-lookup"),
    ("Qwen2.5-Coder-1.5B, bf16", "adaptive"): ("qwen2.5-coder-1.5b/tokens", "overall", "respec"),
    ("Qwen2.5-Coder-1.5B, bf16", "with SmolLM2 as its drafter"): (
        "qwen2.5-coder-1.5b/tokens", "overall", "respec+draft-model",
    ),
    ("Qwen2.5-Coder-1.5B, bf16", "transformers' assisted generation"): (
        "qwen2.5-coder-1.5b/tokens", "overall", "transformers-assisted",
    ),
}  # fmt: skip


def table(text: str, heading: str) -> list[list[str]]:
    """The cells of the table with this heading, a model's name filled in where it is left out."""
    lines = text[text.index(heading) :].split("\n\n")[0].splitlines()[2:]
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]
    for before, row in pairwise(rows):
        row[0] = row[0] or before[0]
    return rows


def measured(page: str, task: str, method: str, baseline: str) -> Measurement | None:
    found = from_json_lines((RESULTS / f"{page}.jsonl").read_text(encoding="utf-8"))
    mine = [
        entry for entry in found if (entry.task, entry.method, entry.baseline) == (task, method, baseline)
    ]
    return mine[0] if mine else None


def test_every_speed_up_stands_in_the_records() -> None:
    rows = table((ROOT / "README.md").read_text(encoding="utf-8"), "| model | method | prompts |")
    assert [(model, method) for model, method, *_ in rows] == list(ROWS)
    for model, method, prompts, ratio, over_transformers, equal in rows:
        page, task, name = ROWS[model, method]
        entry = measured(page, task, name, "plain")
        assert entry is not None
        assert entry.identical is not None
        assert (int(prompts), entry.extra["repeats"]) == (entry.n, 1)
        assert ratio == f"{entry.speedup:.2f} ({entry.speedup_low:.2f} to {entry.speedup_high:.2f})"
        assert equal == f"{entry.identical:.0%}".replace("%", " %")
        other = measured(page, task, name, "transformers")
        assert over_transformers == ("" if other is None else f"{other.speedup:.2f}")


@pytest.mark.parametrize(
    "page", sorted(RESULTS.rglob("*.md")), ids=lambda page: str(page.relative_to(RESULTS))
)
def test_what_no_method_can_reach_is_marked(page: Path) -> None:
    records = page.with_suffix(".jsonl")
    if not records.exists():
        return
    impossible = [
        entry for entry in from_json_lines(records.read_text(encoding="utf-8")) if entry.above_ceiling
    ]
    text = page.read_text(encoding="utf-8")
    assert text.count("~~ error") >= len(impossible)
    assert ("An error of measurement" in text) == bool(impossible)
