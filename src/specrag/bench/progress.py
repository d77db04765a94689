"""Progress of a bench: a small protocol, and an implementation for the terminal."""

from __future__ import annotations

from types import TracebackType
from typing import Protocol, Self

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeRemainingColumn
from rich.progress import Progress as Bar


class Progress(Protocol):
    """Receives progress reports from the bench."""

    def begin(self, label: str, total: int) -> None:
        """A group of ``total`` runs starts."""
        ...

    def advance(self, label: str) -> None:
        """One run is done, or was found in the records; ``label`` names it."""
        ...


class TerminalProgress:
    """A bar on stderr, with one line per group; nothing if stderr is not a terminal.

    Use it as a context manager, so that the terminal is left clean.
    """

    def __init__(self) -> None:
        console = Console(stderr=True)
        self._bar = Bar(
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TimeRemainingColumn(),
            console=console,
            disable=not console.is_terminal,
        )
        self._group = ""
        self._task = self._bar.add_task("", total=None, visible=False)

    def __enter__(self) -> Self:
        self._bar.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._bar.stop()

    def begin(self, label: str, total: int) -> None:
        self._group = label
        self._task = self._bar.add_task(label, total=total)

    def advance(self, label: str) -> None:
        self._bar.update(self._task, advance=1, description=f"{self._group}: {label}")
