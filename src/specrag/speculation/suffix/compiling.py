"""How the loops of this package become machine code."""

from __future__ import annotations

from collections.abc import Callable
from typing import ParamSpec, TypeVar, cast

from numba import njit

Parameters = ParamSpec("Parameters")
Result = TypeVar("Result")


def compiled(function: Callable[Parameters, Result]) -> Callable[Parameters, Result]:
    """Compile ``function`` at its first call, to code that runs without the interpreter's lock.

    The code is kept on disk until the function's *own* file changes, with the functions that it calls inside:
    after a change to one of those alone, delete the ``*.nbi`` files below ``__pycache__``.
    """
    try:
        return cast(Callable[Parameters, Result], njit(cache=True, nogil=True)(function))
    except RuntimeError:  # nowhere to keep it can be written: compiled anew in each process
        return cast(Callable[Parameters, Result], njit(nogil=True)(function))
