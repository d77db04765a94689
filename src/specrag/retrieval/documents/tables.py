"""Tables as text: one line per row, each cell preceded by its column's name. CSV, and the sheets of XLSX."""

from __future__ import annotations

import csv
import io
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from itertools import chain, pairwise
from typing import Any

from specrag.retrieval.documents.converters import (
    LARGEST,
    Converted,
    Part,
    ReadingLimits,
    check_characters,
    clean,
    decode,
    given_title,
    guard,
)
from specrag.retrieval.documents.packages import Package, property_title, relation_id

_NUMBER = re.compile(r"[-+(]?[$€£¥]?\s*\d[\d\s.,:/-]*(?:[eE][-+]?\d+)?\s*%?\)?")
_NAMED_WITHIN = 10  # rows with content in which column names are looked for, possibly below titles
_NAMED_AGAIN_WITHIN = 3  # the same, after an empty row
_GAP = 100  # the most empty rows kept as empty lines; after more of them a new part begins
_DELIMITERS = ",;\t|"
_WORKBOOK = "xl/workbook.xml"
_COLUMN = re.compile(r"[A-Z]{1,3}")
# Number formats: the built-in ones for dates and percentages; the parts of a format code that cannot mean a date.
_DATES = frozenset({*range(14, 23), *range(27, 37), *range(45, 48), *range(50, 59)})
_PERCENTS = frozenset({9, 10})
_LITERAL = re.compile(r'"[^"]*"|\[[^\]]*\]|\\.|_.|\*.')
_ELAPSED = re.compile(r"\[[hms]+\]", re.IGNORECASE)


@dataclass(frozen=True, slots=True)
class Row:
    """A row of a table.

    Args:
        number: number of the row, from 1.
        cells: the text of each non-empty cell, by column.
    """

    number: int
    cells: Mapping[int, str]


def convert_csv(data: bytes, limits: ReadingLimits, *, delimiter: str = "") -> Converted:
    """Convert CSV; the default delimiter is the most frequent of comma, semicolon, tab and bar in the first line."""
    text = decode(data)
    if not delimiter:
        first = text.lstrip("\n").partition("\n")[0]
        delimiter = max(_DELIMITERS, key=first.count)

    def work() -> Converted:
        csv.field_size_limit(LARGEST)
        records = csv.reader(io.StringIO(text, newline=""), delimiter=delimiter)
        rows = (Row(number, _filled(record)) for number, record in enumerate(records, 1))
        return Converted("", tuple(table_parts(rows, "", limits)))

    return guard("CSV", work)


def convert_tsv(data: bytes, limits: ReadingLimits) -> Converted:
    """Convert a table with tabs between cells."""
    return convert_csv(data, limits, delimiter="\t")


def _filled(cells: Sequence[str]) -> dict[int, str]:
    return {column: found for column, cell in enumerate(cells) if (found := " ".join(cell.split()))}


def table_parts(rows: Iterable[Row], place: str, limits: ReadingLimits) -> Iterator[Part]:
    """A table as parts in which every row is a line; a single part unless there are large gaps.

    The column names are the first row that contains only words, at least two and all different, and at least as many
    cells as the row below it. After an empty row, such a row gives new column names if the row below contains a number.
    Rows below the names read ``name: cell; name: cell``; without names, the cells just follow each other.

    Raises:
        UnreadableError: there is more text than may be read.
    """
    lines: list[str] = []
    names: Mapping[int, str] = {}
    looked = start = last = characters = 0
    filled = (row for row in rows if row.cells)
    for row, below in pairwise(chain(filled, (Row(0, {}),))):
        gap = row.number - last - 1
        if gap and last:
            looked = min(looked, _NAMED_WITHIN - _NAMED_AGAIN_WITHIN)
        are_names = looked < _NAMED_WITHIN and _are_names(row.cells, below.cells, again=bool(names))
        looked = _NAMED_WITHIN if are_names else looked + 1
        names = {} if are_names else names
        line = "; ".join(_cell(names.get(column), cell) for column, cell in row.cells.items())
        names = row.cells if are_names else names
        if lines and gap > _GAP:
            yield _rows_part(lines, place, start)
            lines = []
        if lines:
            lines += [""] * gap
        else:
            start = row.number
        lines.append(line)
        characters += len(line) + 1
        check_characters(characters, limits)
        last = row.number
    if lines:
        yield _rows_part(lines, place, start)


def _rows_part(lines: Sequence[str], place: str, first: int) -> Part:
    return Part(clean("\n".join(lines)), place, "rows", own_lines=True, first=first)


def _cell(name: str | None, cell: str) -> str:
    return f"{name}: {cell}" if name and name != cell else cell


def _are_names(cells: Mapping[int, str], below: Mapping[int, str], *, again: bool) -> bool:
    words = list(cells.values())
    return (
        len(words) > 1
        and len(words) >= len(below) > 0
        and len(set(words)) == len(words)
        and not any(map(_NUMBER.fullmatch, words))
        and (not again or any(map(_NUMBER.fullmatch, below.values())))
    )


def convert_xlsx(data: bytes, limits: ReadingLimits) -> Converted:
    """Convert XLSX, one or more parts per sheet. Formulas yield their stored values, dates are ISO 8601."""

    def work() -> Converted:
        with Package(io.BytesIO(data), ".xlsx") as package:
            workbook = _Workbook(package)
            parts = list(workbook.parts(limits))
            title = given_title(property_title(package, "docProps/core.xml"))
        missing = f"{workbook.unknown} formulas have no stored values; open and save it in a spreadsheet"
        return Converted(title, tuple(parts), missing if workbook.unknown else "")

    return guard("XLSX", work)


class _Workbook:
    """Reads the sheets of a workbook, cell by cell; ``unknown`` counts formulas without a value."""

    def __init__(self, package: Package) -> None:
        self.unknown = self._characters = 0
        self._package = package
        self._root = package.xml(_WORKBOOK)
        files = package.relations(_WORKBOOK)
        self._texts = self._shared(files.get("sharedStrings", ""))
        self._formats = self._number_formats(files.get("styles", ""))
        in_1904 = next((each.get("date1904") for each in self._root.iter("{*}workbookPr")), None)
        self._from_1904 = in_1904 in ("1", "true")
        self._sheets: dict[str, str] = {}  # each file once, however often it is listed
        for sheet in self._root.iter("{*}sheet"):
            self._sheets.setdefault(files.get(relation_id(sheet), ""), sheet.get("name", ""))

    def parts(self, limits: ReadingLimits) -> Iterator[Part]:
        """The parts of all sheets."""
        for file, name in self._sheets.items():
            if file in self._package:
                yield from table_parts(
                    self._rows(file, limits), f"sheet {' '.join(clean(name).split())}", limits
                )

    def _rows(self, file: str, limits: ReadingLimits) -> Iterator[Row]:
        number, column, cells = 0, -1, dict[int, str]()
        for element in self._package.elements(file, ("{*}c", "{*}row")):
            if element.tag.endswith("}row"):
                number = max(number + 1, int(element.get("r") or 0))
                yield Row(number, cells)
                column, cells = -1, {}
                continue
            column = _column(element.get("r"), column + 1)
            if text := " ".join(self._text(element).split()):
                cells[column] = text
                self._characters += len(text)  # over all sheets: cells may share one long text
                check_characters(self._characters, limits)

    def _text(self, cell: Any) -> str:
        kind = cell.get("t", "n")
        if kind == "inlineStr":
            return _rich(cell.find("{*}is"))
        value = cell.findtext("{*}v")
        if value is None:
            self.unknown += cell.find("{*}f") is not None
            return ""
        if kind == "s":
            return self._texts[int(value)]
        if kind == "b":
            return "true" if value.strip() == "1" else "false"
        return self._number(value, int(cell.get("s") or 0)) if kind == "n" else value

    def _number(self, value: str, style: int) -> str:
        number = float(value)
        form = self._formats[style] if 0 <= style < len(self._formats) else ""
        if form == "date":
            return _date(number, from_1904=self._from_1904) or value
        return f"{100 * number:.12g}%" if form == "percent" else f"{number:.15g}"

    def _shared(self, name: str) -> list[str]:
        return (
            [_rich(text) for text in self._package.elements(name, ("{*}si",))]
            if name in self._package
            else []
        )

    def _number_formats(self, name: str) -> list[str]:
        """``date``, ``percent`` or an empty string, indexed by the number of a cell's style."""
        root = self._package.xml(name)
        own = {each.get("numFmtId"): each.get("formatCode", "") for each in root.iter("{*}numFmt")}
        return [
            _form(each.get("numFmtId", "0"), own)
            for styles in root.iterfind("{*}cellXfs")
            for each in styles.iterfind("{*}xf")
        ]


def _rich(text: Any) -> str:
    """A text in one piece or in runs of different fonts, without phonetic guides."""
    if text is None:
        return ""
    return "".join([text.findtext("{*}t") or "", *(run.text or "" for run in text.iterfind("{*}r/{*}t"))])


def _column(reference: str | None, following: int) -> int:
    """The column number, from 0, in a reference such as ``AB7``; ``following`` without one."""
    letters = _COLUMN.match(reference or "")
    if letters is None:
        return following
    number = 0
    for letter in letters[0]:
        number = 26 * number + ord(letter) - 64
    return number - 1


def _form(number: str, own: Mapping[str, str]) -> str:
    code = own.get(number)
    if code is None:
        known = int(number)
        return "date" if known in _DATES else "percent" if known in _PERCENTS else ""
    signs = _LITERAL.sub("", code.partition(";")[0]).lower()
    if "%" in signs:
        return "percent"
    is_date = any(letter in signs for letter in "dmyhs") and "general" not in signs
    return "date" if is_date and not _ELAPSED.search(code) else ""


def _date(days: float, *, from_1904: bool) -> str:
    """The date, time or both that a number of days stands for; empty if it is out of range."""
    if not 0 <= days < 2_958_466:  # the year 9999
        return ""
    # Excel counts 29 February 1900, which never existed.
    start = datetime(1904, 1, 1) if from_1904 else datetime(1899, 12, 31 if days < 60 else 30)
    moment = start + timedelta(seconds=round(days * 86_400))
    seconds = moment.strftime(":%S") if moment.second else ""
    if days < 1:
        return moment.strftime("%H:%M") + seconds
    return moment.strftime("%Y-%m-%d") + (moment.strftime(" %H:%M") + seconds if days % 1 else "")
