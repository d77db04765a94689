"""Builds datastores for ``test_knn_datastore.py``, each in a child that may kill itself; as ``kill_driver.py`` does."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from specrag.methods.knn_lm.store import build as knn_build
from specrag.methods.knn_lm.store.manifest import WindowSettings
from tests.methods.knn_store import knn_toys
from tests.retrieval.kill_driver import Stopper

WINDOWS = WindowSettings(tokens=16, context=4)


def run_child(task: dict[str, Any], stopper: Stopper, pipe: int) -> None:
    stopper.stop, stopper.folder = task["stop"], task["folder"]
    report = knn_toys.build(Path(task["folder"]), knn_toys.texts(task["texts"]), windows=WINDOWS)
    stopper.folder = ""
    os.write(pipe, json.dumps({"encoded": report.encoded, "operations": stopper.count}).encode())


def main() -> None:
    knn_build.CHECKPOINT = 20  # so that a small text is written in several steps
    with TemporaryDirectory() as folder:  # compiles the loops, once for all children
        knn_toys.build(Path(folder), knn_toys.texts(1), windows=WINDOWS)
    stopper = Stopper()
    sys.addaudithook(stopper.hook)
    print("ready", flush=True)
    for line in sys.stdin:
        reading, writing = os.pipe()
        child = os.fork()
        if child == 0:
            status = 1
            try:
                run_child(json.loads(line), stopper, writing)
                status = 0
            finally:
                os._exit(status)
        os.close(writing)
        _, status = os.waitpid(child, 0)
        with os.fdopen(reading) as pipe:
            result = json.loads(pipe.read() or "{}")
        print(json.dumps({"status": status, **result}), flush=True)


if __name__ == "__main__":
    main()
