"""Runs compiled loops on torch's own OpenMP threads.

Threads of our own would fight with torch's for the processors: those wait for their next operation by spinning. So
the loops are handed to the same OpenMP library (GNU's, as torch brings it on Linux), which runs them on the threads
that are awake already. Where torch has another library, a loop runs on the calling thread alone.
"""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import torch
from llvmlite import ir  # type: ignore[import-untyped]
from numba import types
from numba.extending import intrinsic


@dataclass(frozen=True, slots=True)
class OpenMP:
    """torch's OpenMP library.

    Attributes:
        run: the library's ``GOMP_parallel(function, data, threads, flags)``.
        number, count: addresses of the functions that tell a thread its number and how many there are.
        barrier: address of the function in which threads wait for each other.
    """

    run: Any
    number: int
    count: int
    barrier: int


@cache
def openmp() -> OpenMP | None:
    """The library whose threads torch computes with; ``None`` if it is not GNU's."""
    found = sorted((Path(torch.__file__).parent / "lib").glob("libgomp*.so*"))
    if not found:
        return None
    try:
        library = ctypes.CDLL(str(found[0]))
        run = library.GOMP_parallel
        number, count, barrier = (
            ctypes.cast(getattr(library, name), ctypes.c_void_p).value
            for name in ("omp_get_thread_num", "omp_get_num_threads", "GOMP_barrier")
        )
    except (OSError, AttributeError):
        return None
    run.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_uint, ctypes.c_uint]
    run.restype = None
    assert number is not None
    assert count is not None
    assert barrier is not None
    return OpenMP(run, number, count, barrier)


class LoopThreads:
    """The threads that share a compiled loop: torch's, or the calling one alone.

    Args:
        shared: whether there is enough to do for several threads.

    Attributes:
        size: how many they are.
        number, count: addresses of the functions that tell a thread its number and how many there are; 0 if alone.
    """

    def __init__(self, shared: bool = True) -> None:
        threads = torch.get_num_threads()
        self._openmp = openmp() if shared and threads > 1 else None
        self.size, self.number, self.count = 1, 0, 0
        if self._openmp is not None:
            self.size, self.number, self.count = threads, self._openmp.number, self._openmp.count

    def run(self, loop: Any, arguments: int) -> None:
        """Run a loop compiled by :func:`~specrag.engine.compiling.threaded` on all of them."""
        if self._openmp is None:
            loop.ctypes(arguments)
        else:
            self._openmp.run(loop.address, arguments, self.size, 0)


def _calling(_context: Any, address: Any) -> Any:  # noqa: ARG001 - numba checks the name
    def generate(_target: Any, builder: Any, _signature: Any, arguments: Any) -> Any:
        kind = ir.FunctionType(ir.IntType(32), [])
        return builder.call(builder.inttoptr(arguments[0], kind.as_pointer()), [])

    return types.int32(types.int64), generate


#: In a compiled loop: call the function at an address, which takes nothing and gives a number.
call_at: Any = intrinsic(_calling)


def _calling_with(_context: Any, address: Any, argument: Any) -> Any:  # noqa: ARG001
    def generate(target: Any, builder: Any, _signature: Any, arguments: Any) -> Any:
        kind = ir.FunctionType(ir.VoidType(), [ir.IntType(64)])
        builder.call(builder.inttoptr(arguments[0], kind.as_pointer()), [arguments[1]])
        return target.get_dummy_value()

    return types.void(types.int64, types.int64), generate


#: In a compiled loop: call the function at an address with a number; it returns nothing.
call_with: Any = intrinsic(_calling_with)
