"""How often the tests of crashes kill: a few times each, or ``SPECRAG_KILLS`` times."""

from __future__ import annotations

import os


def kills(few: int) -> int:
    """The kills of one test."""
    return int(os.environ.get("SPECRAG_KILLS", few))
