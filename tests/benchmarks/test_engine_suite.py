"""``specrag bench engine``: what its figures are labelled as."""

from __future__ import annotations

from pathlib import Path

import pytest
from typer.testing import CliRunner

from benchmarks.engine import suite
from specrag.bench.measurement import from_json_lines
from specrag.cli.main import app
from tests.processor import PACKED_BF16


@PACKED_BF16
@pytest.mark.slow
def test_eight_bits_are_labelled_as_such(smollm2: Path, tmp_path: Path) -> None:
    command = ["bench", "engine", "--quick", "--no-plots", "--repeats", "1"]
    parts = ["--task", "decode/*", "--out", str(tmp_path), "--json", "-"]
    result = CliRunner().invoke(app, [*command, *parts])
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    dtypes = {entry.method: entry.dtype for entry in from_json_lines(result.stdout)}
    assert dtypes == {"plain": "bf16", "plain+int8": "int8", "transformers": "bf16"}


def test_variants_name_their_weights_since_the_default_depends_on_the_machine() -> None:
    kinds = {name: kind["dtype"] for name, kind in suite._OURS.items()}
    assert kinds == {"plain": "bf16", "plain+int8": "int8", "plain+invariant": "bf16", "plain+kv8": "bf16"}
