"""Runs the real command line in a process of its own."""

from __future__ import annotations

import os
import sys
from dataclasses import dataclass

from tests.cli import preloaded

#: For tests that need the process itself: its signals, its terminal.
COMMAND = [sys.executable, "-m", "specrag"]


@dataclass(frozen=True)
class Result:
    code: int
    out: str
    err: str


def specrag(*args: str, stdin: bytes = b"", **environment: str) -> Result:
    """Run one command line, none of its streams a terminal; keywords are environment variables."""
    code, out, err = preloaded.run(args, stdin, {**os.environ, "NO_COLOR": "1", **environment})
    return Result(code, out.decode(), err.decode())
