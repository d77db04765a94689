"""Conditions on a passage's source, title, place and metadata.

A condition is a mapping from a field to what its value must be::

    {"year": {">=": 2000, "<": 2010}, "src": ["a", "b"], "title": "Copper"}

A plain value asks for equality, a list for one of its values, a mapping for every comparison that it holds. All
fields must agree. A field that holds a list agrees if one of its values does. Text is compared with text and
numbers with numbers; text has the order of its characters, so that ISO dates can be compared.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from specrag.checks import nearest
from specrag.errors import InputError

if TYPE_CHECKING:
    from specrag.retrieval.passage_store import PassageStore

OPERATORS = ("=", "<", "<=", ">", ">=", "in")

#: Values of one list; SQLite takes no more than three times as many in one query.
MOST_VALUES = 10_000

_CONDITION = re.compile(
    r"\s*(?P<field>[^<>=!]*[^<>=!\s])\s*(?P<operator><=|>=|!=|==|=|<|>)\s*(?P<value>.*?)\s*"
)
_NUMBER = re.compile(r"-?(0|[1-9]\d*)(\.\d+)?([eE][+-]?\d+)?")


def find_allowed(store: PassageStore, where: Mapping[str, Any], passages: int) -> np.ndarray:
    """The passages that satisfy every condition. bool [passages].

    Raises:
        InputError: a field does not exist, an operator is unknown, or a value cannot be compared.
    """
    check_where(where)
    allowed = np.ones(passages, dtype=bool)
    known: list[str] | None = None
    for field, condition in where.items():
        query, parameters = compile_condition(field, condition)
        mask = store.mask(query, parameters, passages)
        if not mask.any():
            known = store.field_names() if known is None else known
            if field not in known:
                raise unknown_field(field, known)
        allowed &= mask
    return allowed


def check_where(where: object) -> None:
    """Check that conditions are a mapping.

    Raises:
        InputError: they are not.
    """
    if not isinstance(where, Mapping):
        raise InputError("where", where, 'give a mapping such as {"year": {">=": 2000}}')


@dataclass(frozen=True, slots=True)
class Comparison:
    """One comparison.

    Attributes:
        operator: one of ``= < <= > >=``.
        values: for ``=`` any of them, else one.
    """

    operator: str
    values: tuple[str | int | float, ...]


def compile_condition(field: str, condition: object) -> tuple[str, list[Any]]:
    """A query for the ranges of passages that satisfy one condition, and its parameters.

    Raises:
        InputError: an operator is unknown, or a value cannot be compared.
    """
    terms = ["field = ?"]
    parameters: list[Any] = [field]
    for comparison in comparisons(field, condition):
        parameters += comparison.values
        if comparison.operator == "=":
            terms.append(f"value IN ({', '.join('?' * len(comparison.values))})")
        else:
            kind = _SAME_KIND[isinstance(comparison.values[0], str)]
            terms += [f"value {comparison.operator} ?", kind]
    return f"SELECT first, last FROM fields WHERE {' AND '.join(terms)}", parameters  # noqa: S608


# SQLite orders every number before every text.
_SAME_KIND = {True: "typeof(value) = 'text'", False: "typeof(value) IN ('integer', 'real')"}


def comparisons(field: str, condition: object) -> list[Comparison]:
    """Comparisons of one condition; a value must satisfy all of them.

    Raises:
        InputError: an operator is unknown, or a value cannot be compared.
    """
    if not isinstance(field, str) or not field:
        raise InputError("where", field, "name a field")
    found = []
    for operator, value in _pairs(field, condition):
        values = _values(field, value) if operator == "in" else [_value(field, value)]
        found.append(Comparison("=" if operator == "in" else operator, tuple(values)))
    return found


def _pairs(field: str, condition: object) -> list[tuple[str, object]]:
    if isinstance(condition, Mapping):
        for operator in condition:
            if operator not in OPERATORS:
                raise InputError(f"where: {field}", operator, f"take one of {' '.join(OPERATORS)}")
        if not condition:
            raise InputError(f"where: {field}", condition, f"compare with one of {' '.join(OPERATORS)}")
        return list(condition.items())
    if isinstance(condition, str) or not isinstance(condition, Sequence | set | frozenset):
        return [("=", condition)]
    return [("in", condition)]


def _values(field: str, values: object) -> list[Any]:
    if isinstance(values, str) or not isinstance(values, Sequence | set | frozenset) or not values:
        raise InputError(f"where: {field}", values, "give a list with at least one value")
    if len(values) > MOST_VALUES:
        raise InputError(f"where: {field}", f"{len(values):,} values", f"give at most {MOST_VALUES:,}")
    return [_value(field, value) for value in values]


def _value(field: str, value: object) -> str | int | float:
    whole = isinstance(value, int) and -(2**63) <= value < 2**63
    real = isinstance(value, float) and math.isfinite(value)
    if isinstance(value, str):
        try:
            value.encode()
        except UnicodeEncodeError:
            raise InputError(f"where: {field}", value, "it is no text in UTF-8") from None
    elif not whole and not real:
        raise InputError(f"where: {field}", value, "give a text, a finite number, true or false")
    return value  # type: ignore[return-value]


def unknown_field(field: str, known: Sequence[str]) -> InputError:
    """The error for an unknown field, with the nearest name."""
    near = nearest(field, known)
    hint = f"did you mean {near!r}? " if near else ""
    return InputError("where", field, f"{hint}the fields are {', '.join(known)}")


def parse_conditions(conditions: Sequence[str]) -> dict[str, dict[str, Any]]:
    """Conditions of a command line, such as ``year>=2000`` or ``src=a,b``, as a mapping.

    A value in double quotes is text as it stands. Any other is split at its commas; a part that looks like
    a number equals the number and the text.

    Raises:
        InputError: one cannot be understood, or a field is compared twice in the same way.
    """
    where: dict[str, dict[str, Any]] = {}
    for text in conditions:
        match = _CONDITION.fullmatch(text)
        if match is None or match["operator"] == "!=" or not match["value"]:
            raise InputError(
                "--where", text, "write FIELD=VALUE, FIELD=A,B or FIELD>=VALUE, with = < <= > or >="
            )
        operator = match["operator"].replace("==", "=")
        if operator == "=":
            operator, value = "in", _parse_list(match["value"])
        else:
            value = _parse(match["value"])[0]
        comparisons = where.setdefault(match["field"], {})
        if operator in comparisons:
            raise InputError("--where", text, f"{match['field']} is compared twice; list values as FIELD=A,B")
        comparisons[operator] = value
    return where


def _parse_list(text: str) -> list[Any]:
    if len(text) > 1 and text[0] == text[-1] == '"':
        return [text[1:-1]]
    return [value for part in text.split(",") if part.strip() for value in _parse(part.strip())]


def _parse(text: str) -> list[Any]:
    """Possible values of a word, the likeliest first."""
    if _NUMBER.fullmatch(text):
        number = float(text) if any(mark in text for mark in ".eE") else int(text)
        return [number, text]
    if text in {"true", "false"}:
        return [text == "true", text]
    return [text.removeprefix('"').removesuffix('"')]
