"""Arguments, progress reports and settings of a training run; a resumed run must have the same settings."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Generic, TypeVar

from specrag.errors import InputError
from specrag.training.files import read_json, replace_json, write_errors

M = TypeVar("M")

#: Types in which forward and backward passes are computed; trained weights and their moments are always fp32.
PRECISIONS = ("bf16", "fp32")


@dataclass(frozen=True, slots=True)
class Status(Generic[M]):
    """How far a run is.

    Attributes:
        stage: such as ``training``.
        done, total: units of work of the stage.
        measured: the newest measurement, while training.
    """

    stage: str
    done: int
    total: int
    measured: M | None = None


@dataclass(frozen=True, kw_only=True)
class Run:
    """Arguments that every training run has.

    Args:
        data: files to learn from.
        exclude: files with what must not be trained on, such as a benchmark.
        out: the folder of the run.
        fresh: start training over in it.
        minutes: stop in good order after this time; ``None`` for no limit.
        checkpoint_minutes: between checkpoints.
        command: that repeats the run, for the card.

    Raises:
        InputError: a value is out of range.
    """

    data: tuple[Path, ...]
    exclude: tuple[Path, ...] = ()
    out: Path
    fresh: bool = False
    minutes: float | None = None
    checkpoint_minutes: float = 5.0
    command: str = ""

    def __post_init__(self) -> None:
        for name, value in (("minutes", self.minutes), ("checkpoint_minutes", self.checkpoint_minutes)):
            if value is not None and not value > 0:
                raise InputError(name, value, "give minutes, more than 0")

    def watched(
        self, report: Callable[[Status[M]], None], clock: Callable[[], float]
    ) -> Callable[[Status[M]], bool]:
        """Wrap ``report`` so that it returns whether there is still time. The time limit starts now."""
        deadline = None if self.minutes is None else clock() + 60 * self.minutes

        def proceed(status: Status[M]) -> bool:
            report(status)
            return deadline is None or clock() < deadline

        return proceed


def silent(_status: Status[Any]) -> None:
    """No-op progress callback."""


def check_least(settings: object, least: float, *names: str) -> None:
    """Check that some of the settings are at least ``least``, and finite.

    Raises:
        InputError: one is not.
    """
    for name in names:
        value = getattr(settings, name)
        if not least <= value < float("inf"):
            raise InputError(name, value, f"give at least {least}")


def check_precision(precision: str) -> None:
    """Check that it is one of :data:`PRECISIONS`.

    Raises:
        InputError: it is not.
    """
    if precision not in PRECISIONS:
        raise InputError("precision", precision, f"take one of {', '.join(PRECISIONS)}")


def check_same(path: Path, mine: Mapping[str, Any], remedy: str) -> None:
    """Record the settings of a run, or check that they equal the recorded ones.

    Args:
        path: the record.
        remedy: what to do other than repeat the recorded settings.

    Raises:
        InputError: they differ; the message says in what.
        SpecragError: the record cannot be read or written.
    """
    noted = read_json(path)
    if noted is None:
        with write_errors(path, "settings"):
            path.parent.mkdir(parents=True, exist_ok=True)
            replace_json(path, mine)
        return
    differences = [
        f"{name} {noted.get(name)!r} there, {mine.get(name)!r} here"
        for name in sorted(noted.keys() | mine.keys())
        if noted.get(name) != mine.get(name)
    ]
    if differences:
        raise InputError(
            "--out", str(path.parent), f"it was begun with {'; '.join(differences)}: repeat that, or {remedy}"
        )
