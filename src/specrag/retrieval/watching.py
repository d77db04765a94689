"""Follow folders of documents: say when something below them has changed."""

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
    """Yield each time that files have changed, once nothing has changed between two looks: none is half written.

    Looks instead of being told: so that it also works over a network, and for folders that come and go.

    Args:
        paths: files and folders.
        folder: the knowledge base, which is left out.
        indexed: a look from before they were indexed.
        seconds: between two looks.
        wait: waits; another one in tests.
    """
    done = last = indexed
    while True:
        wait(seconds)
        now = look(paths, folder)
        if now == last and now != done:
            yield
            done = now  # what came meanwhile is seen by the next look
        last = now


def look(paths: Sequence[Path], folder: Path) -> Look:
    """Size and time of every document; none where there is nothing to index just now."""
    try:
        found = find_files(paths, exclude=[folder])
    except InputError:
        return {}
    return {str(file.path): (file.size, file.mtime_ns) for file in found.files}
