"""Progress and reports of builds."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TypeAlias

from specrag.retrieval.documents.files import Skipped


@dataclass(frozen=True, slots=True)
class Progress:
    """Progress of a build.

    Attributes:
        stage: ``reading`` (documents), ``encoding`` (passages) or ``indexing`` (indexes).
        done, total: items done so far, and items in all, of the stage.
    """

    stage: str
    done: int
    total: int


Reporter: TypeAlias = Callable[[Progress], None]


@dataclass(slots=True)
class Counts:
    """Numbers of documents so far; a file of records counts as one."""

    added: int = 0
    updated: int = 0
    removed: int = 0
    unchanged: int = 0
    skipped: list[Skipped] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class BuildReport:
    """Summary of a build.

    Attributes:
        added, updated, removed, unchanged: numbers of documents; a file of records counts as one.
        skipped: what could not be read, with the reason.
        passages: number of passages that the knowledge base now holds.
        encoded: number of passages that had to be encoded.
        seconds: wall-clock time of the whole build.
    """

    added: int
    updated: int
    removed: int
    unchanged: int
    skipped: tuple[Skipped, ...]
    passages: int
    encoded: int
    seconds: float
