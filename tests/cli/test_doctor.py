"""``specrag doctor``: what it shows, that its self-test can fail, and its exit codes."""

from __future__ import annotations

import io
import json
import os
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from rich.console import Console

from specrag.cli import doctor
from specrag.cli.selftest import Check, compare
from specrag.engine.outputs import Row
from specrag.engine.passes import Segment
from specrag.models.loading import load_model
from specrag.models.toy import ToyModel
from tests.cli.shell import specrag

HARDWARE = doctor.Hardware("Test CPU", 2, 2, ("avx2",), True, (), 16 * 10**9, 8 * 10**9)
REPORT = doctor.Report(
    versions={"python": "3.11.0"},
    hardware=HARDWARE,
    home=doctor.Home("models-home", True, 5 * 10**9),
    models={"smollm2-135m": 270 * 10**6},
    checks=(Check("tree pass", "passed", "12 positions"), Check("equal bits", "passed", "12 positions")),
    speeds={"bf16, cpu": 61.25},
    default="int8, batch_invariant",
)


def _shown(report: doctor.Report) -> str:
    console = Console(file=io.StringIO(), width=100, record=True)
    console.print(doctor.render(report))
    return console.export_text()


def test_this_machine(smollm2: Path) -> None:
    result = specrag("doctor", "--json")
    assert result.code == 0, result.out
    found = json.loads(result.out)
    assert found["ok"] is True
    assert found["verdict"].startswith(("all", "no check failed"))
    # What was installed; torch itself adds its kind, which the package's name may not have.
    assert found["versions"]["torch"].partition("+")[0] == torch.__version__.partition("+")[0]
    assert found["hardware"]["memory_bytes"] > found["hardware"]["free_bytes"] > 0
    assert found["models"]["smollm2-135m"] > 200_000_000
    states = {check["name"]: check["state"] for check in found["checks"]}
    for dtype in ("bf16", "int8"):
        assert states[f"tree pass equals plain decoding, {dtype}, cpu"] == "passed"
        assert states[f"equal bits in any pass, {dtype}, cpu"] == "passed"
        assert found["speeds"][f"{dtype}, cpu"] > 0
    llm = load_model("smollm2-135m")
    texts = "write plain decoding's text" if llm.batch_invariant else "near-ties may part"
    assert found["default"].startswith(llm.dtype)
    assert texts in found["default"]


def test_without_a_model_nothing_is_fetched(tmp_path: Path) -> None:
    home = tmp_path / "home"
    result = specrag("doctor", SPECRAG_HOME=str(home))
    assert result.code == 0, result.err
    assert "specrag doctor --pull" in result.out
    assert result.out.rstrip().splitlines()[-1].startswith("no check failed, 1 skipped")
    assert not home.exists()


def test_damaged_model_fails(smollm2: Path, tmp_path: Path) -> None:
    copy = tmp_path / "models" / "smollm2-135m"
    copy.mkdir(parents=True)
    for file in smollm2.iterdir():
        os.symlink(file, copy / file.name)
    (copy / "config.json").unlink()
    result = specrag("doctor", "--json", SPECRAG_HOME=str(tmp_path))
    assert result.code == 1, result.out
    found = json.loads(result.out)
    assert found["ok"] is False
    failed = [check for check in found["checks"] if check["state"] == "failed"]
    assert "config.json" in failed[0]["detail"]
    assert "Traceback" not in result.err


def test_the_page_for_people() -> None:
    page = _shown(REPORT)
    for part in (
        "Test CPU",
        "avx2",
        "16.0 GB, 8.0 GB free",
        "models-home",
        "0.3 GB",
        "61.2 tokens/s",
        "int8, batch_invariant",
    ):
        assert part in page
    assert page.rstrip().endswith("all 2 checks passed")


def test_verdicts() -> None:
    failed = replace(REPORT, checks=(*REPORT.checks, Check("files", "failed", "gone")))
    assert failed.verdict == "1 check failed"
    assert "✗" in _shown(failed)
    skipped = replace(REPORT, checks=(*REPORT.checks, Check("files", "skipped", "not here")))
    assert skipped.verdict == "no check failed, 1 skipped"


class Wavering(ToyModel):
    """A model whose logits depend on how many rows are in the pass."""

    def __init__(self, shift: float) -> None:
        super().__init__(vocab_size=7)
        self._shift = shift

    def forward(self, segments: Sequence[Segment]) -> list[list[Row]]:
        answers = super().forward(segments)
        rows = [row for answer in answers for row in answer]
        if len(rows) > 2:
            for row in rows:
                if row.logits is not None:
                    row.logits = row.logits + np.linspace(0, self._shift, 7, dtype=np.float32)
        return answers


@pytest.mark.parametrize(
    ("model", "tokens", "bits"),
    [(ToyModel(vocab_size=7), True, True), (Wavering(1e-4), True, False), (Wavering(100), False, False)],
)
def test_comparison_notices_what_it_looks_for(model: ToyModel, tokens: bool, bits: bool) -> None:
    found = compare(model, [1, 2, 3], [3, 2])
    assert (found.tokens, found.bits) == (tokens, bits)
    assert found.compared == 12
