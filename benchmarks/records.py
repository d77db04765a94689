"""Records that a bench writes line by line, so that one that was stopped goes on; and those kept for the pages."""

from __future__ import annotations

import gzip
import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from specrag.bench.measurement import Measurement, from_json_lines


def read_records(path: Path) -> list[dict[str, Any]]:
    """What has been recorded so far, gzipped or not; nothing where the file is not there yet."""
    if not path.is_file():
        return []
    with gzip.open(path, "rt") if path.suffix == ".gz" else path.open(encoding="utf-8") as lines:
        return [json.loads(line) for line in lines]


def append_records(path: Path, records: Iterable[Mapping[str, Any]]) -> None:
    """Add each record as soon as it is there, a line for each, so that a run that is stopped loses at most one."""
    with path.open("a", encoding="utf-8") as file:
        for record in records:
            file.write(json.dumps(record, ensure_ascii=False) + "\n")
            file.flush()


def read_packed(path: Path) -> list[Measurement]:
    """The measurements of a suite's run that was packed with gzip."""
    return list(from_json_lines(gzip.decompress(path.read_bytes()).decode()))
