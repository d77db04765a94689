"""Peak memory and loading time of an engine, each in a process of its own.

Within one process the figures would mix: memory that an engine gave back stays with the allocator, and imports
are paid once. Run as a module, it prints one JSON object.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path

import psutil

from specrag.bench.interleave import Trial
from specrag.bench.memory import run_module
from specrag.bench.records import Outcome
from specrag.errors import SpecragError

#: Name of the dtype that stands for transformers' own engine on the command line.
TRANSFORMERS = "transformers"


def memory_trial(model: str, dtype: str, device: str, *, length: int, new: int) -> Trial:
    """A trial that starts a process: load, read ``length`` tokens, decode ``new``.

    Args:
        dtype: of this engine, or :data:`TRANSFORMERS`.
    """

    def trial() -> Outcome:
        figures = run_module("measuring memory", __name__, [model, dtype, device, str(length), str(new)])
        return Outcome(seconds=figures.pop("total_s"), figures=figures)

    return trial


def main(model: str, dtype: str, device: str, length: str, new: str) -> None:
    """Do it, and print the figures."""
    started = time.perf_counter()
    from benchmarks.engine.subjects import Engine, Ours, Transformers

    engine: Engine = (
        Transformers(model, device) if dtype == TRANSFORMERS else Ours(model, device, dtype=dtype)
    )
    loaded = time.perf_counter() - started
    loaded_mib = psutil.Process().memory_info().rss / 2**20
    prompt = [1000 + token % 1000 for token in range(int(length))]
    engine.prefilling(prompt)()
    engine.decoding(prompt, int(new))()
    print(
        json.dumps(
            {
                "total_s": time.perf_counter() - started,
                "load_s": loaded,
                "loaded_mib": loaded_mib,
                "peak_mib": _peak_mib(),
            }
        )
    )


def _peak_mib() -> float:
    """Largest resident size of this process, mapped weight files included, which the system may take back.

    Not ``ru_maxrss``: a child of a large process inherits its parent's.
    """
    for line in Path("/proc/self/status").read_text(encoding="utf-8").splitlines():
        if line.startswith("VmHWM:"):
            return int(line.split()[1]) / 1024
    raise SpecragError("peak memory: /proc/self/status has no VmHWM; measure on Linux")


if __name__ == "__main__":
    main(*sys.argv[1:])
