"""Conditions on a passage's source, title, place and metadata.

As text, for a command line or a query::

    year >= 2000 and (src = a, b or title = "Copper") and not tags = draft and editor is null

    FILTER     := PART (or PART)*            and binds more tightly than or, not more tightly than and
    CONDITION  := FIELD (= | != | < | <= | > | >=) VALUE      = and != take several values, with commas
                | FIELD [not] in (VALUE, ...)
                | FIELD [not] between VALUE and VALUE
                | FIELD is [not] null

and as a mapping, for JSON and Python::

    {"year": {">=": 2000, "<": 2010}, "src": ["a", "b"], "title": "Copper"}
    {"$or": [{"year": {"between": [2000, 2009]}}, {"$not": {"tags": "draft"}}, {"editor": None}]}

All entries of a mapping must match. Text is compared with text and numbers with numbers; a value of the other kind
does not match. Text is ordered by its characters, so ISO dates can be compared. A field with a list matches if one of
its values does; the limits in one mapping, or limits joined by ``and``, must hold for the same value.

A field without a value is null, and as in SQL a comparison with it is neither true nor false: neither ``year = 1999``
nor ``not year = 1999`` selects it, but ``year is null`` does. When a filter is read, negations are pushed down to its
conditions, which then only need to know whether there is a value; a filter in that form is true exactly where SQL's
three-valued logic says true.
"""

from __future__ import annotations

import math
import operator
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, NoReturn, TypeAlias, TypeVar

import numpy as np

from specrag.checks import nearest
from specrag.errors import InputError

if TYPE_CHECKING:
    from specrag.retrieval.index.scoring import Bools
    from specrag.retrieval.passage_store import PassageStore

T = TypeVar("T")
Scalar: TypeAlias = str | int | float

LIMITS = ("<", "<=", ">", ">=")
OPERATORS = ("=", "!=", *LIMITS, "in", "not in", "between", "not between", "is null")
"""The operators that a field's mapping may contain."""

#: The most values of one list; SQLite takes no more than three times as many in one query.
MOST_VALUES = 10_000

#: The most conditions of one filter, and how deep they may be nested.
MOST_CONDITIONS, MOST_DEPTH = 256, 32


@dataclass(frozen=True, slots=True)
class Comparison:
    """One comparison.

    Attributes:
        operator: one of ``= < <= > >=``.
        values: for ``=`` any number of values, one of which must match; otherwise a single value.
    """

    operator: str
    values: tuple[Scalar, ...]

    def agrees(self, value: Scalar) -> bool:
        """Whether a value satisfies it."""
        compare = _COMPARE[self.operator]
        text = isinstance(value, str)
        return any(isinstance(one, str) == text and compare(value, one) for one in self.values)


_COMPARE: dict[str, Callable[[Any, Any], bool]] = {
    "=": operator.eq,
    "<": operator.lt,
    "<=": operator.le,
    ">": operator.gt,
    ">=": operator.ge,
}


@dataclass(frozen=True, slots=True)
class Condition:
    """Comparisons of one field.

    Attributes:
        field: its name.
        comparisons: one value of the field must satisfy all of them.
        negated: instead, the field must have values, none of which satisfies them.
    """

    field: str
    comparisons: tuple[Comparison, ...]
    negated: bool = False

    def agrees(self, values: Sequence[Scalar]) -> bool:
        """Whether a field with these values satisfies it."""
        found = any(all(one.agrees(value) for one in self.comparisons) for value in values)
        return bool(values) and found != self.negated


@dataclass(frozen=True, slots=True)
class Null:
    """The field has no value; if negated, it has one."""

    field: str
    negated: bool = False

    def agrees(self, values: Sequence[Scalar]) -> bool:
        """Whether a field with these values satisfies it."""
        return bool(values) == self.negated


@dataclass(frozen=True, slots=True)
class AllOf:
    """Filters that must all match."""

    parts: tuple[Filter, ...]


@dataclass(frozen=True, slots=True)
class AnyOf:
    """Filters of which at least one must match."""

    parts: tuple[Filter, ...]


Leaf: TypeAlias = Condition | Null
Filter: TypeAlias = Leaf | AllOf | AnyOf
Where: TypeAlias = Filter | Mapping[str, Any] | str | Sequence[Any]
"""A filter as a user writes it: text, a mapping, several of either that must all match, or one already read."""


# -- using -----------------------------------------------------------------------------------------------------


def fold(
    filter: Filter,
    leaf: Callable[[Leaf], T],
    all_of: Callable[[list[T]], T],
    any_of: Callable[[list[T]], T],
) -> T:
    """Evaluate a filter bottom-up, to a truth value, a mask or an SQL clause."""
    if isinstance(filter, AllOf | AnyOf):
        parts = [fold(part, leaf, all_of, any_of) for part in filter.parts]
        return all_of(parts) if isinstance(filter, AllOf) else any_of(parts)
    return leaf(filter)


def matches(filter: Filter, values: Mapping[str, Sequence[Scalar]]) -> bool:
    """Whether a passage satisfies a filter.

    Args:
        filter: the filter.
        values: the values of the passage's fields, as given by :func:`~specrag.retrieval.passage_store.flatten`.
    """
    return fold(filter, lambda leaf: leaf.agrees(values.get(leaf.field, ())), all, any)


def leaves(filter: Filter) -> Iterator[Leaf]:
    """All conditions of a filter."""
    if isinstance(filter, AllOf | AnyOf):
        for part in filter.parts:
            yield from leaves(part)
    else:
        yield filter


def check_fields(filter: Filter, known: Sequence[str]) -> None:
    """Check that every field of a filter is known.

    Raises:
        InputError: one is not; the message suggests the nearest name.
    """
    for leaf in leaves(filter):
        if leaf.field not in known:
            raise unknown_field(leaf.field, known)


def unknown_field(field: str, known: Sequence[str]) -> InputError:
    """The error for an unknown field, with the nearest name."""
    near = nearest(field, known)
    hint = f"did you mean {near!r}? " if near else ""
    return InputError("where", field, f"{hint}the fields are {', '.join(known)}")


def find_allowed(store: PassageStore, where: Where, passages: int) -> Bools:
    """Mask of the passages of a store on disk that satisfy a filter, bool [passages].

    Raises:
        InputError: a field does not exist, an operator is unknown, or a value cannot be compared.
    """
    filter = read_filter(where)
    if filter is None:
        return np.ones(passages, dtype=bool)
    known: list[str] = []

    def look_up(field: str, condition: str = "", parameters: Sequence[Scalar] = ()) -> Bools:
        query = f"SELECT first, last FROM fields WHERE field = ?{condition}"  # noqa: S608
        mask = store.mask(query, (field, *parameters), passages)
        if not mask.any():  # only then check the field, since listing all fields reads the whole table
            known[:] = known or store.field_names()
            if field not in known:
                raise unknown_field(field, known)
        return mask

    def select(leaf: Leaf) -> Bools:
        if isinstance(leaf, Null):
            mask = look_up(leaf.field)
            return mask if leaf.negated else ~mask
        mask = look_up(leaf.field, *_in_sqlite(leaf.comparisons))
        return look_up(leaf.field) & ~mask if leaf.negated else mask

    return fold(filter, select, np.logical_and.reduce, np.logical_or.reduce)


# SQLite sorts all numbers before all texts.
_SAME_KIND = {True: "typeof(value) = 'text'", False: "typeof(value) IN ('integer', 'real')"}


def _in_sqlite(comparisons: Sequence[Comparison]) -> tuple[str, list[Scalar]]:
    """Comparisons of the column ``value`` as SQL, with their parameters."""
    terms = ""
    parameters: list[Scalar] = []
    for comparison in comparisons:
        parameters += comparison.values
        if comparison.operator == "=":
            terms += f" AND value IN ({', '.join('?' * len(comparison.values))})"
        else:
            kind = _SAME_KIND[isinstance(comparison.values[0], str)]
            terms += f" AND value {comparison.operator} ? AND {kind}"
    return terms, parameters


# -- reading ---------------------------------------------------------------------------------------------------


def read_filter(where: Where | None) -> Filter | None:
    """Read a filter into the form used for searching; ``None`` if there is no condition.

    Raises:
        InputError: it cannot be understood, an operator is unknown, or a value cannot be compared.
    """
    if where is None or isinstance(where, Condition | Null | AllOf | AnyOf):
        return where
    found = _read(where, 0)
    if found is not None and sum(1 for _ in leaves(found)) > MOST_CONDITIONS:
        raise InputError("where", where, f"give at most {MOST_CONDITIONS} conditions")
    return found


def all_of(several: Sequence[Where | None]) -> Filter | None:
    """Combine filters that must all match; ``None`` if there is no condition.

    Raises:
        InputError: as for :func:`read_filter`.
    """
    found = [filter for filter in map(read_filter, several) if filter is not None]
    return _all_of(found) if found else None


def _read(where: object, depth: int) -> Filter | None:
    if depth > MOST_DEPTH:
        raise InputError(
            "where", f"more than {MOST_DEPTH} levels", f"nest conditions at most {MOST_DEPTH} deep"
        )
    if isinstance(where, str):
        return _Reader(where).read()
    if isinstance(where, Mapping):
        parts = [_read_entry(field, value, depth) for field, value in where.items()]
        return _all_of(parts) if parts else None
    if isinstance(where, Sequence) and all(isinstance(part, str | Mapping) for part in where):
        several = [part for part in (_read(part, depth + 1) for part in where) if part is not None]
        return _all_of(several) if several else None
    raise InputError(
        "where", where, 'give a text such as "year >= 2000", or a mapping such as {"year": {">=": 2000}}'
    )


def _read_entry(field: object, value: object, depth: int) -> Filter:
    if not isinstance(field, str) or not field:
        raise InputError("where", field, "name a field")
    if field == "$not":
        return _negate(_needed(field, value, depth))
    if field in ("$and", "$or"):
        if isinstance(value, str | Mapping) or not isinstance(value, Sequence) or not value:
            raise InputError(f"where: {field}", value, "give a list of filters")
        parts = [_needed(field, part, depth) for part in value]
        return _all_of(parts) if field == "$and" else _any_of(parts)
    if value is None:
        return Null(field)
    if isinstance(value, Mapping):
        return _read_mapping(field, value)
    if isinstance(value, str) or not isinstance(value, Sequence | set | frozenset):
        return Condition(field, (Comparison("=", (_value(field, value),)),))
    return Condition(field, (Comparison("=", _values(field, value)),))


def _needed(field: str, value: object, depth: int) -> Filter:
    found = _read(value, depth + 1)
    if found is None:
        raise InputError(f"where: {field}", value, "give at least one condition")
    return found


def _read_mapping(field: str, value: Mapping[Any, Any]) -> Filter:
    """Read the comparisons of one field; those that are not negated must hold for the same value."""
    parts: list[Filter] = []
    together: list[Comparison] = []
    for name, operand in value.items():
        if name not in OPERATORS:
            raise InputError(f"where: {field}", name, f"take one of {', '.join(OPERATORS)}")
        if name == "is null":
            if not isinstance(operand, bool):
                raise InputError(f"where: {field}: is null", operand, "give true or false")
            parts.append(Null(field, negated=not operand))
            continue
        comparisons = _comparisons(field, name.removeprefix("not "), operand)
        if name == "!=" or name.startswith("not "):
            parts.append(Condition(field, comparisons, negated=True))
        else:
            together += comparisons
    if together:
        parts.append(Condition(field, tuple(together)))
    if not parts:
        raise InputError(f"where: {field}", value, f"compare with one of {', '.join(OPERATORS)}")
    return _all_of(parts)


def _comparisons(field: str, name: str, operand: object) -> tuple[Comparison, ...]:
    if name == "in":
        return (Comparison("=", _values(field, operand)),)
    if name == "between":
        limits = _values(field, operand)
        if len(limits) != 2:
            raise InputError(f"where: {field}: between", operand, "give the least and the greatest value")
        return _range(*limits)
    return (Comparison("=" if name == "!=" else name, (_value(field, operand),)),)


def _range(low: Scalar, high: Scalar) -> tuple[Comparison, ...]:
    return Comparison(">=", (low,)), Comparison("<=", (high,))


def _values(field: str, values: object) -> tuple[Scalar, ...]:
    if isinstance(values, str) or not isinstance(values, Sequence | set | frozenset) or not values:
        raise InputError(f"where: {field}", values, "give a list with at least one value")
    if len(values) > MOST_VALUES:
        raise InputError(f"where: {field}", f"{len(values):,} values", f"give at most {MOST_VALUES:,}")
    return tuple(_value(field, value) for value in values)


def _value(field: str, value: object) -> Scalar:
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


def _negate(filter: Filter) -> Filter:
    """The negation of a filter: true where the filter is false, and neither where it is neither."""
    if isinstance(filter, AllOf):
        return _any_of([_negate(part) for part in filter.parts])
    if isinstance(filter, AnyOf):
        return _all_of([_negate(part) for part in filter.parts])
    return replace(filter, negated=not filter.negated)


def _any_of(parts: Sequence[Filter]) -> Filter:
    return parts[0] if len(parts) == 1 else AnyOf(tuple(parts))


def _all_of(parts: Sequence[Filter]) -> Filter:
    """The conjunction of some filters; limits of the same field are merged, so that they hold for the same value."""
    found: list[Filter] = []
    limits: dict[str, int] = {}
    for part in parts:
        if not isinstance(part, Condition) or part.negated or not _is_limit(part):
            found.append(part)
        elif part.field in limits:
            place = limits[part.field]
            known = found[place]
            assert isinstance(known, Condition)
            found[place] = replace(known, comparisons=known.comparisons + part.comparisons)
        else:
            limits[part.field] = len(found)
            found.append(part)
    return found[0] if len(found) == 1 else AllOf(tuple(found))


def _is_limit(condition: Condition) -> bool:
    return all(comparison.operator in LIMITS for comparison in condition.comparisons)


# -- text ------------------------------------------------------------------------------------------------------

_SPACE = re.compile(r"\s*")
_QUOTED = re.compile(r'"((?:[^"]|"")*)"|' r"'((?:[^']|'')*)'(?=[\s,()]|$)")
_FIELD_WORD = re.compile(r"[^\s()<>=!,\"']+")
_VALUE_WORD = re.compile(r"[^\s(),\"][^\s(),]*")
_LIMIT_WORD = re.compile(r"[^\s()\"][^\s()]*")  # a limit is a single value, including commas
_OPERATOR = re.compile(r"<=|>=|!=|<>|==|=|<|>")
_NUMBER = re.compile(r"-?(0|[1-9]\d*)(\.\d+)?([eE][+-]?\d+)?")
_ENDS_FIELD = ("is", "in", "between", "not")
_ENDS_VALUE = ("and", "or")

_KEYWORD = re.compile(r"\b(and|or|not|in|is|between)\b", re.IGNORECASE)
_SIGN = re.compile(r"[<>=!()]")


class _Reader:
    """Recursive-descent parser of filters in text form, with a method for each rule of the grammar."""

    def __init__(self, text: str) -> None:
        self._text = text
        self._place = 0
        self._depth = 0

    def read(self) -> Filter:
        try:
            found = self._any()
            if self._rest():
                self._refuse("join conditions by and or or, and put a text with brackets into quotes")
        except InputError:
            plain = self._plain()
            if plain is None:
                raise
            return plain
        return found

    def _plain(self) -> Filter | None:
        """``FIELD=VALUE`` with keywords or brackets in the value; in earlier versions they needed no quotes."""
        field, _, value = (part.strip() for part in self._text.replace("==", "=", 1).partition("="))
        unclear = _SIGN.search(field) or _KEYWORD.search(field) or value.startswith('"')
        brackets = value.count("(")
        if not field or unclear or brackets != value.count(")") or (brackets and _KEYWORD.search(value)):
            return None
        found = [one for part in value.split(",") if part.strip() for one in _parse(part.strip())]
        return Condition(field, (Comparison("=", _values(field, found)),)) if found else None

    def _any(self) -> Filter:
        parts = [self._all()]
        while self._keyword("or"):
            parts.append(self._all())
        return _any_of(parts)

    def _all(self) -> Filter:
        parts = [self._part()]
        while self._keyword("and"):
            parts.append(self._part())
        return _all_of(parts)

    def _part(self) -> Filter:
        self._depth += 1
        if self._depth > MOST_DEPTH:
            self._refuse(f"nest conditions at most {MOST_DEPTH} deep")
        if self._keyword("not"):
            found = _negate(self._part())
        elif self._take("("):
            found = self._any()
            self._expect(")")
        else:
            found = self._condition()
        self._depth -= 1
        return found

    def _condition(self) -> Filter:
        field = self._field()
        if self._keyword("is"):
            negated = self._keyword("not")
            if not self._keyword("null"):
                self._refuse("write FIELD is null or FIELD is not null")
            return Null(field, negated)
        negated = self._keyword("not")
        if self._keyword("in"):
            self._expect("(")
            values = self._list(field)
            self._expect(")")
            return Condition(field, (Comparison("=", values),), negated)
        if self._keyword("between"):
            low = self._limit(field)
            if not self._keyword("and"):
                self._refuse("write FIELD between VALUE and VALUE")
            return Condition(field, _range(low, self._limit(field)), negated)
        return self._comparison(field)

    def _comparison(self, field: str) -> Filter:
        match = _OPERATOR.match(self._text, self._skip())
        if match is None:
            self._refuse("write FIELD=VALUE, FIELD=A,B, FIELD>=VALUE, FIELD in (A, B) or FIELD is null")
        self._place = match.end()
        if match[0] in LIMITS:
            return Condition(field, (Comparison(match[0], (self._limit(field),)),))
        return Condition(field, (Comparison("=", self._list(field)),), match[0] in ("!=", "<>"))

    def _field(self) -> str:
        quoted = self._quoted()
        if quoted is not None:
            return quoted or self._refuse("name a field")
        first = self._skip()
        while (match := _FIELD_WORD.match(self._text, self._skip())) and (
            match.start() == first or match[0].lower() not in _ENDS_FIELD
        ):
            self._place = match.end()
        return self._text[first : self._place].strip() or self._refuse(
            "write FIELD=VALUE or FIELD>=VALUE; a field's name with other signs goes into quotes"
        )

    def _list(self, field: str) -> tuple[Scalar, ...]:
        found: list[Scalar] = []
        while True:
            quoted = self._quoted()
            if quoted is not None:
                found.append(quoted)
            elif word := self._words(_VALUE_WORD):
                found += _parse(word)
            if not self._take(","):
                break
        if not found:
            self._refuse("give a value")
        return _values(field, found)

    def _limit(self, field: str) -> Scalar:
        quoted = self._quoted()
        return (
            _value(field, _parse(self._words(_LIMIT_WORD) or self._refuse("give a value"))[0])
            if (quoted is None)
            else quoted
        )

    def _words(self, pattern: re.Pattern[str]) -> str:
        """The words of an unquoted value, with the spaces between them."""
        first = end = self._skip()
        while (match := pattern.match(self._text, self._skip())) and match[0].lower() not in _ENDS_VALUE:
            self._place = end = match.end()
        return self._text[first:end]

    def _quoted(self) -> str | None:
        match = _QUOTED.match(self._text, self._skip())
        if match is None:
            return None
        self._place = match.end()
        return match[2].replace("''", "'") if match[1] is None else match[1].replace('""', '"')

    def _keyword(self, word: str) -> bool:
        match = _FIELD_WORD.match(self._text, self._skip())
        if match is None or match[0].lower() != word:
            return False
        self._place = match.end()
        return True

    def _take(self, sign: str) -> bool:
        if not self._text.startswith(sign, self._skip()):
            return False
        self._place += 1
        return True

    def _expect(self, sign: str) -> None:
        if not self._take(sign):
            self._refuse(f"there has to be a {sign}")

    def _skip(self) -> int:
        match = _SPACE.match(self._text, self._place)
        assert match is not None
        self._place = match.end()
        return self._place

    def _rest(self) -> str:
        return self._text[self._skip() :]

    def _refuse(self, remedy: str) -> NoReturn:
        rest = self._rest()
        where = f"at {rest[:40]!r}" if rest else "at its end"
        raise InputError("where", self._text, f"{where}: {remedy}")


def _parse(text: str) -> list[Scalar]:
    """Possible values of a word, the most likely first."""
    if _NUMBER.fullmatch(text):
        number = float(text) if any(mark in text for mark in ".eE") else int(text)
        return [number, text]
    if text in {"true", "false"}:
        return [text == "true", text]
    return [text]
