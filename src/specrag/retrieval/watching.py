"""Watch folders of documents and report when something below them has changed."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from specrag.errors import InputError
from specrag.retrieval.documents.files import find_files

Look = dict[str, tuple[int, int]]


def settled_changes(
    paths: Sequence[Path],
    folder: Path,
    indexed: Look,
    seconds: float,
    wait: Callable[[float], None] = time.sleep,
) -> Iterator[None]:
    """Yield each time files have changed, once two looks in a row agree, so that no file is half written.

    It polls instead of relying on notifications, so it also works over a network and for folders that come and go.

    Args:
        paths: files and folders.
        folder: the knowledge base, which is left out.
        indexed: a look from before they were indexed.
        seconds: seconds between two looks.
        wait: waits for some seconds; replaced in tests.
    """
    done = last = indexed
    while True:
        wait(seconds)
        now = look(paths, folder)
        if now == last and now != done:
            yield
            done = now  # the next look sees what has changed meanwhile
        last = now


def look(paths: Sequence[Path], folder: Path) -> Look:
    """Size and modification time of every document; empty if there is nothing to index at the moment."""
    try:
        found = find_files(paths, exclude=[folder])
    except InputError:
        return {}
    return {str(file.path): (file.size, file.mtime_ns) for file in found.files}
