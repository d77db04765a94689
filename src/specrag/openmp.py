"""How long torch's OpenMP threads look for work before they sleep; read once, when torch is loaded."""

from __future__ import annotations

import os

#: Turns, half a millisecond in place of several. Beside busy processes even this is too long: see
#: ``specrag.engine.cpu.spinning``.
SPIN_COUNT = "10000"


def set_spin_count() -> None:
    """Set the package's count, unless the user has said how threads wait. To be called before torch is loaded."""
    if "OMP_WAIT_POLICY" not in os.environ:
        os.environ.setdefault("GOMP_SPINCOUNT", SPIN_COUNT)


def is_spin_count_ours() -> bool:
    """Whether the package's count holds."""
    return os.environ.get("GOMP_SPINCOUNT") == SPIN_COUNT and "OMP_WAIT_POLICY" not in os.environ
