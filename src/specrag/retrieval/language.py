"""In which language a text is: by its script, else by its commonest words."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable
from functools import cache
from importlib.resources import files
from itertools import pairwise


def _common_words() -> dict[str, frozenset[str]]:
    lines = files("specrag.retrieval").joinpath("common_words.txt").read_text(encoding="utf-8").splitlines()
    named = (line.partition(": ") for line in lines if not line.startswith("#"))
    return {language: frozenset(words.split()) for language, _, words in named}


#: Languages that are told by their commonest words, with those words; the names are Snowball's.
COMMON_WORDS = _common_words()

#: Scripts that one language is written in, with a range of their letters. Kana come before what Chinese shares.
_SCRIPTS = (
    ("japanese", re.compile(r"[\u3040-\u30ff]")),
    ("chinese", re.compile(r"[\u3400-\u9fff]")),
    ("korean", re.compile(r"[\u1100-\u11ff\uac00-\ud7af]")),
    ("russian", re.compile(r"[\u0400-\u04ff]")),
    ("arabic", re.compile(r"[\u0600-\u06ff]")),
    ("greek", re.compile(r"[\u0370-\u03ff]")),
    ("hindi", re.compile(r"[\u0900-\u097f]")),
    ("thai", re.compile(r"[\u0e00-\u0e7f]")),
)

_LETTER = re.compile(r"[^\W\d_]")
_WORD = re.compile(r"[^\W\d_]+(?:[-'\u2019][^\W\d_]+)*")

#: Characters and words of a text that are looked at: more tell nothing new.
_CHARACTERS, _WORDS = 2000, 200

#: Share of the letters that a script must have: names in other scripts are no language.
_SHARE = 0.2

#: Of scripts without spaces: a run of letters.
_RUN = re.compile(r"[\u3040-\u30ff\u3400-\u9fff]{2,}")


def language_of(text: str) -> str | None:
    """The language of a text by Snowball's name, such as ``english``; ``None`` where it cannot be told.

    Short questions may hold no common word of any language; a name alone is in none.
    """
    text = text[:_CHARACTERS]
    letters = len(_LETTER.findall(text))
    for language, script in _SCRIPTS:
        if len(script.findall(text)) > _SHARE * letters:
            return language
    return _by_words(_WORD.findall(text.casefold())[:_WORDS])


def languages_of(texts: Iterable[str]) -> tuple[str, ...]:
    """The languages of many texts, the commonest first; without those of fewer than one in a hundred."""
    found = Counter(language_of(text) for text in texts)
    least = found.total() / 100
    return tuple(language for language, count in found.most_common() if language and count >= least)


def spaced(text: str) -> str:
    """The text with runs of letters of scripts without spaces as pairs of neighbours, which searches can find."""
    return _RUN.sub(lambda run: f" {' '.join(map(''.join, pairwise(run[0])))} ", text)


def _by_words(words: list[str]) -> str | None:
    """The language with the most common words; one counts less the more languages have it; English wins a tie."""
    known = _languages_by_word()
    scores: dict[str, float] = {}
    for word in words:
        languages = known.get(word, ())
        for language in languages:
            scores[language] = scores.get(language, 0.0) + 1 / len(languages)
    best = [language for language, score in scores.items() if score == max(scores.values())]
    if "english" in best:
        return "english"
    return best[0] if len(best) == 1 else None


@cache
def _languages_by_word() -> dict[str, tuple[str, ...]]:
    found: dict[str, list[str]] = {}
    for language, words in COMMON_WORDS.items():
        for word in words:
            found.setdefault(word, []).append(language)
    return {word: tuple(languages) for word, languages in found.items()}
