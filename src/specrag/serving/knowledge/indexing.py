"""The indexing process: ``python -m specrag.serving.knowledge.indexing``.

Documents come from anybody, and the libraries that read them are large: a document that crashes them, or makes them
take all memory, ends this process and not the server. The process reads orders from standard input, one JSON object a
line, and writes JSON lines: ``{"progress": ...}``, and at the end ``{"report": ...}`` or ``{"error": ...}``. When
standard input ends, the server has gone, and the process exits, even in the middle of an order; the next run goes on
from there.
"""

from __future__ import annotations

import contextlib
import json
import os
import queue
import sys
import threading
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from specrag.errors import InputError, SpecragError
from specrag.retrieval.encoder import Encoders

if TYPE_CHECKING:
    from specrag.retrieval.encoder import Encoder

_NICE = 10


@dataclass(frozen=True, slots=True)
class Order:
    """What to index.

    Args:
        folder: the knowledge base's.
        paths: as :func:`specrag.retrieval.build.build` takes them.
        encoder, chunk_tokens, chunk_overlap: settings of the build; None takes what is there.
        most_pages, most_characters: limits of each document.
    """

    folder: str
    paths: tuple[str, ...]
    encoder: str | None = None
    chunk_tokens: int | None = None
    chunk_overlap: int | None = None
    most_pages: int = sys.maxsize
    most_characters: int = sys.maxsize


class Indexer:
    """Runs orders; keeps the encoders that it has loaded.

    Args:
        tell: writes a line.
    """

    def __init__(self, tell: Callable[[dict[str, Any]], None]) -> None:
        self._tell = tell
        self._encoders = Encoders()

    def run(self, order: Order) -> None:
        """Index, and report the progress and the outcome."""
        from specrag.retrieval import BuildSettings
        from specrag.retrieval.build import build
        from specrag.retrieval.documents import ReadingLimits

        folder = Path(order.folder)
        try:
            report = build(
                [Path(path) for path in order.paths],
                folder,
                BuildSettings(None, None, order.chunk_tokens, order.chunk_overlap),
                lambda progress: self._tell({"progress": asdict(progress)}),
                encoder=self._encoder(folder, order.encoder),
                limits=ReadingLimits(order.most_pages, order.most_characters),
            )
        except InputError as error:
            self._tell({"error": {"kind": "input", "message": error.remedy}})
        except SpecragError as error:
            self._tell({"error": {"kind": "store", "message": str(error)}})
        else:
            self._tell({"report": asdict(report)})

    def _encoder(self, folder: Path, name: str | None) -> Encoder:
        """The knowledge base's encoder; for a new one, the order's."""
        from specrag.retrieval import DEFAULT_ENCODER, Manifest

        if not Manifest.exists(folder):
            return self._encoders.encoder(name or DEFAULT_ENCODER)
        made = Manifest.read(folder).encoder
        return self._encoders.encoder(made.name, made.dtype)


def main() -> None:
    """Run orders until standard input ends."""
    with contextlib.suppress(OSError):
        os.nice(_NICE)  # answers have priority over indexing
    with contextlib.suppress(OSError):
        # If memory runs out, this process is killed and not the server.
        Path("/proc/self/oom_score_adj").write_text("1000", encoding="ascii")
    # What libraries print must not end up between our lines.
    lines = os.fdopen(os.dup(1), "w", encoding="utf-8", buffering=1)
    os.dup2(2, 1)
    orders: queue.SimpleQueue[str] = queue.SimpleQueue()

    def listen() -> None:
        for line in sys.stdin:
            orders.put(line)
        os._exit(1)

    threading.Thread(target=listen, daemon=True).start()

    def tell(line: dict[str, Any]) -> None:
        lines.write(f"{json.dumps(line)}\n")

    indexer = Indexer(tell)
    while True:
        content = json.loads(orders.get())
        indexer.run(Order(**{**content, "paths": tuple(content["paths"])}))


if __name__ == "__main__":
    main()
