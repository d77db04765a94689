"""``specrag index PATH... --knn-lm --model NAME --kb DIR``: make a kNN-LM datastore of text."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from specrag.cli.printable import printable
from specrag.errors import InputError

if TYPE_CHECKING:
    from specrag.methods.knn_lm.store import IndexSettings
    from specrag.retrieval import Progress

_SHOWN = 20  # skipped documents that are listed


@dataclass(frozen=True, slots=True)
class DatastoreOptions:
    """What the command line says of a datastore; ``None`` takes the default, or what the datastore was made with.

    Attributes:
        model, dtype, device: of the model that reads the text.
        window, context: tokens read in one go, and how many of them the previous window covered.
        hnsw, pq: build these indexes, too.
    """

    model: str
    dtype: str
    device: str | None
    window: int | None
    context: int | None
    hnsw: bool
    pq: bool


def index_datastore(
    paths: Sequence[Path],
    folder: Path,
    options: DatastoreOptions,
    show: Callable[[Progress], None],
    close: Callable[[], None],
    *,
    as_json: bool,
) -> None:
    """Build the datastore and print what was done.

    Args:
        show: moves the progress bar.
        close: removes the progress bar.
    """
    from specrag.methods.knn_lm.store import (
        GraphSettings,
        QuantiserSettings,
        WindowSettings,
        build_datastore,
        check_folder,
        model_record,
        read_texts,
    )
    from specrag.models import load_model
    from specrag.retrieval.documents import find_files

    folder = folder.expanduser()
    indexes: list[IndexSettings] = []
    if options.hnsw:
        indexes.append(GraphSettings())
    if options.pq:
        indexes.append(QuantiserSettings())
    settings = None
    if options.window is not None or options.context is not None:
        default = WindowSettings()
        window = default.tokens if options.window is None else options.window
        context = min(default.context, window // 4) if options.context is None else options.context
        settings = WindowSettings(window, context)
    # Everything that needs no model is checked before it is fetched and loaded.
    check_folder(folder)
    find_files([path.expanduser() for path in paths], [folder])
    loaded = load_model(options.model, dtype=options.dtype, device=options.device, progress=True)
    most = loaded.model.context_length
    if settings is not None and settings.tokens >= most:
        raise InputError("window", settings.tokens, f"the model's context holds {most:,} tokens; give fewer")
    try:
        texts = read_texts(paths, loaded.tokenizer, show, [folder])
        report = build_datastore(
            texts.documents, folder, loaded.model, model_record(loaded), settings, indexes, show
        )
    finally:
        close()
    if as_json:
        skipped = [asdict(entry) for entry in texts.skipped]
        described = {"datastore": str(folder), **asdict(report), "skipped": skipped}
        typer.echo(json.dumps(described, ensure_ascii=False))
        return
    typer.echo(f"documents: {report.documents:,}")
    typer.echo(f"entries:   {report.entries:,}, of which {report.encoded:,} read by {printable(loaded.name)}")
    typer.echo(f"size:      {report.bytes / 1e6:,.0f} MB")
    if texts.skipped:
        typer.echo(f"skipped:   {len(texts.skipped):,}")
        for item in texts.skipped[:_SHOWN]:
            typer.echo(f"    {printable(item.source)}: {printable(item.reason)}")
    typer.echo(f"seconds:   {report.seconds:.1f}")
