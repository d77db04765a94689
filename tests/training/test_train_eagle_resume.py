"""A run that is stopped, killed, or out of disk goes on as if nothing had been."""

from __future__ import annotations

import json
import os
import resource
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from specrag.errors import SpecragError
from specrag.language_model import LanguageModel
from specrag.training.eagle.run import Outcome
from specrag.training.eagle.train import train_eagle
from tests.training.tiny_run import TRAINING, loop_in, material_of, tiny_run, to_the_end, until

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.parametrize("unroll", [1, 3])
def test_a_stopped_run_ends_in_the_same_bits(
    tiny_llm: LanguageModel, done: Outcome, tmp_path: Path, unroll: int
) -> None:
    material = material_of(tiny_llm, done.out)
    settings = replace(TRAINING, epochs=2, unroll=unroll, batch_tokens=300)
    whole = loop_in(tmp_path / "whole", material, tiny_llm, settings)
    whole.run(to_the_end)
    steps = whole.progress.step
    for stop in range(1, steps, 2):
        loop_in(tmp_path / "parts", material, tiny_llm, settings).run(until(stop))
    parts = loop_in(tmp_path / "parts", material, tiny_llm, settings)
    assert steps - 2 <= parts.progress.step < steps
    parts.run(to_the_end)
    assert parts.progress == whole.progress
    assert parts.best.keys() == whole.best.keys()
    for name, tensor in whole.best.items():
        assert torch.equal(tensor, parts.best[name]), name
    first, second = (tmp_path / name / "checkpoint.safetensors" for name in ("whole", "parts"))
    assert first.read_bytes() == second.read_bytes()


def start(model: Path, texts: Path, out: Path) -> subprocess.Popen[str]:
    """A run of the command line in a process of its own."""
    options = {
        "--model": model, "--dtype": "fp32", "--data": texts, "--out": out, "--tokens": 700,
        "--answer-tokens": 24, "--length": 240, "--held-back": 3, "--draft-vocabulary": 100, "--epochs": 6,
        "--batch-tokens": 500, "--precision": "fp32", "--patience": 999, "--threads": 1,
        "--checkpoint-minutes": 1e-6,
    }  # fmt: skip
    words = [str(word) for pair in options.items() for word in pair]
    return subprocess.Popen(
        [sys.executable, "-m", "specrag", "train", "eagle", "--json", *words],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT / "src")},
    )


def test_a_killed_run_goes_on(tiny_model: Path, texts: Path, tmp_path: Path) -> None:
    """Killed in the middle of a step or of a checkpoint, then finished: the head has the bits of a run in one go."""
    whole = start(tiny_model, texts, tmp_path / "whole")
    killed = start(tiny_model, texts, tmp_path / "killed")
    assert killed.stderr is not None
    for line in killed.stderr:  # a line for each measurement, twice an epoch
        if line.split()[1] == "training:" and "held back" in line:
            killed.send_signal(signal.SIGKILL)
            break
    killed.communicate(timeout=60)
    assert killed.returncode == -signal.SIGKILL
    assert (tmp_path / "killed" / "work" / "training" / "checkpoint.safetensors").is_file()
    assert not (tmp_path / "killed" / "model.safetensors").exists()
    finished = start(tiny_model, texts, tmp_path / "killed")
    reports = []
    for process in (whole, finished):
        out, error = process.communicate(timeout=120)
        assert process.returncode == 0, error
        reports.append({name: value for name, value in json.loads(out).items() if name != "out"})
    assert reports[0] == reports[1]
    assert reports[0]["finished"]
    for name in ("model.safetensors", "draft_vocabulary.safetensors", "config.json", "training.jsonl"):
        assert (tmp_path / "whole" / name).read_bytes() == (tmp_path / "killed" / name).read_bytes(), name


class Clock:
    """Time that passes by a minute whenever it is asked for."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        self.now += 60.0
        return self.now


def test_a_time_limit_stops_in_good_order(tiny_llm: LanguageModel, texts: Path, tmp_path: Path) -> None:
    reached = []
    for _ in range(40):
        outcome = train_eagle(tiny_llm, tiny_run(texts, tmp_path, minutes=15.0), clock=Clock())
        reached.append(outcome.stage)
        if outcome.ended:
            break
        assert (tmp_path / "model.safetensors").exists() == (outcome.kept is not None)
    assert outcome.ended == "all 3 epochs are done"
    assert len(reached) > 1
    whole = tiny_run(texts, tmp_path / "whole")
    train_eagle(tiny_llm, whole)
    assert (tmp_path / "model.safetensors").read_bytes() == (whole.out / "model.safetensors").read_bytes()


@contextmanager
def largest_file(size: int) -> Iterator[None]:
    """The system refuses to make a file larger than this, as it does when the disk is full."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def test_a_full_disk_leaves_the_last_checkpoint(
    tiny_llm: LanguageModel, done: Outcome, tmp_path: Path
) -> None:
    material = material_of(tiny_llm, done.out)
    settings = replace(TRAINING, epochs=2)
    loop = loop_in(tmp_path, material, tiny_llm, settings)
    loop.run(until(2))
    path = tmp_path / "checkpoint.safetensors"
    before = path.read_bytes()
    stopped = loop_in(tmp_path, material, tiny_llm, settings)
    with largest_file(len(before) // 2), pytest.raises(SpecragError, match="no space is left") as caught:
        stopped.run(to_the_end)
    assert str(path) in str(caught.value)
    assert "intact" in str(caught.value)
    assert path.read_bytes() == before
    rest = loop_in(tmp_path, material, tiny_llm, settings)
    assert rest.progress.step == 2
    rest.run(to_the_end)
    whole = loop_in(tmp_path / "whole", material, tiny_llm, settings)
    whole.run(to_the_end)
    assert path.read_bytes() == (tmp_path / "whole" / path.name).read_bytes()


def test_a_damaged_checkpoint_is_an_error(tiny_llm: LanguageModel, done: Outcome, tmp_path: Path) -> None:
    material = material_of(tiny_llm, done.out)
    loop_in(tmp_path, material, tiny_llm, TRAINING).run(until(1))
    path = tmp_path / "checkpoint.safetensors"
    for damaged in (path.read_bytes()[:-9], b"", path.read_bytes().replace(b"best_at", b"worst_a")):
        path.write_bytes(damaged)
        with pytest.raises(SpecragError, match="--fresh"):
            loop_in(tmp_path, material, tiny_llm, TRAINING)
