"""Compilation of numeric loops by numba: cached on disk, run without the interpreter's lock.

The cache of a function is valid until its *own* file changes, with the functions of other files that it calls inlined:
after a change to one of those alone, delete the ``*.nbi`` files below ``__pycache__``.
"""

from __future__ import annotations

import inspect
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, ParamSpec, TypeVar, cast

from numba import cfunc, njit, types
from numba.core import event

Parameters = ParamSpec("Parameters")
Result = TypeVar("Result")


def compiled(function: Callable[Parameters, Result]) -> Callable[Parameters, Result]:
    """Compile at the first call, without fast math: IEEE 754 fixes each bit of what it computes."""
    return _kept(function)


def fastmath(function: Callable[Parameters, Result]) -> Callable[Parameters, Result]:
    """Compile at the first call, with fast math: sums in any order; all numbers must be finite."""
    return _kept(function, fastmath=True, error_model="numpy")


def fastmath_infinite(function: Callable[Parameters, Result]) -> Callable[Parameters, Result]:
    """Like :func:`fastmath`, and numbers may be infinite; none may be NaN."""
    return _kept(function, fastmath={"reassoc", "contract", "arcp", "nsz", "nnan"})


def exact(function: Callable[Parameters, Result]) -> Callable[Parameters, Result]:
    """Like :func:`compiled`, and a division by 0 is no error, so that loops which divide are vectorised."""
    return _kept(function, error_model="numpy")


def threaded(function: Callable[[int], None]) -> Any:
    """Compile, with :func:`fastmath`'s options, a loop that several threads run side by side (``cpu/threads.py``).

    Args:
        function: takes the address of its arguments.
    """
    return _called(function, fastmath=True, error_model="numpy")


def threaded_exact(function: Callable[[int], None]) -> Any:
    """The same with :func:`exact`'s options."""
    return _called(function, error_model="numpy")


def inlined(function: Callable[Parameters, Result]) -> Callable[Parameters, Result]:
    """Compile a helper of :func:`fastmath` loops, inlined into each of them.

    Otherwise a process that compiles a loop may link it to another copy, whose sums have another order, than one that
    fetches the loop from the disk.
    """
    made = njit(forceinline=True, fastmath=True, error_model="numpy")(function)
    return cast(Callable[Parameters, Result], made)


def inlined_exact(function: Callable[Parameters, Result]) -> Callable[Parameters, Result]:
    """The same of :func:`exact` loops."""
    made = njit(forceinline=True, error_model="numpy")(function)
    return cast(Callable[Parameters, Result], made)


class _Compilation(event.Listener):
    """A clock that stands still while anything is compiled or fetched from the disk, in any thread."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        self._open = 0
        self._began = 0.0
        self._seconds = 0.0

    def now(self) -> float:
        with self._lock:
            return (self._began if self._open else self._clock()) - self._seconds

    def on_start(self, event: Any) -> None:
        del event
        with self._lock:
            if not self._open:
                self._began = self._clock()
            self._open += 1

    def on_end(self, event: Any) -> None:
        del event
        with self._lock:
            if self._open == 1:
                self._seconds += self._clock() - self._began
            self._open = max(self._open - 1, 0)  # what began before this listened ends uncounted


@contextmanager
def without_compiling(clock: Callable[[], float]) -> Iterator[Callable[[], float]]:
    """A clock that stands still while numba compiles, so that a first run's figures equal the next one's.

    Args:
        clock: seconds.
    """
    compilation = _Compilation(clock)
    event.register("numba:compiler_lock", compilation)  # type: ignore[no-untyped-call]
    try:
        yield compilation.now
    finally:
        event.unregister("numba:compiler_lock", compilation)  # type: ignore[no-untyped-call]


def _called(function: Callable[[int], None], **options: Any) -> Any:
    _check_closure(function)
    try:
        return cfunc(types.void(types.int64), cache=True, **options)(function)
    except RuntimeError:  # nowhere to keep it can be written
        return cfunc(types.void(types.int64), **options)(function)


def _kept(function: Callable[Parameters, Result], **options: Any) -> Callable[Parameters, Result]:
    _check_closure(function)
    try:
        made = njit(cache=True, nogil=True, **options)(function)
    except RuntimeError:  # nowhere to keep it can be written: compiled anew in each process
        made = njit(nogil=True, **options)(function)
    return cast(Callable[Parameters, Result], made)


def _check_closure(function: Callable[..., Any]) -> None:
    """Refuse a loop that no later process would find on the disk.

    It is kept by what it closes over, and numba writes a compiled function there by a number drawn at random.
    """
    for name, value in inspect.getclosurevars(function).nonlocals.items():
        if not isinstance(value, bool | int | float | str | type):
            raise TypeError(
                f"{function.__qualname__} closes over {name}, {type(value).__name__}: each process would compile it "
                "anew; close over numbers and types alone, and name functions in the module"
            )
