"""``specrag train drafter``: from rows with rationales to a RAG drafter (Speculative RAG, section 3.2).

The folder of a run::

    adapter_config.json adapter_model.safetensors      the adapter, in peft's format; with --full a whole model
    README.md drafter.json                             its card, for people and for programs
    loss.png drafts.png training.jsonl                 its curves, redrawn at every measurement
    work/settings.json work/checkpoint.safetensors     needed only to resume; may be deleted
"""

from __future__ import annotations

import shutil
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import torch

from specrag.models import Tokenizer, find_device, weight_files
from specrag.models.catalog import ModelFiles, resolve, sha256_of
from specrag.training.card import check_plotting
from specrag.training.drafter.card import DataFile, Provenance, RowCounts, write_card, write_curves
from specrag.training.drafter.examples import Example, ExampleEncoder, Split, split
from specrag.training.drafter.measure import measure_drafts
from specrag.training.drafter.model import Tuned, build, write_tuned
from specrag.training.drafter.objective import (
    Drafted,
    DrafterObjective,
    DrafterProgress,
    Measured,
    drafter_loop,
)
from specrag.training.drafter.rows import ROWS, DrafterRow, read_rows, without_evaluation
from specrag.training.drafter.run import DrafterRun, Outcome, TuningSettings
from specrag.training.files import locked, write_errors
from specrag.training.run import Status, check_same, silent


def train_drafter(
    run: DrafterRun,
    report: Callable[[Status[Measured]], None] = silent,
    *,
    clock: Callable[[], float] = time.monotonic,
) -> Outcome:
    """Tune a drafter, or resume its training.

    Args:
        report: called with the run's status.
        clock: seconds.

    Raises:
        InputError: rows cannot be used, or the run was begun with other settings.
        SpecragError: another process works there, the disk is full, or a file is damaged.
    """
    check_plotting()
    device = find_device(run.device)
    data = _read(run)
    files = resolve(run.model, progress=True)
    with locked(run.out):
        return _Run(run, files, data, device, clock).train(report)


@dataclass(frozen=True, slots=True)
class _Data:
    """The data that was read."""

    files: Sequence[DataFile]
    excluded: int
    split: Split


def _read(run: DrafterRun) -> _Data:
    rows = read_rows(run.data)
    files = [_data_file(path) for path in run.data]
    excluded = 0
    if run.exclude:
        kept = without_evaluation(rows, run.exclude)
        rows, excluded = list(kept.rows), kept.excluded
    return _Data(files, excluded, split(rows, run.settings))


def _data_file(given: Path) -> DataFile:
    if given.is_dir():  # of a run that made rows
        return DataFile(f"{given.resolve().name}/{ROWS}", sha256_of(given / ROWS), len(read_rows([given])))
    return DataFile(given.name, sha256_of(given), len(read_rows([given])))


@dataclass(frozen=True, slots=True)
class _Examples:
    """Rows as examples."""

    rows: list[DrafterRow]
    examples: list[Example]


class _Run:
    """A run in its folder, which is locked."""

    def __init__(
        self,
        run: DrafterRun,
        files: ModelFiles,
        data: _Data,
        device: torch.device,
        clock: Callable[[], float],
    ) -> None:
        self._run = run
        self._files = files
        self._data = data
        self._device = device
        self._clock = clock
        self._checksums = {path.name: sha256_of(path) for path in weight_files(files.folder)}
        self._encoder = ExampleEncoder(
            Tokenizer(files),
            length=run.settings.length,
            rationales=run.settings.rationales,
            form=run.settings.form,
        )

    def train(self, report: Callable[[Status[Measured]], None]) -> Outcome:
        run = self._run
        proceed = run.watched(report, self._clock)
        work = run.out / "work"
        training, held_back = (
            self._examples(rows) for rows in (self._data.split.training, self._data.split.held_back)
        )
        if run.fresh:
            with write_errors(work, "training"):
                for name in ("settings.json", "checkpoint.safetensors"):
                    (work / name).unlink(missing_ok=True)
        self._check_same(work / "settings.json")
        tuned = build(self._files, run.settings, self._device)
        objective = DrafterObjective(
            tuned,
            training.examples,
            held_back.examples,
            run.settings,
            draft=lambda: self._draft(tuned, held_back.rows),
        )
        loop = drafter_loop(
            objective,
            work / "checkpoint.safetensors",
            clock=self._clock,
            checkpoint_seconds=60 * run.checkpoint_minutes,
        )
        provenance = self._provenance(tuned, training, held_back)
        drawn = 0

        def told(progress: DrafterProgress) -> bool:
            nonlocal drawn
            if len(progress.history) > drawn:
                drawn = len(progress.history)
                write_curves(run.out, progress.history)
            return proceed(Status("training", progress.step, loop.total, progress.history[-1]))

        loop.run(told)
        progress = loop.progress
        write_curves(run.out, progress.history)
        write_tuned(run.out, self._files, tuned.adapter, loop.best)
        write_card(run.out, provenance, progress)
        return Outcome(run.out, progress, progress.history[progress.best_at], progress.history[0])

    def _examples(self, rows: Sequence[DrafterRow]) -> _Examples:
        found = _Examples([], [])
        for row in rows:
            example = self._encoder.example(row)
            if example is not None:
                found.rows.append(row)
                found.examples.append(example)
        return found

    def _check_same(self, path: Path) -> None:
        settings = asdict(self._run.settings) | {"learning_rate": self._run.settings.highest_rate}
        mine = {"model": self._files.name, **settings, "excluded": self._data.excluded}
        mine |= {f"sha256 of {name}": digest for name, digest in self._checksums.items()}
        mine |= {f"sha256 of {file.name}": file.sha256 for file in self._data.files}
        check_same(path, mine, "train anew with --fresh, or take another folder")

    def _draft(self, tuned: Tuned, rows: Sequence[DrafterRow]) -> Drafted | None:
        """Drafts with the current weights, written to files that are loaded as at inference."""
        count = self._run.settings.drafts
        if not count:
            return None
        folder = self._run.out / "work" / "present"
        try:
            write_tuned(folder, self._files, tuned.adapter, tuned.trained)
            return measure_drafts(
                self._run.model,
                folder,
                rows[:count],
                device=str(self._device),
                full=self._run.settings.full,
                form=self._run.settings.form,
            )
        finally:
            shutil.rmtree(folder, ignore_errors=True)

    def _provenance(self, tuned: Tuned, training: _Examples, held_back: _Examples) -> Provenance:
        read = len(self._data.split.training) + len(self._data.split.held_back)
        examples = training.examples
        settings: TuningSettings = self._run.settings
        return Provenance(
            model=self._files.name,
            origin=self._files.source,
            licence=self._files.licence,
            checksums=self._checksums,
            full=settings.full,
            parameters=sum(value.numel() for value in tuned.trained.values()),
            device=f"{self._device} ({torch.get_num_threads()} threads)",
            command=self._run.command,
            settings=asdict(settings) | {"learning_rate": settings.highest_rate},
            data=self._data.files,
            rows=RowCounts(
                training=len(examples),
                held_back=len(held_back.examples),
                excluded=self._data.excluded,
                unusable=read - len(examples) - len(held_back.examples),
                shortened=sum(example.shortened for example in examples),
                longest_draft=max(len(example.tokens) - example.begin for example in examples),
                sources=dict(Counter(row.source for row in training.rows)),
            ),
        )
