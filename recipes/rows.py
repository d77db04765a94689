"""The folder of a run that makes rows: rows, rejected texts, settings and a card."""

from __future__ import annotations

import contextlib
import json
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from specrag.engine.executor import run as run_alone
from specrag.errors import InputError
from specrag.methods.generator import LocalGenerator
from specrag.models.roles import GeneratedText, TextGenerator, TextRequest
from specrag.training.drafter.rows import ROWS, DrafterRow, parse_row, row_json
from specrag.training.files import LineFile, read_json, replace_json, write_errors
from specrag.training.run import check_same

REJECTED, SETTINGS, CARD = "rejected.jsonl", "settings.json", "card.json"


@dataclass(frozen=True, slots=True)
class Status:
    """How far a run is.

    Attributes:
        stage: ``questions`` or ``rationales``.
        done, total: rows.
        rejected: how many were rejected.
    """

    stage: str
    done: int
    total: int
    rejected: int


class RowRun:
    """The folder of a run. Made by :meth:`open`.

    Attributes:
        out: the folder.
        rows: made so far.
    """

    def __init__(
        self, out: Path, settings: Mapping[str, Any], command: str, clock: Callable[[], float]
    ) -> None:
        self.out = out
        self._settings = settings
        self._command = command
        self._clock = clock
        self._lines = LineFile(out / ROWS)
        self._rejected = LineFile(out / REJECTED)
        self._turned_down: list[str] = []
        self.rows: list[DrafterRow] = [
            parse_row(json.dumps(line), f"{ROWS}:{number}")
            for number, line in enumerate(self._lines.lines, 1)
        ]
        card = read_json(out / CARD) or {}
        seconds = card.get("seconds", 0.0)
        self._seconds = float(seconds) if isinstance(seconds, int | float) else 0.0

    @classmethod
    def open(
        cls,
        out: Path,
        settings: Mapping[str, Any],
        *,
        command: str = "",
        clock: Callable[[], float] = time.perf_counter,
    ) -> RowRun:
        """Begin a run in a folder, or resume it.

        Args:
            settings: recorded, and compared with those recorded before.
            command: for the card.
            clock: seconds.

        Raises:
            InputError: the run was begun with other settings.
            SpecragError: the folder cannot be read or written, or holds something else.
        """
        if (out / ROWS).exists() and not (out / SETTINGS).exists():
            raise InputError("--out", str(out), f"it holds {ROWS} of another origin; give another folder")
        check_same(out / SETTINGS, settings, "take another --out")
        return cls(out, settings, command, clock)

    @property
    def tried(self) -> set[str]:
        """Identifiers of everything that was made or rejected."""
        return self._lines.identifiers | self._rejected.identifiers

    @property
    def rejected(self) -> Mapping[str, int]:
        """How many were rejected, by reason; the most frequent first."""
        return dict(Counter(str(line.get("reason")) for line in self._rejected.lines).most_common())

    @property
    def card(self) -> dict[str, Any]:
        """The content of the card."""
        turned_down = sum(self.rejected.values())
        made = len(self.rows)
        tried = made + turned_down
        return {
            "rows": made,
            "rejected": turned_down,
            "rejection_rate": round(turned_down / tried, 4) if tried else None,
            "reasons": self.rejected,
            "kinds": dict(Counter(row.task.kind for row in self.rows)),
            "seconds": round(self._seconds, 1),
            "rows_per_hour": round(3600 * made / self._seconds, 1) if self._seconds else None,
            "settings": dict(self._settings),
            "command": self._command,
        }

    def status(self, stage: str, total: int) -> Status:
        """How far the run is."""
        return Status(stage, len(self.rows), total, len(self._rejected.lines))

    @contextlib.contextmanager
    def batch(self) -> Iterator[None]:
        """Make a batch: its rejected texts are written with its rows, then the card."""
        started = self._clock()
        self._turned_down.clear()
        yield
        self._rejected.add(self._turned_down)
        self._turned_down.clear()
        self._seconds += self._clock() - started
        with write_errors(self.out / CARD, "card"):
            replace_json(self.out / CARD, self.card)

    def reject(self, identifier: str, reason: str, text: str) -> None:
        """Reject a text; it is written with the batch."""
        line = {"id": identifier, "reason": reason, "text": text}
        self._turned_down.append(json.dumps(line, ensure_ascii=False))

    def add(self, rows: Sequence[DrafterRow]) -> None:
        """Add rows; they are on the disk when this returns."""
        self._lines.add([row_json(row) for row in rows])
        self.rows += rows


def write_texts(writer: TextGenerator, requests: Sequence[TextRequest]) -> list[GeneratedText]:
    """Write texts concurrently: a local model's in its own executor, an endpoint's in a new one."""
    if not requests:
        return []
    coroutine = writer.generating(requests)
    if isinstance(writer, LocalGenerator):
        return writer.executor.run(writer.executor.submit(coroutine))
    return run_alone(coroutine)
