"""Reads the fenced blocks of a Markdown page."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

_FENCE = re.compile(
    r"^(?P<indent> *)```(?P<language>[\w-]*)[^\n]*\n(?P<body>.*?)^(?P=indent)```\s*$", re.S | re.M
)


@dataclass(frozen=True)
class Snippet:
    """One fenced block.

    Attributes:
        language: the word behind the fence; may be empty.
        code: the text inside, with the fence's own indent removed.
        line: the page's line of the first line of code, counted from 1.
    """

    language: str
    code: str
    line: int


def read_snippets(page: Path) -> list[Snippet]:
    """Give the page's fenced blocks in order."""
    text = page.read_text(encoding="utf-8")
    return [
        Snippet(
            language=match["language"],
            code=re.sub(rf"^{match['indent']}", "", match["body"], flags=re.M),
            line=text.count("\n", 0, match.start("body")) + 1,
        )
        for match in _FENCE.finditer(text)
    ]
