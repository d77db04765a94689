"""Rows to tune a drafter on in seconds, and a tuning run of the tiny model."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import torch

from specrag.models import catalog
from specrag.models.catalog import ModelFiles
from specrag.models.tokenizer import Tokenizer
from specrag.training.drafter.examples import ExampleEncoder, split
from specrag.training.drafter.model import Tuned, build
from specrag.training.drafter.objective import Drafted, DrafterObjective, DrafterProgress, drafter_loop
from specrag.training.drafter.rows import read_rows
from specrag.training.drafter.run import DrafterRun, TuningSettings
from specrag.training.loop import TrainingLoop

THINGS = ("river", "heron", "copper", "violin", "glacier", "lantern", "harbour", "meadow")
PLACES = ("Norway", "Chile", "Kenya", "Japan", "Peru")
CPU = torch.device("cpu")
TINY = TuningSettings(
    held_back=3,
    rank=4,
    epochs=2,
    batch_rows=4,
    batch_tokens=3000,
    precision="fp32",
    drafts=0,
    learning_rate=1e-2,
)


def row(number: int, **changes: object) -> dict[str, object]:
    """A row as JSON has it; ``None`` takes a field away."""
    thing, place = THINGS[number % len(THINGS)], PLACES[number % len(PLACES)]
    values = {
        "id": f"r{number}",
        "kind": "free-form",
        "question": f"In which country is {thing} {number}?",
        "answer": place,
        "rationale": f"The passage says that {thing} {number} is in {place}.",
        "passages": [
            {"title": f"{thing} {number}", "text": f"The {thing} {number} is in {place}, near the sea."},
            {"title": "", "text": "It rained for a week."},
        ],
        "source": "made by a test",
        **changes,
    }
    return {name: value for name, value in values.items() if value is not None}


def write_rows(path: Path, rows: list[dict[str, object]]) -> Path:
    """The rows as a file."""
    path.write_text("".join(f"{json.dumps(each)}\n" for each in rows), encoding="utf-8")
    return path


def drafter_run(model: Path | str, data: Path, out: Path, **changes: object) -> DrafterRun:
    """The run, with other fields where they are given."""
    fields: dict[str, object] = {
        "model": str(model), "data": (data,), "out": out, "settings": TINY, "device": "cpu",
        "command": "specrag train drafter ...",
    }  # fmt: skip
    return DrafterRun(**{**fields, **changes})  # type: ignore[arg-type]


def tiny_tuned(model: Path, settings: TuningSettings = TINY) -> Tuned:
    """The tiny model before its first step."""
    return build(catalog.resolve(model), settings, CPU)


def loop_in(
    model: Path,
    data: Path,
    folder: Path,
    settings: TuningSettings = TINY,
    *,
    draft: Callable[[], Drafted | None] = lambda: None,
) -> TrainingLoop[DrafterProgress]:
    """A training loop with its checkpoint in a folder, saved behind every step."""
    files: ModelFiles = catalog.resolve(model)
    encoder = ExampleEncoder(Tokenizer(files), length=settings.length, rationales=settings.rationales)
    divided = split(read_rows([data]), settings)
    training, held_back = (
        [example for row in rows if (example := encoder.example(row)) is not None]
        for rows in (divided.training, divided.held_back)
    )
    objective = DrafterObjective(tiny_tuned(model, settings), training, held_back, settings, draft=draft)
    return drafter_loop(
        objective, folder / "checkpoint.safetensors", clock=lambda: 0.0, checkpoint_seconds=0.0
    )


def until(step: int) -> Callable[[DrafterProgress], bool]:
    """Stop behind this step."""
    return lambda progress: progress.step < step


def to_the_end(_progress: DrafterProgress) -> bool:
    """Go on."""
    return True
