"""A tuning run that is stopped, killed, or out of disk goes on as if nothing had been."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from dataclasses import asdict, replace
from pathlib import Path

import pytest
import torch

from specrag.errors import SpecragError
from specrag.training.drafter.train import train_drafter
from tests.training.test_train_eagle_resume import largest_file
from tests.training.tiny_drafter import TINY, drafter_run, loop_in, row, to_the_end, until, write_rows

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def data(tmp_path: Path) -> Path:
    """Rows of fourteen questions: eleven to train on in three steps an epoch, three held back."""
    return write_rows(tmp_path / "rows.jsonl", [row(number) for number in range(14)])


@pytest.mark.parametrize("changes", [{}, {"full": True}, {"precision": "bf16", "batch_tokens": 1000}])
def test_a_stopped_run_ends_in_the_same_bits(
    tiny_model: Path, data: Path, tmp_path: Path, changes: dict[str, object]
) -> None:
    settings = replace(TINY, **changes)  # type: ignore[arg-type]
    whole = loop_in(tiny_model, data, tmp_path / "whole", settings)
    whole.run(to_the_end)
    assert (whole.progress.step, whole.progress.rows) == (6, 22)
    for stop in (1, 2, 5):
        loop_in(tiny_model, data, tmp_path / "parts", settings).run(until(stop))
    parts = loop_in(tiny_model, data, tmp_path / "parts", settings)
    assert parts.progress.step == 5
    parts.run(to_the_end)
    assert parts.progress == whole.progress
    assert parts.progress.history[-1].held_back < parts.progress.history[0].held_back
    first, second = (tmp_path / name / "checkpoint.safetensors" for name in ("whole", "parts"))
    assert first.read_bytes() == second.read_bytes()


def test_the_seed_decides(tiny_model: Path, data: Path, tmp_path: Path) -> None:
    def best(seed: int, name: str) -> dict[str, torch.Tensor]:
        torch.manual_seed(hash(name))
        loop = loop_in(tiny_model, data, tmp_path / name, replace(TINY, epochs=1, seed=seed))
        loop.run(to_the_end)
        return loop.best

    one, same, other = best(0, "a"), best(0, "b"), best(1, "c")
    assert all(torch.equal(tensor, same[name]) for name, tensor in one.items())
    assert any(not torch.equal(tensor, other[name]) for name, tensor in one.items())


KILLED = replace(TINY, epochs=4, evaluations=1, patience=999, learning_rate=5e-4)


def start(model: Path, data: Path, out: Path) -> subprocess.Popen[str]:
    """The run of :data:`KILLED` as a command line in a process of its own."""
    options = {
        "--model": model, "--out": out, "--held-back": 3, "--rank": 4, "--epochs": 4, "--batch-rows": 4,
        "--batch-tokens": 3000, "--evaluations": 1, "--precision": "fp32", "--drafts": 0, "--patience": 999,
        "--threads": torch.get_num_threads(), "--checkpoint-minutes": 1e-6, "--device": "cpu",
    }  # fmt: skip
    words = [str(word) for pair in options.items() for word in pair]
    return subprocess.Popen(
        [sys.executable, "-m", "specrag", "train", "drafter", "--json", str(data), *words],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT / "src")},
    )


def test_a_killed_run_goes_on(tiny_model: Path, data: Path, tmp_path: Path) -> None:
    killed = start(tiny_model, data, tmp_path / "killed")
    assert killed.stderr is not None
    for line in killed.stderr:  # a line for each measurement
        if " 3 of 12 steps" in line:
            killed.send_signal(signal.SIGKILL)
            break
    killed.communicate(timeout=60)
    assert killed.returncode == -signal.SIGKILL
    assert (tmp_path / "killed" / "work" / "checkpoint.safetensors").is_file()
    assert (tmp_path / "killed" / "loss.png").is_file()
    assert not (tmp_path / "killed" / "adapter_model.safetensors").exists()
    finished = start(tiny_model, data, tmp_path / "killed")
    out, error = finished.communicate(timeout=120)
    assert finished.returncode == 0, error
    assert "0 of 12 steps" not in error
    whole = train_drafter(drafter_run(tiny_model, data, tmp_path / "whole", settings=KILLED))
    report = json.loads(out)
    assert report["finished"]
    assert (report["step"], report["kept"]) == (12, asdict(whole.kept))
    for name in ("adapter_model.safetensors", "adapter_config.json", "training.jsonl"):
        assert (tmp_path / "whole" / name).read_bytes() == (tmp_path / "killed" / name).read_bytes(), name


def test_a_full_disk_leaves_the_last_checkpoint(tiny_model: Path, data: Path, tmp_path: Path) -> None:
    loop_in(tiny_model, data, tmp_path, TINY).run(until(2))
    path = tmp_path / "checkpoint.safetensors"
    before = path.read_bytes()
    stopped = loop_in(tiny_model, data, tmp_path, TINY)
    with largest_file(len(before) // 2), pytest.raises(SpecragError, match="no space is left") as caught:
        stopped.run(to_the_end)
    assert str(path) in str(caught.value)
    assert "intact" in str(caught.value)
    assert path.read_bytes() == before
    rest = loop_in(tiny_model, data, tmp_path, TINY)
    assert rest.progress.step == 2
    rest.run(to_the_end)
    whole = loop_in(tiny_model, data, tmp_path / "whole", TINY)
    whole.run(to_the_end)
    assert path.read_bytes() == (tmp_path / "whole" / path.name).read_bytes()


def test_a_damaged_checkpoint_is_an_error(tiny_model: Path, data: Path, tmp_path: Path) -> None:
    loop_in(tiny_model, data, tmp_path, TINY).run(until(1))
    path = tmp_path / "checkpoint.safetensors"
    whole = path.read_bytes()
    for damaged in (
        whole[:-9],
        b"",
        whole.replace(b"best_at", b"worst_a"),
        whole.replace(b"best.base", b"rest.base", 1),
    ):
        path.write_bytes(damaged)
        with pytest.raises(SpecragError, match="--fresh"):
            loop_in(tiny_model, data, tmp_path, TINY)
    path.write_bytes(whole)
    with pytest.raises(SpecragError, match="--fresh"):
        loop_in(tiny_model, data, tmp_path, replace(TINY, rank=2))


def test_a_loss_that_is_no_number_ends_the_run(tiny_model: Path, data: Path, tmp_path: Path) -> None:
    loop_in(tiny_model, data, tmp_path, TINY).run(until(1))
    wild = loop_in(tiny_model, data, tmp_path, replace(TINY, learning_rate=1e25))
    with pytest.raises(SpecragError, match="a lower --learning-rate"):
        wild.run(to_the_end)
    # The weights that measured best are still there.
    kept = loop_in(tiny_model, data, tmp_path)
    assert kept.progress.step in (1, 2)
    assert all(bool(torch.isfinite(tensor).all()) for tensor in kept.best.values())
