"""``specrag index PATH... --corpus --model NAME --kb DIR``: make a corpus of text that all requests may copy from."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from specrag.cli.printable import printable

if TYPE_CHECKING:
    from specrag.retrieval import Progress


def index_corpus(
    paths: Sequence[Path],
    folder: Path,
    model: str,
    show: Callable[[Progress], None],
    close: Callable[[], None],
    *,
    as_json: bool,
) -> None:
    """Build the corpus and print what was done.

    Args:
        model: the model whose tokenizer reads the text.
        show: moves the progress bar.
        close: removes the progress bar.
    """
    from specrag.methods.knn_lm.store import read_texts
    from specrag.models import Tokenizer
    from specrag.models.catalog import resolve
    from specrag.speculation.suffix import build_corpus, require_target

    started = time.perf_counter()
    folder = folder.expanduser()
    require_target(folder)
    tokenizer = Tokenizer(resolve(model))
    try:
        texts = read_texts(paths, tokenizer, show, [folder])
        manifest = build_corpus(texts.documents, folder, tokenizer=tokenizer.fingerprint)
    finally:
        close()
    seconds = time.perf_counter() - started
    if as_json:
        described = {"corpus": str(folder), "texts": manifest.texts, "tokens": manifest.tokens}
        skipped = [asdict(entry) for entry in texts.skipped]
        typer.echo(json.dumps({**described, "seconds": seconds, "skipped": skipped}, ensure_ascii=False))
        return
    typer.echo(f"texts:     {manifest.texts:,}")
    typer.echo(f"tokens:    {manifest.tokens:,} of {printable(model)}")
    for item in texts.skipped:
        typer.echo(f"skipped:   {printable(item.source)}: {printable(item.reason)}")
    typer.echo(f"seconds:   {seconds:.1f}")
