"""Whole runs: the head is written, goes on after a kill as if nothing had been, and tells what is wrong."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from specrag.engine.outputs import LOGITS
from specrag.engine.passes import Segment
from specrag.errors import InputError
from specrag.language_model import LanguageModel
from specrag.models.decoder import LeanDecoder
from specrag.models.eagle_head import load_head
from specrag.models.toy import ToyModel
from specrag.training.eagle.features import make_batch
from specrag.training.eagle.losses import losses
from specrag.training.eagle.module import head_config
from specrag.training.eagle.objective import CHAIN, new_head
from specrag.training.eagle.run import DataSettings, EagleRun, Outcome, TrainingSettings
from specrag.training.eagle.train import train_eagle
from specrag.training.loop import learning_rate
from specrag.training.run import Status
from tests.training.tiny_run import TRAINING, loop_in, material_of, tiny_run, to_the_end, until

ROOT = Path(__file__).resolve().parents[2]
CPU = torch.device("cpu")


# -- what a run leaves ----------------------------------------------------------------------------------------


def test_the_head_is_written_and_drafts(done: Outcome, tiny_llm: LanguageModel, texts: Path) -> None:
    assert done.ended == "all 3 epochs are done"
    assert {path.name for path in done.out.iterdir()} == {
        "config.json", "model.safetensors", "draft_vocabulary.safetensors", "README.md", "loss.png", "mat.png",
        "training.jsonl", "work",
    }  # fmt: skip
    load_head(str(done.out), tiny_llm.loaded)
    weights = load_file(done.out / "model.safetensors")
    assert {tensor.dtype for tensor in weights.values()} == {torch.bfloat16}
    assert len(load_file(done.out / "draft_vocabulary.safetensors")["tokens"]) == 100
    assert done.measured is not None
    assert done.measured.prompts == 2
    assert 1 <= done.measured.mean_accepted_tokens <= CHAIN + 1
    # What is written is the best that was measured.
    assert done.kept is not None
    assert done.progress is not None
    history = [json.loads(line) for line in (done.out / "training.jsonl").read_text().splitlines()]
    held_back = [each["held_back_regression"] + 0.1 * each["held_back_classification"] for each in history]
    assert held_back.index(min(held_back)) == done.progress.best_at
    assert history[done.progress.best_at]["step"] == done.kept.step
    assert len(history) == 6


def test_the_card_says_how_it_came_about(done: Outcome, texts: Path) -> None:
    card = (done.out / "README.md").read_text(encoding="utf-8")
    assert done.kept is not None
    assert done.progress is not None
    assert done.measured is not None
    for part in (
        f"{done.progress.step:,} steps on {done.progress.tokens:,} tokens",
        "all 3 epochs are done",
        f"| 1 | {done.kept.accuracy[0]:.1%} |",
        f"accept {done.kept.mat:.2f} tokens a pass",
        f"{done.measured.mean_accepted_tokens:.2f} tokens a pass.",
        "`texts.jsonl`",
        "| learning_rate | 0.002 |",
        "| answer_tokens | 24 |",
        "specrag train eagle ...",
    ):
        assert part in card


def test_the_target_stays_as_it_was(tiny_llm: LanguageModel, texts: Path, tmp_path: Path) -> None:
    assert isinstance(tiny_llm.model, LeanDecoder)

    def logits() -> list[bytes]:
        segment = Segment(tiny_llm.model.new_cache(), range(40), None, [LOGITS] * 40)
        return [
            row.logits.tobytes() for row in tiny_llm.model.forward([segment])[0] if row.logits is not None
        ]

    weights = tiny_llm.loaded.files.folder / "model.safetensors"
    before, file, embedding = logits(), weights.read_bytes(), tiny_llm.model.embedding.clone()
    train_eagle(tiny_llm, tiny_run(texts, tmp_path, training=replace(TRAINING, epochs=1)))
    assert logits() == before
    assert weights.read_bytes() == file
    assert torch.equal(tiny_llm.model.embedding, embedding)


def test_one_batch_is_learnt(tiny_llm: LanguageModel, done: Outcome, tmp_path: Path) -> None:
    """Sixty steps on four texts, with nothing left to be surprised by: the losses fall to a fifth."""
    material = material_of(tiny_llm, done.out)
    material = replace(material, training=range(4))
    settings = replace(TRAINING, epochs=60, noise=0.0, batch_tokens=10_000, learning_rate=1e-2, patience=99)
    batch = make_batch(material.cache, range(4), CPU)
    assert isinstance(tiny_llm.model, LeanDecoder)
    with torch.no_grad():
        head = new_head(head_config(tiny_llm.model.config), 0, CPU)
        untrained = losses(head, material.target, batch)
    loop = loop_in(tmp_path, material, tiny_llm, settings)
    loop.run(to_the_end)
    last = loop.progress.history[-1]
    # Cross-entropy cannot fall below the entropy of the target's own distributions.
    probs = torch.softmax(material.target.logits(batch.targets[batch.behind >= 0].float()), dim=-1)
    floor = float(-(probs * probs.log()).sum(-1).mean())
    assert last.regression < 0.2 * float(untrained.regression)
    assert last.classification - floor < 0.2 * (float(untrained.classification) - floor)


def test_a_run_that_is_over_is_not_run_again(done: Outcome, tiny_llm: LanguageModel, texts: Path) -> None:
    before = (done.out / "model.safetensors").read_bytes()
    stages: list[Status[Any]] = []
    again = train_eagle(
        tiny_llm, tiny_run(texts, done.out, measure=2, command="specrag train eagle ..."), stages.append
    )
    assert (again.ended, again.progress) == (done.ended, done.progress)
    assert not [status for status in stages if status.stage != "answers"]
    assert (done.out / "model.safetensors").read_bytes() == before


def test_every_step_has_its_own_noise_and_every_epoch_its_own_order(
    tiny_llm: LanguageModel, done: Outcome, tmp_path: Path
) -> None:
    """A head that does not learn shows what it is given: its losses."""
    material = material_of(tiny_llm, done.out)

    def training_losses(noise: float, texts: Sequence[int]) -> list[float]:
        settings = replace(TRAINING, learning_rate=1e-12, patience=99, evaluations=99, noise=noise)
        folder = tmp_path / f"{noise} {len(texts)}"
        loop = loop_in(folder, replace(material, training=texts), tiny_llm, settings)
        loop.run(to_the_end)
        return [measured.regression for measured in loop.progress.history]

    still, noisy = training_losses(0.0, [0]), training_losses(0.5, [0])
    assert max(still) - min(still) < 1e-6
    assert min(abs(first - second) for first, second in pairwise(noisy)) > 1e-4
    batches = training_losses(0.0, material.training)
    per_epoch = len(batches) // 3
    assert per_epoch > 2
    epochs = [sorted(batches[start : start + per_epoch]) for start in range(0, 3 * per_epoch, per_epoch)]
    assert all(abs(a - b).max() > 1e-4 for a, b in pairwise(map(np.array, epochs)))


def test_the_best_weights_are_kept(tiny_llm: LanguageModel, done: Outcome, tmp_path: Path) -> None:
    """With steps that are too large, the loss goes up and down."""
    material = material_of(tiny_llm, done.out)
    settings = replace(TRAINING, epochs=4, learning_rate=0.1, patience=99, evaluations=99)
    loop = loop_in(tmp_path / "all", material, tiny_llm, settings)
    loop.run(to_the_end)
    history = loop.progress.history
    totals = [each.held_back_regression + 0.1 * each.held_back_classification for each in history]
    assert totals != sorted(totals, reverse=True)
    best = totals.index(min(totals))
    assert best < len(history) - 1
    assert loop.progress.kept == history[best]
    part = loop_in(tmp_path / "part", material, tiny_llm, settings)
    part.run(until(history[best].step))
    assert part.best.keys() == loop.best.keys()
    assert all(torch.equal(tensor, loop.best[name]) for name, tensor in part.best.items())


def test_it_ends_where_the_curve_is_flat(tiny_llm: LanguageModel, done: Outcome, tmp_path: Path) -> None:
    settings = replace(TRAINING, epochs=50, learning_rate=1e-12, patience=3)
    loop = loop_in(tmp_path, material_of(tiny_llm, done.out), tiny_llm, settings)
    loop.run(to_the_end)
    assert loop.progress.ended == "3 measurements have not lowered the held-back loss"
    assert len(loop.progress.history) == 4


def test_the_learning_rate_rises_and_falls() -> None:
    rates = [learning_rate(TRAINING.learning_rate, done / 1000) for done in range(1001)]
    assert rates[0] == 0
    assert max(rates) == rates[30] == TRAINING.learning_rate
    assert rates[:31] == sorted(rates[:31])
    assert rates[30:] == sorted(rates[30:], reverse=True)
    assert rates[-1] == pytest.approx(TRAINING.learning_rate / 10)


# -- what can be wrong ----------------------------------------------------------------------------------------


def test_other_settings_are_named(done: Outcome, tiny_llm: LanguageModel, texts: Path) -> None:
    def fails(run: EagleRun) -> str:
        with pytest.raises(InputError) as caught:
            train_eagle(tiny_llm, run)
        assert caught.value.field == "--out"
        return str(caught.value)

    other = replace(TRAINING, learning_rate=1e-3, unroll=2)
    message = fails(tiny_run(texts, done.out, training=other))
    assert "learning_rate 0.002 there, 0.001 here; unroll 1 there, 2 here" in message
    assert "--fresh" in message
    message = fails(tiny_run(texts, done.out, texts=DataSettings(tokens=700, answer_tokens=20, length=240)))
    assert "answer_tokens 24 there, 20 here" in message
    assert "another folder" in message


def test_other_data_is_named(done: Outcome, tiny_llm: LanguageModel, texts: Path, tmp_path: Path) -> None:
    other = tmp_path / "texts.jsonl"
    other.write_bytes(texts.read_bytes() + b'{"text": "One more."}\n')
    with pytest.raises(InputError, match="sha256 of texts"):
        train_eagle(tiny_llm, tiny_run(other, done.out))


def test_training_anew_keeps_the_answers(tiny_llm: LanguageModel, texts: Path, tmp_path: Path) -> None:
    short = replace(TRAINING, epochs=1)
    train_eagle(tiny_llm, tiny_run(texts, tmp_path, training=short))
    answers = (tmp_path / "work" / "answers.jsonl").read_bytes()
    outcome = train_eagle(tiny_llm, tiny_run(texts, tmp_path, training=replace(short, seed=5), fresh=True))
    assert outcome.ended
    assert (tmp_path / "work" / "answers.jsonl").read_bytes() == answers


def test_a_model_without_hidden_states_is_refused(
    tiny_llm: LanguageModel, texts: Path, tmp_path: Path
) -> None:
    toy = LanguageModel(replace(tiny_llm.loaded, model=ToyModel(vocab_size=300)))
    with pytest.raises(InputError, match="gives no hidden states") as caught:
        train_eagle(toy, tiny_run(texts, tmp_path))
    assert caught.value.field == "--model"
    assert list(tmp_path.iterdir()) == []


def test_too_little_text_is_an_error(tiny_llm: LanguageModel, tmp_path: Path) -> None:
    (tmp_path / "short.txt").write_text("Tin is a metal.", encoding="utf-8")
    with pytest.raises(InputError, match="too few answers"):
        train_eagle(tiny_llm, tiny_run(tmp_path / "short.txt", tmp_path / "out"))


def test_two_processes_do_not_share_a_folder(tiny_llm: LanguageModel, texts: Path, tmp_path: Path) -> None:
    run = tiny_run(texts, tmp_path)

    def nested(_status: Status[Any]) -> None:
        with pytest.raises(InputError, match="another process"):
            train_eagle(tiny_llm, run)
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        train_eagle(tiny_llm, run, nested)
    assert train_eagle(tiny_llm, run).ended  # the lock is free again


@pytest.mark.parametrize(
    ("field", "value"),
    [("learning_rate", 0.0), ("precision", "fp8"), ("epochs", 0), ("noise", -1.0), ("noise", float("nan"))],
)
def test_wrong_values_are_refused(field: str, value: object) -> None:
    with pytest.raises(InputError) as caught:
        TrainingSettings(**{field: value})  # type: ignore[arg-type]
    assert caught.value.field == field
