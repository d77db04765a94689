"""Changes knowledge bases for ``test_kill.py``: one process that has everything loaded, and a child for each change.

Reads one JSON object a line: ``action`` (build, remove or compact), ``paths`` or names of documents, ``kb``, ``stop``
(the step, a file operation or a statement of SQL, before which the child kills itself) and ``after`` (seconds after
which it is killed), both null for an undisturbed change. Answers with the child's exit status, the passages that it
encoded, the steps it made and its seconds; with nulls if it was killed.
"""

from __future__ import annotations

import json
import os
import signal
import sqlite3
import sys
import time
from pathlib import Path
from typing import Any

import torch

from specrag.retrieval import build as build_module
from specrag.retrieval.build import build, compact, remove
from specrag.retrieval.encoder.encoder import Encoder, load_encoder

_connect = sqlite3.connect

OPERATIONS = {
    "open",
    "os.mkdir",
    "os.remove",
    "os.rename",
    "os.rmdir",
    "os.truncate",
    "shutil.rmtree",
    "sqlite3.connect",
}


class Stopper:
    """Counts file operations below a folder, and statements of SQL, and kills the process at one of them."""

    def __init__(self) -> None:
        self.folder = ""
        self.stop: int | None = None
        self.count = 0

    def hook(self, event: str, args: tuple[Any, ...]) -> None:
        if self.folder and event in OPERATIONS and self._concerns(args[0]):
            self.step()

    def connect(self, *args: Any, **named: Any) -> sqlite3.Connection:
        """Connect to a database whose statements are steps."""
        connection: sqlite3.Connection = _connect(*args, **named)
        connection.set_trace_callback(self.step)
        return connection

    def step(self, _statement: str = "") -> None:
        if self.count == self.stop:
            os.kill(os.getpid(), signal.SIGKILL)
        self.count += 1

    def _concerns(self, path: Any) -> bool:
        # A number is an open file; a bare name is relative to an open folder, as when a tree is removed.
        name = "" if isinstance(path, int) else os.fsdecode(path).removeprefix("file://")
        return name.startswith(self.folder) or (bool(name) and os.sep not in name)


def run_child(task: dict[str, Any], encoder: Encoder, stopper: Stopper, pipe: int) -> None:
    stopper.stop = task["stop"]
    stopper.folder = task["kb"]
    started = time.perf_counter()
    encoded, kb = 0, Path(task["kb"])
    if task["action"] == "build":
        encoded = build([Path(path) for path in task["paths"]], kb, encoder=encoder).encoded
    elif task["action"] == "remove":
        remove(task["paths"], kb)
    else:
        compact(kb)
    stopper.folder = ""
    result = {
        "encoded": encoded,
        "operations": stopper.count,
        "seconds": time.perf_counter() - started,
    }
    os.write(pipe, json.dumps(result).encode())


def main() -> None:
    torch.set_num_threads(1)  # a child of fork has no other threads
    build_module.LOT = 2  # so that a small library is encoded in several steps
    encoder = load_encoder()
    encoder.encode_passages(["warm-up"])
    stopper = Stopper()
    sys.addaudithook(stopper.hook)
    sqlite3.connect = stopper.connect  # type: ignore[assignment]
    print("ready", flush=True)
    for line in sys.stdin:
        task = json.loads(line)
        reading, writing = os.pipe()
        child = os.fork()
        if child == 0:
            status = 1
            try:
                run_child(task, encoder, stopper, writing)
                status = 0
            finally:
                os._exit(status)
        os.close(writing)
        if task["after"] is not None:
            time.sleep(task["after"])
            os.kill(child, signal.SIGKILL)  # if it has ended its number is still its own
        _, status = os.waitpid(child, 0)
        with os.fdopen(reading) as pipe:
            result = json.loads(pipe.read() or "{}")
        print(json.dumps({"status": status, **result}), flush=True)


if __name__ == "__main__":
    main()
