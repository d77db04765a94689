"""Building a knowledge base in a process of its own, so that its memory is nobody else's.

Run as a module, it prints one JSON object.
"""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path

from specrag.bench.interleave import Trial
from specrag.bench.memory import peak_memory, run_module
from specrag.bench.records import Outcome


def building_trial(documents: Path, folder: Path) -> Trial:
    """A trial that starts a process: read the documents, encode, write all indexes into a new folder."""

    def trial() -> Outcome:
        shutil.rmtree(folder, ignore_errors=True)
        figures = run_module("building", __name__, [str(documents), str(folder)])
        return Outcome(seconds=figures["seconds"], figures=figures)

    return trial


def main(documents: str, folder: str) -> None:
    """Build, and print the figures."""
    with peak_memory() as peak:
        from specrag.retrieval.build import build

        report = build([Path(documents)], Path(folder))
    size = sum(path.stat().st_size for path in Path(folder).rglob("*") if path.is_file())
    print(
        json.dumps(
            {
                "seconds": report.seconds,
                "passages": report.passages,
                "passages_a_second": report.passages / report.seconds,
                "peak_mib": peak.peak_mib,
                "disk_mib": size / 2**20,
            }
        )
    )


if __name__ == "__main__":
    main(*sys.argv[1:])
