"""Records that survive a kill: one JSON line for each timed run, so that a long bench can resume.

A record is appended and synced before the next run starts. A kill can leave at most one incomplete last line, which is
cut off when the file is opened again.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from io import FileIO
from pathlib import Path
from types import TracebackType
from typing import Self

from specrag.artifacts import exclusive_lock
from specrag.errors import InputError, SpecragError


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """The result of one run of a method on a row.

    Args:
        tokens: output tokens, counted the same way for every method; 0 where tokens do not apply.
        seconds: the time, if the trial measured it itself; None lets the bench time the whole call.
        output: a fingerprint of the output, compared with the baseline's; None if there is none.
        passes: passes of the target.
        drafted, accepted: tokens drafted, and drafted tokens accepted.
        drafted_by, accepted_by: the same by source; None if the sources are not known.
        correct: 1.0 for a right answer, 0.0 for a wrong one, or a score in between.
        figures: anything else, with the unit in the name (``prefill_ms``, ``peak_mib``).
    """

    tokens: int = 0
    seconds: float | None = None
    output: str | None = None
    passes: int | None = None
    drafted: int | None = None
    accepted: int | None = None
    drafted_by: Mapping[str, int] | None = None
    accepted_by: Mapping[str, int] | None = None
    correct: float | None = None
    figures: Mapping[str, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        object.__setattr__(self, "figures", dict(self.figures))
        if self.tokens < 0:
            raise InputError("tokens", self.tokens, "give 0 or more")
        if self.seconds is not None and not (math.isfinite(self.seconds) and self.seconds > 0):
            raise InputError("seconds", self.seconds, "give a finite time above 0")
        for name, value in self.figures.items():
            if not math.isfinite(value):
                raise InputError(f"figures.{name}", value, "give a finite number or leave it out")


@dataclass(frozen=True, kw_only=True)
class RecordKey:
    """Identifies a record within one suite, code version and setting."""

    task: str
    row: str
    method: str
    repeat: int


@dataclass(frozen=True, kw_only=True)
class Record:
    """One run: an outcome with its time, or an error without a time.

    Args:
        suite, version, setting: the suite, the code's version, and everything else that a time depends on
            (machine, model, device, quick or full).
        key: task, row, method and repeat.
        outcome: the result, with ``seconds`` set; None for a failure.
        error: the failure in one line; None for a success.
        other_cpu: share of the machine that other processes used meanwhile, 0 to 1; None if unknown.
    """

    suite: str
    version: str
    setting: str
    key: RecordKey
    outcome: Outcome | None = None
    error: str | None = None
    other_cpu: float | None = None

    def __post_init__(self) -> None:
        if (self.outcome is None) == (self.error is None):
            raise InputError("outcome", self.outcome, "give either an outcome or an error")
        if self.outcome is not None and self.outcome.seconds is None:
            raise InputError("seconds", None, "give the time of a run that succeeded")

    def to_json(self) -> str:
        """One line of JSON; `from_json` gives an equal record back."""
        return json.dumps(asdict(self), ensure_ascii=False, allow_nan=False)

    @classmethod
    def from_json(cls, line: str) -> Record:
        """Read what `to_json` wrote.

        Raises:
            ValueError, TypeError, KeyError: the line is not a record.
        """
        values = json.loads(line)
        outcome = values["outcome"]
        return cls(
            suite=values["suite"],
            version=values["version"],
            setting=values["setting"],
            key=RecordKey(**values["key"]),
            outcome=None if outcome is None else Outcome(**outcome),
            error=values["error"],
            other_cpu=values["other_cpu"],
        )


class RecordStore:
    """The records of one suite in one file, open for one process.

    Records of another version or setting stay in the file but are ignored, so that no ratio mixes two versions of the
    code, two machines or two models.

    Args:
        path: the file; created with its folder when the store is opened.
        suite, version, setting: written into new records and required of old ones.
        fresh: set an existing file aside (``NAME.old``) and start without records.
        retry_failed: forget old failures, so that they run again.

    Use it as a context manager.
    """

    def __init__(
        self,
        path: Path,
        *,
        suite: str,
        version: str,
        setting: str,
        fresh: bool = False,
        retry_failed: bool = False,
    ) -> None:
        self.path = path
        self.suite = suite
        self.version = version
        self.setting = setting
        self.fresh = fresh
        self.retry_failed = retry_failed
        self.dropped_torn_line = False
        self._file: FileIO | None = None
        self._held = contextlib.ExitStack()
        self._records: dict[RecordKey, Record] = {}
        self._claimed: set[tuple[str, str]] = set()

    def __enter__(self) -> Self:
        """Open the file, cut off an incomplete last line and read the rest.

        Raises:
            InputError: another process writes there.
            SpecragError: the folder cannot be written, or a line before the last is damaged.
        """

        def busy() -> None:
            remedy = "another bench writes there; wait for it or choose another folder"
            raise InputError("records", str(self.path), remedy)

        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            self._held.enter_context(exclusive_lock(Path(f"{self.path}.lock"), busy))
        except OSError as error:
            raise SpecragError(f"records: {self.path} cannot be written ({error.strerror})") from error
        try:
            self._open()
        except BaseException:
            self._close()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._close()

    def _close(self) -> None:
        if self._file is not None:
            self._file.close()
            self._file = None
        self._held.close()

    def _open(self) -> None:
        if self.fresh and self.path.exists():
            self.path.replace(self.path.with_name(f"{self.path.name}.old"))
        self._file = open(self.path, "a+b", buffering=0)  # noqa: SIM115 - closed by _close
        self._file.seek(0)
        data = self._file.read()
        good = self._read(data)
        self.dropped_torn_line = good < len(data)
        self._file.truncate(good)
        if self.retry_failed:
            self._records = {key: record for key, record in self._records.items() if record.error is None}

    def _read(self, data: bytes) -> int:
        """Keep the records of ``data`` that are ours; return the length of its undamaged part."""
        position = 0
        lines = data.splitlines(keepends=True)
        for number, line in enumerate(lines, start=1):
            try:
                if not line.endswith(b"\n"):
                    raise ValueError("no end of line")
                record = Record.from_json(line.decode())
            except (ValueError, TypeError, KeyError) as error:
                if number == len(lines):
                    break
                message = f"records: line {number} of {self.path} is damaged; delete it or start with --fresh"
                raise SpecragError(message) from error
            position += len(line)
            self._remember(record)
        return position

    def _remember(self, record: Record) -> None:
        ours = (self.suite, self.version, self.setting)
        if (record.suite, record.version, record.setting) == ours:
            self._records[record.key] = record

    def find(self, key: RecordKey) -> Record | None:
        """The record of this version and setting, or None if the run is yet to be done."""
        return self._records.get(key)

    def add(self, key: RecordKey, result: Outcome | str, other_cpu: float | None = None) -> Record:
        """Append a record and sync it to the disk; a later record of the same key replaces an earlier one.

        Args:
            result: the outcome, or the error in one line.

        Raises:
            SpecragError: the disk is full or the store is not open. The file keeps all earlier records.
        """
        if self._file is None:
            raise SpecragError("records: the store is not open; use it in a with statement")
        record = Record(
            suite=self.suite,
            version=self.version,
            setting=self.setting,
            key=key,
            outcome=None if isinstance(result, str) else result,
            error=result if isinstance(result, str) else None,
            other_cpu=other_cpu,
        )
        try:
            rest = f"{record.to_json()}\n".encode()
            while rest:  # a nearly full disk accepts one part and fails on the next
                rest = rest[self._file.write(rest) :]
            os.fsync(self._file.fileno())
        except OSError as error:
            raise SpecragError(f"records: {self.path} cannot be written ({error.strerror})") from error
        self._records[key] = record
        return record

    def claim(self, task: str, row: str) -> None:
        """Reserve a row's name for this process, since two rows with one name would share their records.

        Raises:
            InputError: the name was claimed before.
        """
        if (task, row) in self._claimed:
            raise InputError("row", row, f"give each row of task {task!r} its own name")
        self._claimed.add((task, row))

    def current(self) -> list[Record]:
        """All records of this version and setting, in the order in which they were first written."""
        return list(self._records.values())
