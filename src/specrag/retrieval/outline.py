"""The headings of a Markdown text, and where its lines are only wrapped."""

from __future__ import annotations

import re
from dataclasses import dataclass

_ATX = re.compile(r" {0,3}(#{1,6})(?:[ \t]+(.*?))??(?:[ \t]+#+)?[ \t]*$")
_SETEXT = re.compile(r" {0,3}(=+|-{2,})[ \t]*$")
_FENCE = re.compile(r" {0,3}(`{3,}|~{3,})(.*)$")
_NO_PARAGRAPH = re.compile(r"(?: {4}|\t| {0,3}(?:[#>|*+-]|\d+[.)]))")
_LINK = re.compile(r"!?\[([^\]]*)\]\([^)]*\)")
_MARKS = re.compile(r"`|(?<![\w\\])\*+(?=\S)|(?<=[^\s\\])\*+(?!\w)|\\(?=[^\w\s])")
_WRAPPED = re.compile(r".{35}[^\W_][,;-]?[ \t]*$")  # long, and ends with a word: code seldom does both
_LONGEST_NAME = 80  # characters; a heading is shown in citations


@dataclass(frozen=True, slots=True)
class Heading:
    """A heading in a text.

    Args:
        start: index of its first character.
        end: index behind its last line.
        path: the names of the headings above it and its own, outermost first.
    """

    start: int
    end: int
    path: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Outline:
    """The headings in order, and the text with wrapped lines joined.

    ``flowing`` has the length of the text: a line end inside a sentence has become a space, so that a splitter
    which prefers line ends to sentence ends does not cut there.
    """

    headings: tuple[Heading, ...]
    flowing: str


def outline(text: str, *, markdown: bool) -> Outline:
    """Read the headings (ATX and underlined, none inside fenced code) and the wrapped lines of a text.

    A line end is taken as wrapping if the line is long and ends with a word, and the next one begins with a
    lower-case letter. A plain text has no headings and no fenced code.
    """
    headings: list[Heading] = []
    names: list[tuple[int, str]] = []  # level and name of the headings open at this point
    flowing: list[str] = []
    fence = ""
    previous, start = "", 0  # the paragraph line above, or nothing
    for line in _lines(text):
        bare = line.rstrip("\n")
        level, name, above = 0, "", ""
        if markdown:
            mark = _FENCE.match(bare)
            if fence:
                if mark and mark[1].startswith(fence) and not mark[2].strip():
                    fence = ""
                flowing.append(line)
                previous, start = "", start + len(line)
                continue
            if mark and not (mark[1][0] == "`" and "`" in mark[2]):
                fence = mark[1]
            elif heading := _ATX.match(bare):
                level, name = len(heading[1]), heading[2] or ""
            elif previous and _SETEXT.match(bare) and not _NO_PARAGRAPH.match(previous):
                level, name, above = (1 if "=" in bare else 2), previous, previous + "\n"
        if level:
            while names and names[-1][0] >= level:
                names.pop()
            names.append((level, _plain(name)))
            path = tuple(name for _, name in names if name)
            headings.append(Heading(start - len(above), start + len(line), path))
        if _WRAPPED.search(previous) and bare[:1].islower() and not level:
            flowing[-1] = flowing[-1][:-1] + " "
        flowing.append(line)
        previous = "" if level or fence or not bare.strip() else bare
        start += len(line)
    return Outline(tuple(headings), "".join(flowing))


def _lines(text: str) -> list[str]:
    """Lines that end at a line feed only: ``str.splitlines`` also breaks at form feeds and others."""
    lines = text.split("\n")
    return [f"{line}\n" for line in lines[:-1]] + ([lines[-1]] if lines[-1] else [])


def _plain(name: str) -> str:
    """A heading without its Markdown marks, on one line, not too long to show."""
    name = " ".join(_MARKS.sub("", _LINK.sub(r"\1", name)).split())
    return name if len(name) <= _LONGEST_NAME else f"{name[: _LONGEST_NAME - 1]}…"
