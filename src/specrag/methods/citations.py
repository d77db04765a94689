"""Citations like [1] or [2, 3] in an answer: which there are, whether they name a source, what supports them.

The support check is a cheap one: it counts words and understands nothing. It finds the citation of a passage that
says something else altogether; it does not find a passage that denies what the sentence says.
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Sequence
from dataclasses import dataclass

#: Share of a sentence's content words that a cited passage must hold to support it.
SUPPORTED = 0.5

_NUMBERS = r"\d{1,3}(?:\s*[-\u2013]\s*\d{1,3})?"
_MARK = re.compile(rf"[\[\u3010]\s*({_NUMBERS}(?:\s*[,;]\s*{_NUMBERS})*)\s*[\]\u3011]")
_SENTENCE = re.compile(r"[^.!?\n]+(?:[.!?]+(?!\s|$)[^.!?\n]*)*[.!?]*")
_WORD = re.compile(r"[^\W_]+(?:['\u2019][^\W_]+)?")

# Words that say nothing about what a sentence is about, in English.
_STOP_WORDS = frozenset(
    _WORD.findall("""
    a about according after again all also although am an and answer any are as at be because been before being
    between both but by can cannot could did do does doing done during each either few for from further
    had has have having he her here hers him his how however i if in into is it its itself just may me
    might more most must my no nor not of off on once one only or other our out over own passage
    passages question said same says she should since so some source sources such than that the their
    them then there therefore these they this those though through thus to too under until up upon us
    very was we were what when where which while who whom whose why will with within without would yes
    you your
    """)
)


@dataclass(frozen=True, slots=True)
class Citation:
    """One number of one citation mark.

    Attributes:
        number: the source that it names.
        start, end: where the mark stands in the answer, in characters.
        sentence: what it stands behind, without marks.
        valid: whether there is such a source.
        support: share of the sentence's content words that the source holds, 0 to 1; ``None`` if there is no such
            source or the sentence has no such words.
    """

    number: int
    start: int
    end: int
    sentence: str
    valid: bool
    support: float | None

    @property
    def supported(self) -> bool:
        """Whether the source holds at least :data:`SUPPORTED` of the sentence's content words."""
        return self.support is not None and self.support >= SUPPORTED


@dataclass(frozen=True, slots=True)
class Citations:
    """All citations of an answer, in the order of its text."""

    found: tuple[Citation, ...] = ()

    @property
    def numbers(self) -> tuple[int, ...]:
        """The sources cited, ascending."""
        return tuple(sorted({citation.number for citation in self.found if citation.valid}))

    @property
    def invalid(self) -> tuple[int, ...]:
        """The numbers cited that no source has, ascending."""
        return tuple(sorted({citation.number for citation in self.found if not citation.valid}))

    @property
    def unsupported(self) -> tuple[Citation, ...]:
        """The citations of sources that hold too little of what is said."""
        return tuple(citation for citation in self.found if citation.valid and not citation.supported)


def find_citations(text: str, sources: Sequence[str]) -> Citations:
    """Find and check the citations in an answer.

    Args:
        text: the answer.
        sources: what each source says, its title included; source 1 comes first.
    """
    found = []
    for mark in _MARK.finditer(text):
        sentence = _sentence_of(text, mark.start())
        for number in _numbers(mark[1], len(sources)):
            valid = 1 <= number <= len(sources)
            share = support(sentence, sources[number - 1]) if valid else None
            found.append(Citation(number, mark.start(), mark.end(), sentence, valid, share))
    return Citations(tuple(found))


def support(text: str, source: str) -> float | None:
    """Share of the text's content words that a source holds, 0 to 1; ``None`` if the text has none."""
    wanted = set(content_words(text))
    return len(wanted & set(_words(source))) / len(wanted) if wanted else None


def without_citations(text: str) -> str:
    """The text without its citation marks and the spaces in front of them."""
    return re.sub(rf"[^\S\n]*{_MARK.pattern}", "", text)


def content_words(text: str) -> list[str]:
    """The words that say what a text is about, in lower case, in their order."""
    return [word for word in _words(without_citations(text)) if word not in _STOP_WORDS]


def _words(text: str) -> list[str]:
    folded = unicodedata.normalize("NFKC", text).casefold()
    return [word.removesuffix("'s").removesuffix("\u2019s") for word in _WORD.findall(folded)]


def _numbers(listed: str, sources: int) -> list[int]:
    """The numbers of a mark; of a range those that have a source, and its ends in any case."""
    numbers: dict[int, None] = {}
    for part in re.split(r"[,;]", listed):
        first, *rest = (int(number) for number in re.findall(r"\d+", part))
        last = rest[0] if rest else first
        inside = range(max(first, 1), min(last, sources) + 1)
        numbers.update(dict.fromkeys([first, *inside, last]))
    return list(numbers)


def _sentence_of(text: str, place: int) -> str:
    """The last sentence that has words in front of ``place``; the first of all where none has.

    In "Copper is a metal [1]. It conducts heat. [2]" the second mark stands behind a full stop.
    """
    found = ""
    for match in _SENTENCE.finditer(text):
        if found and not _words(without_citations(text[match.start() : place])):
            break
        found = without_citations(match.group()).strip() or found
    return found
