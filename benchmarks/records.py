"""Records that a bench writes line by line, so that one that was stopped goes on; and those kept for the pages."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

from specrag.bench.measurement import Measurement, from_json_lines


def read_records(path: Path) -> list[dict[str, Any]]:
    """What has been recorded so far, gzipped or not; nothing where the file is not there yet."""
    if not path.is_file():
        return []
    with gzip.open(path, "rt") if path.suffix == ".gz" else path.open(encoding="utf-8") as lines:
        return [json.loads(line) for line in lines]


def read_packed(path: Path) -> list[Measurement]:
    """The measurements of a suite's run that was packed with gzip."""
    return list(from_json_lines(gzip.decompress(path.read_bytes()).decode()))
