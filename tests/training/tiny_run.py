"""A whole training run in seconds: a random Llama of 0.2 million weights, two dozen short texts, a small head."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import torch

from specrag.language_model import LanguageModel
from specrag.models.decoder import LeanDecoder
from specrag.training.eagle.answers import AnswerStore
from specrag.training.eagle.features import FeatureCache, texts_of
from specrag.training.eagle.losses import read_matrices
from specrag.training.eagle.module import head_config
from specrag.training.eagle.objective import HeadObjective, HeadProgress, Material, head_loop, new_head
from specrag.training.eagle.run import DataSettings, EagleRun, TrainingSettings
from specrag.training.loop import TrainingLoop

THINGS = ("river", "heron", "copper", "violin", "glacier", "lantern", "harbour", "meadow")
DATA = DataSettings(tokens=700, answer_tokens=24, length=240, held_back=3)
TRAINING = TrainingSettings(
    draft_vocabulary=100, epochs=3, batch_tokens=500, precision="fp32", learning_rate=2e-3
)


def write_texts(folder: Path, *, count: int = 24) -> Path:
    """Passages with titles, as JSON lines."""
    path = folder / "texts.jsonl"
    rows = []
    for number in range(count):
        thing = THINGS[number % len(THINGS)]
        rows.append(
            {"title": f"{thing} {number}", "text": f"The {thing} {number} is old. It is near a {thing}."}
        )
    path.write_text("".join(f"{json.dumps(row)}\n" for row in rows), encoding="utf-8")
    return path


def tiny_run(source: Path, out: Path, **changes: object) -> EagleRun:
    """The run, with other fields where they are given."""
    fields: dict[str, object] = {"data": (source,), "out": out, "texts": DATA, "training": TRAINING}
    return EagleRun(**{**fields, **changes})  # type: ignore[arg-type]


def material_of(llm: LanguageModel, out: Path) -> Material:
    """What the run in a folder trains on: all texts, of which the first is measured on too."""
    answers = AnswerStore(out / "work" / "answers.jsonl").answers
    texts = texts_of(list(answers.values()), DATA.length)
    target = read_matrices(llm.loaded.files, [], dtype=torch.float32, device=torch.device("cpu"))
    return Material(FeatureCache(out / "work" / "features", texts, 64), target, range(len(texts)), [0])


def loop_in(
    folder: Path, material: Material, llm: LanguageModel, settings: TrainingSettings
) -> TrainingLoop[HeadProgress]:
    """A training loop with its checkpoint in a folder."""
    assert isinstance(llm.model, LeanDecoder)
    head = new_head(head_config(llm.model.config), 0, torch.device("cpu"))
    path = folder / "checkpoint.safetensors"
    objective = HeadObjective(head, material, settings)
    return head_loop(objective, path, clock=lambda: 0.0, checkpoint_seconds=1.0)


def until(step: int) -> Callable[[HeadProgress], bool]:
    """Stop behind this step."""
    return lambda progress: progress.step < step


def to_the_end(_progress: HeadProgress) -> bool:
    """Go on."""
    return True
