"""How loops over numbers become machine code: by numba, kept on disk, and run without the interpreter's lock.

The code of a function is kept until its *own* file changes, with the functions that it calls inside: after a change to
one of those alone, delete the ``*.nbi`` files below ``__pycache__``.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ParamSpec, TypeVar, cast

from numba import cfunc, njit, types

Parameters = ParamSpec("Parameters")
Result = TypeVar("Result")


def compiled(function: Callable[Parameters, Result]) -> Callable[Parameters, Result]:
    """Compile at the first call. IEEE 754 fixes each bit of what it computes."""
    return _kept(function)


def reordered(function: Callable[Parameters, Result]) -> Callable[Parameters, Result]:
    """The same, with sums in any order; all numbers must be finite."""
    return _kept(function, fastmath=True, error_model="numpy")


def reordered_infinite(function: Callable[Parameters, Result]) -> Callable[Parameters, Result]:
    """The same, and numbers may be infinite; none may be NaN."""
    return _kept(function, fastmath={"reassoc", "contract", "arcp", "nsz", "nnan"})


def shared_out(function: Callable[[int], None]) -> Any:
    """Compile, :func:`reordered`, a loop that several threads run side by side (``team.py``).

    Args:
        function: takes the address of its arguments.
    """
    options: dict[str, Any] = {"fastmath": True, "error_model": "numpy"}
    try:
        return cfunc(types.void(types.int64), cache=True, **options)(function)
    except RuntimeError:  # nowhere to keep it can be written
        return cfunc(types.void(types.int64), **options)(function)


def inlined(function: Callable[Parameters, Result]) -> Callable[Parameters, Result]:
    """For what only reordered loops call: it becomes a part of each.

    Otherwise a process that compiles a loop may link it to another copy, whose sums have another order, than one that
    fetches the loop from the disk.
    """
    made = njit(forceinline=True, fastmath=True, error_model="numpy")(function)
    return cast(Callable[Parameters, Result], made)


def _kept(function: Callable[Parameters, Result], **options: Any) -> Callable[Parameters, Result]:
    try:
        made = njit(cache=True, nogil=True, **options)(function)
    except RuntimeError:  # nowhere to keep it can be written: compiled anew in each process
        made = njit(nogil=True, **options)(function)
    return cast(Callable[Parameters, Result], made)
