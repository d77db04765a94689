"""Checks of values given by callers; each raises an :class:`~specrag.errors.InputError` that names the remedy."""

from __future__ import annotations

import difflib
import math
import numbers
from collections.abc import Iterable
from typing import Any

from specrag.errors import InputError


def check_whole(field: str, value: object, least: int = 1, most: int | None = None, remedy: str = "") -> int:
    """Check a whole number in a range; ``True`` and 1.0 do not count as whole numbers.

    Args:
        field: name of the argument or option.
        value: given by the caller. For values that may be numpy numbers see :func:`plain`.
        least: the smallest allowed value.
        most: the largest allowed value, if there is one.
        remedy: what to give instead; by default the range.

    Raises:
        InputError: it is anything else.
    """
    good = isinstance(value, int) and not isinstance(value, bool)
    if not good or value < least or (most is not None and value > most):  # type: ignore[operator]
        span = f"of at least {least:,}" if most is None else f"from {least:,} to {most:,}"
        raise InputError(field, value, remedy or f"give a whole number {span}")
    return value  # type: ignore[return-value]


def check_number(
    field: str,
    value: object,
    least: float = -math.inf,
    most: float = math.inf,
    *,
    above: float = -math.inf,
    remedy: str = "",
) -> float:
    """Check a finite number in a range; ``True`` and NaN do not count as numbers.

    Args:
        field: name of the argument or option.
        value: given by the caller.
        least: the smallest allowed value.
        most: the largest allowed value.
        above: what the value must exceed.
        remedy: what to give instead; by default the range.

    Raises:
        InputError: it is anything else.
    """
    good = isinstance(value, int | float) and not isinstance(value, bool)
    if not good or not (least <= value <= most and above < value and math.isfinite(value)):  # type: ignore[operator, arg-type]
        if math.isfinite(above):
            span = f" above {above:g}"
        elif math.isfinite(least):
            span = f" from {least:g} to {most:g}" if math.isfinite(most) else f" of at least {least:g}"
        else:
            span = f" of at most {most:g}" if math.isfinite(most) else ""
        raise InputError(field, value, remedy or f"give a number{span}")
    return value  # type: ignore[return-value]


def check_text(field: str, value: object, remedy: str = "give a text that is not empty") -> str:
    """Check a text that holds more than white space.

    Raises:
        InputError: it is anything else.
    """
    if not isinstance(value, str) or not value.strip():
        raise InputError(field, value, remedy)
    return value


def check_choice(field: str, value: object, known: Iterable[str], *, cutoff: float = 0.6) -> str:
    """Check that a value is one of some names.

    Args:
        field: name of the argument or option.
        value: given by the caller.
        known: the allowed names.
        cutoff: how similar a name must be to be suggested, from 0 to 1.

    Raises:
        InputError: it is not; the remedy suggests the nearest name and lists all.
    """
    names = list(known)
    if not isinstance(value, str) or value not in names:
        hint = did_you_mean(value, names, cutoff=cutoff)
        raise InputError(field, value, f"{hint}take one of {', '.join(names)}")
    return value


def did_you_mean(name: object, known: Iterable[str], *, cutoff: float = 0.6) -> str:
    """``did you mean NAME?`` and a space, to begin a remedy with; nothing if no name is similar enough."""
    near = nearest(name, known, cutoff=cutoff)
    return f"did you mean {near}? " if near else ""


def nearest(name: object, known: Iterable[str], *, cutoff: float = 0.6) -> str | None:
    """The name most similar to a misspelt one; None if none is similar enough."""
    return next(iter(difflib.get_close_matches(str(name), list(known), n=1, cutoff=cutoff)), None)


def plain(value: Any) -> Any:
    """Convert a numpy number to a Python one; return anything else unchanged."""
    return value.item() if isinstance(value, numbers.Number) and hasattr(value, "item") else value
