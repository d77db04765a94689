"""The methods by the name that Python, the command line and the bench share."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Mapping
from typing import TypeAlias

from specrag.engine.passes import Coroutine
from specrag.engine.session import Session
from specrag.engine.stopping import FinishReason
from specrag.errors import InputError
from specrag.methods.plain import plain
from specrag.speculation.decode import Settings, TextSink

#: Decodes behind a session's tokens and emits steps.
DecodingMethod: TypeAlias = Callable[
    [Session, Settings, TextSink, Callable[[], float]], Coroutine[FinishReason]
]

METHODS: Mapping[str, DecodingMethod] = {"plain": plain}


def find_method(name: str) -> DecodingMethod:
    """The method of this name.

    Raises:
        InputError: there is none.
    """
    if name not in METHODS:
        near = difflib.get_close_matches(name, METHODS, n=1)
        hint = f"; did you mean {near[0]}?" if near else ""
        raise InputError("method", name, f"take one of {', '.join(METHODS)}{hint}")
    return METHODS[name]
