"""Work in a process of its own, whose memory is nobody else's."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Sequence

from specrag.errors import SpecragError


def run_module(what: str, module: str, arguments: Sequence[str] = (), *, given: str = "") -> dict[str, float]:
    """Run a module and return the JSON object that its last line holds.

    Args:
        what: it does, for the message where it fails.
        given: its standard input.

    Raises:
        SpecragError: it fails.
    """
    command = [sys.executable, "-m", module, *arguments]
    done = subprocess.run(command, check=False, capture_output=True, text=True, input=given)
    if done.returncode:
        lines = done.stderr.strip().splitlines() or ["no message"]
        raise SpecragError(f"{what} failed: {lines[-1]}")
    figures: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return figures
