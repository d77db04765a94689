"""Large answers as JSON, beside the event loop.

The standard encoder writes a whole value in one call, during which no other thread runs, not even that of the event
loop. Here a value is written piece by piece, so that others run in between.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

_DEPTH = 6  # from a whole answer to the alternatives of one token


def to_json(value: Any) -> bytes:
    """The bytes of a value, as the standard encoder makes them without spaces."""
    return "".join(_pieces(value, _DEPTH)).encode()


def _pieces(value: Any, depth: int) -> Iterator[str]:
    if depth and isinstance(value, dict):
        yield "{"
        for number, (key, inner) in enumerate(value.items()):
            yield f"{',' if number else ''}{_written(key)}:"
            yield from _pieces(inner, depth - 1)
        yield "}"
    elif depth and isinstance(value, list):
        yield "["
        for number, inner in enumerate(value):
            if number:
                yield ","
            yield from _pieces(inner, depth - 1)
        yield "]"
    else:
        yield _written(value)


def _written(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
