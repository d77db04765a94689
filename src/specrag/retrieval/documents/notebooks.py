"""Jupyter notebooks: the cells in order, Markdown as is, code in fences, and the beginning of its printed output."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping
from typing import Any

from specrag.retrieval.documents.converters import Converted, UnreadableError, clean, convert_markdown, decode

_LINES = 10
_CHARACTERS = 600
_FENCES = re.compile(r"^ {0,3}(`{3,})", re.MULTILINE)
_COLOURS = re.compile(r"\x1b\[[0-9;]*m")


def convert_notebook(data: bytes) -> Converted:
    """Convert a notebook of format 3 or 4 to Markdown; the title is its first heading.

    Of a cell's output, at most ten lines and 600 characters of text are kept; pictures and HTML are dropped.

    Raises:
        UnreadableError: it is not a notebook.
    """
    try:
        notebook = json.loads(decode(data))
        language = str(notebook["metadata"].get("language_info", {}).get("name", "python"))
        sheets = notebook.get("worksheets", [notebook])  # format 3 has sheets of cells
        texts = [text for sheet in sheets for cell in sheet["cells"] for text in _cell(cell, language)]
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise UnreadableError(f"broken notebook: {type(error).__name__}: {error}") from None
    return convert_markdown("\n\n".join(text for text in texts if text.strip()).encode())


def _cell(cell: Mapping[str, Any], language: str) -> Iterable[str]:
    text = _text(cell.get("source", cell.get("input", "")))
    if cell["cell_type"] != "code":
        level = cell.get("level")  # headings of format 3
        yield f"{'#' * level} {text}" if level else text
        return
    yield _fenced(text, language)
    printed = "\n".join(filter(None, map(_printed, cell.get("outputs", ()))))
    yield _fenced(_shortened(printed), "")


def _printed(output: Mapping[str, Any]) -> str:
    """The text of an output; empty if it is not text."""
    if output.get("output_type") in ("error", "pyerr"):
        return f"{output.get('ename', 'Error')}: {output.get('evalue', '')}"
    found = output.get("text", output.get("data", {}).get("text/plain", ""))
    return _COLOURS.sub("", _text(found)).rstrip()


def _text(value: str | list[str]) -> str:
    """A text that may be stored as a list of lines."""
    return clean(value if isinstance(value, str) else "".join(value))


def _shortened(text: str) -> str:
    lines = text[:_CHARACTERS].split("\n")[:_LINES]
    short = "\n".join(lines)
    return short if len(short) == len(text) else f"{short}\n…"


def _fenced(text: str, language: str) -> str:
    if not text.strip():
        return ""
    longest = max((len(mark) for mark in _FENCES.findall(text)), default=2)
    fence = "`" * max(3, longest + 1)
    return f"{fence}{language}\n{text}\n{fence}"
