"""``specrag index PATH... --kb DIR``: documents to a knowledge base."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from specrag.cli import common
from specrag.cli.printable import printable

if TYPE_CHECKING:
    from specrag.retrieval.progress import BuildReport, Progress

_SHOWN = 20  # skipped documents that are listed
_UNITS = {"reading": "documents", "encoding": "passages", "indexing": "indexes"}


def index(
    paths: Annotated[list[Path], typer.Argument(metavar="PATH...", help="Files and folders with documents.")],
    kb: Annotated[Path, typer.Option(metavar="DIR", help="The knowledge base's folder; made if need be.")],
    encoder: Annotated[
        str | None, typer.Option(metavar="NAME", help="A sentence encoder; by default minilm-l6-v2.")
    ] = None,
    encoder_dtype: Annotated[
        str | None, typer.Option(metavar="TYPE", help="fp32 or bf16; by default bf16.")
    ] = None,
    chunk_tokens: Annotated[
        int | None,
        typer.Option(parser=common.integer, metavar="N", help="Most tokens of a passage; by default 200."),
    ] = None,
    chunk_overlap: Annotated[
        int | None,
        typer.Option(
            parser=common.integer, metavar="N", help="Tokens repeated in the next passage; by default 32."
        ),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object for programs.")] = False,
) -> None:
    """Make a knowledge base of documents, or bring it up to date.

    New documents are added, changed ones read again, and those gone from below the paths removed. Encoder and
    chunking are chosen once, when the knowledge base is made.

    Example: specrag index docs/ notes.txt --kb kb/
    """
    from specrag.retrieval.build import build
    from specrag.retrieval.build_settings import BuildSettings

    settings = BuildSettings(encoder, encoder_dtype, chunk_tokens, chunk_overlap)
    bar = _Bar()
    try:
        report = build(paths, kb, settings, bar.show)
    finally:
        bar.close()
    if as_json:
        typer.echo(json.dumps({"kb": str(kb), **asdict(report)}, ensure_ascii=False))
    else:
        _print_report(report)


class _Bar:
    """A progress bar on standard error for each stage; nothing where that is no terminal."""

    def __init__(self) -> None:
        from rich.console import Console
        from rich.progress import (
            BarColumn,
            MofNCompleteColumn,
            TextColumn,
            TimeElapsedColumn,
            TimeRemainingColumn,
        )
        from rich.progress import Progress as Bars

        console = Console(stderr=True)
        self._bars = Bars(
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("{task.fields[unit]}"),
            TimeElapsedColumn(),
            TimeRemainingColumn(),
            console=console,
            disable=not console.is_terminal,
        )
        self._stage = ""
        self._task = self._bars.add_task("", unit="", visible=False)

    def show(self, progress: Progress) -> None:
        """Move the stage's bar."""
        if progress.stage != self._stage:
            self._stage = progress.stage
            self._bars.start()
            self._task = self._bars.add_task(
                progress.stage, total=progress.total, unit=_UNITS[progress.stage]
            )
        self._bars.update(self._task, completed=progress.done)

    def close(self) -> None:
        """Leave the terminal as it was."""
        self._bars.stop()


def _print_report(report: BuildReport) -> None:
    changes = (
        f"{report.added:,} added, {report.updated:,} updated, {report.removed:,} removed, "
        f"{report.unchanged:,} unchanged"
    )
    typer.echo(f"documents: {changes}")
    typer.echo(f"passages:  {report.passages:,}, of which {report.encoded:,} encoded")
    if report.skipped:
        typer.echo(f"skipped:   {len(report.skipped):,}")
        for item in report.skipped[:_SHOWN]:
            typer.echo(f"    {printable(item.source)}: {printable(item.reason)}")
        if len(report.skipped) > _SHOWN:
            typer.echo(f"    and {len(report.skipped) - _SHOWN:,} more; --json lists all")
    typer.echo(f"seconds:   {report.seconds:.1f}")
