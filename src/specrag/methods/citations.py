"""Citations like [1] or [2, 3] in an answer: finds them, checks that they name a source, and what supports them.

Support is judged by shared words and numbers, without any understanding. It finds the passage that a sentence was
taken from; it does not notice a passage that denies what the sentence says.
"""

from __future__ import annotations

import math
import re
import unicodedata
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from specrag.retrieval import COMMON_WORDS, language_of

#: Share of a sentence's content words that a cited passage must contain to support it.
SUPPORTED = 0.5

_NUMBERS = r"\d{1,3}(?:\s*[-\u2013]\s*\d{1,3})?"
_MARK = re.compile(rf"[\[\u3010]\s*({_NUMBERS}(?:\s*[,;]\s*{_NUMBERS})*)\s*[\]\u3011]")
_SENTENCE = re.compile(r"[^.!?\n]+(?:[.!?]+(?!\s|$)[^.!?\n]*)*[.!?]*")
_WORD = re.compile(r"[^\W_]+(?:['\u2019][^\W_]+)?")
_SPACELESS = re.compile(r"[\u0e00-\u0eff\u3040-\u30ff\u3400-\u9fff]")

# English words that do not say what a sentence is about; for other languages the most common words are used.
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
        sentence: the sentence that it follows, without marks.
        valid: whether there is such a source.
        support: share of the sentence's content words that the source contains, 0 to 1; ``None`` if there is no such
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
        """Whether the source contains at least :data:`SUPPORTED` of the sentence's content words."""
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
        """The cited numbers that no source has, ascending."""
        return tuple(sorted({citation.number for citation in self.found if not citation.valid}))

    @property
    def unsupported(self) -> tuple[Citation, ...]:
        """The citations of sources that contain too little of what is said."""
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
    """Share of the text's content words that a source contains, 0 to 1; ``None`` if the text has none."""
    wanted = set(content_words(text))
    return len(wanted & set(_words(source))) / len(wanted) if wanted else None


class Support:
    """Finds which of a few passages hold a sentence of an answer.

    A passage scores by the sentence's words that it has: words that are not in the question count most, words that are
    rare among the passages more than common ones, names and numbers twice. Adjacent words that stay together count a
    little.

    Args:
        question: the question that is answered.
        sources: what each passage says, including its title; passage 1 comes first.
    """

    def __init__(self, question: str, sources: Sequence[str]) -> None:
        self._capitals = language_of(question) != "german"  # German capitalises all nouns
        listed = [[_stem(word) for word in _words(source)] for source in sources]
        self._asked = {_stem(word) for word in _words(question)}
        self._words = [set(words) for words in listed]
        self._pairs = [set(pairwise(words)) for words in listed]
        self._frequency = Counter(word for words in self._words for word in words)

    def choose(self, sentence: str) -> tuple[int, ...]:
        """The passages that hold a sentence, from 1 and ascending: the best, and others for what it lacks.

        Empty if no passage shares a significant word with it.
        """
        weights = self._weights(sentence)
        own = {word for word in weights if word not in self._asked} or set(weights)
        pairs = set(pairwise(_stem(word) for word in _words(sentence)))

        def worth(words: set[str], place: int) -> float:
            return sum(weights[word] for word in words & self._words[place])

        scores = [worth(set(weights), place) for place in range(len(self._words))]
        if not any(scores):
            return ()
        together = [score + _PAIR * len(pairs & self._pairs[place]) for place, score in enumerate(scores)]
        chosen = [max(range(len(scores)), key=lambda place: (together[place], -place))]
        left = own - self._words[chosen[0]]
        least = _FURTHER * sum(weights[word] for word in own)
        while True:
            best = max(range(len(scores)), key=lambda place: (worth(left, place), together[place], -place))
            if worth(left, best) <= 0 or worth(left, best) < least:
                return tuple(sorted(place + 1 for place in chosen))
            chosen.append(best)
            left -= self._words[best]

    def unheld(self, sentence: str, cited: Sequence[int]) -> tuple[str, ...]:
        """Names and numbers of a sentence that are neither in the passages cited for it nor in the question."""
        held = self._asked.union(*(self._words[number - 1] for number in cited))
        named = _named(sentence, self._capitals)
        return tuple(word for word in named if _stem(_fold(word)) not in held)

    def _weights(self, sentence: str) -> dict[str, float]:
        """The weight of each content word of a sentence; 0 for one that no passage has."""
        named = {_stem(_fold(word)) for word in _named(sentence, self._capitals)}
        weights = {}
        for word in map(_stem, content_words(sentence)):
            frequency = self._frequency[word]
            rare = math.log((len(self._words) + 1) / (frequency + 0.5)) + 0.2 if frequency else 0.0
            asked = _ASKED if word in self._asked else 1.0
            weights[word] = rare * asked * (2.0 if word in named and word not in self._asked else 1.0)
        return weights


#: The weight of a word of the question, the weight of a pair of neighbours that stay together, and the share of the
#: words not in the question that a further passage must add. Chosen on recorded answers, where they matter little
#: (docs/log/2026-11-25-citations-by-words.md).
_ASKED, _PAIR, _FURTHER = 0.2, 0.2, 0.2


def _named(sentence: str, capitals: bool) -> list[str]:
    """Names and numbers: words with a digit, and capitalised words that do not begin the sentence."""
    words = _WORD.findall(without_citations(sentence))
    return [
        word
        for place, word in enumerate(words)
        if any(letter.isdigit() for letter in word)
        or (capitals and place and word[0].isupper() and len(word) > 1)
    ]


def _stem(word: str) -> str:
    """A word without its English ending, so that "stores" matches "stored"."""
    ending = next((end for end in ("ies", "es", "s", "ed", "ing") if word.endswith(end)), "")
    return word.removesuffix(ending) if len(word) > len(ending) + 3 else word


def without_citations(text: str) -> str:
    """The text without its citation marks and the spaces in front of them."""
    return re.sub(rf"[^\S\n]*{_MARK.pattern}", "", text)


def content_words(text: str) -> list[str]:
    """The words that say what a text is about, in lower case, in order."""
    common = COMMON_WORDS.get(language_of(text) or "", frozenset())
    return [word for word in _words(without_citations(text)) if word not in _STOP_WORDS | common]


def _words(text: str) -> list[str]:
    """Words in lower case; for scripts without spaces, pairs of adjacent characters."""
    found = []
    for word in _WORD.findall(_fold(text)):
        if _SPACELESS.search(word) and len(word) > 1:
            found += [first + second for first, second in pairwise(word)]
        else:
            found.append(word.removesuffix("'s").removesuffix("\u2019s"))
    return found


def _fold(text: str) -> str:
    return unicodedata.normalize("NFKC", text).casefold()


def _numbers(listed: str, sources: int) -> list[int]:
    """The numbers of a mark; for a range, those that have a source, and its ends in any case."""
    numbers: dict[int, None] = {}
    for part in re.split(r"[,;]", listed):
        first, *rest = (int(number) for number in re.findall(r"\d+", part))
        last = rest[0] if rest else first
        inside = range(max(first, 1), min(last, sources) + 1)
        numbers.update(dict.fromkeys([first, *inside, last]))
    return list(numbers)


def _sentence_of(text: str, place: int) -> str:
    """The last sentence that has words in front of ``place``; if there is none, the first sentence.

    In "Copper is a metal [1]. It conducts heat. [2]" the second mark stands after a full stop.
    """
    found = ""
    for match in _SENTENCE.finditer(text):
        if found and not _words(without_citations(text[match.start() : place])):
            break
        found = without_citations(match.group()).strip() or found
    return found
