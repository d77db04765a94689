"""Runs the real command line in a process of its own."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import dataclass

COMMAND = [sys.executable, "-m", "specrag"]


@dataclass(frozen=True)
class Result:
    code: int
    out: str
    err: str


def specrag(*args: str, stdin: bytes = b"", **environment: str) -> Result:
    """Run one command line with pipes for all three streams; keywords are environment variables."""
    done = subprocess.run(
        [*COMMAND, *args],
        capture_output=True,
        input=stdin,
        env={**os.environ, "NO_COLOR": "1", **environment},
        timeout=240,
        check=False,
    )
    return Result(done.returncode, done.stdout.decode(), done.stderr.decode())
