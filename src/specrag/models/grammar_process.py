"""Tries a grammar in a process of its own, which can be killed.

llguidance compares every pattern of a schema with every other; 28 KB of them take a minute, which nothing ends in a
thread.
"""

from __future__ import annotations

import subprocess
import sys

from specrag.errors import InputError

SECONDS = 2.0
"""That a grammar may take to compile; one of a hundred tools takes a tenth."""

_PROGRAM = "import sys, llguidance; llguidance.LLMatcher.validate_grammar(sys.stdin.read())"


def try_apart(grammar: str, field: str) -> None:
    """Make sure that a grammar is compiled in time; whether it is right is for the compiler to say.

    Raises:
        InputError: it is not.
    """
    try:
        subprocess.run(
            [sys.executable, "-c", _PROGRAM],
            input=grammar.encode(),
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            timeout=SECONDS,
            check=False,
        )
    except subprocess.TimeoutExpired:
        remedy = f"it takes more than {SECONDS:g} seconds to compile; simplify it"
        raise InputError(field, "a JSON schema", remedy) from None
