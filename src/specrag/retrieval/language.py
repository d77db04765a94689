"""Detects the language of a text: by its script, else by common words."""

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


#: Languages that are recognised by their most common words, with those words; the names are Snowball's.
COMMON_WORDS = _common_words()

#: Scripts that identify a language, with a range of their letters. Kana come before the characters shared with Chinese.
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

#: Characters and words of a text that are considered: more would tell nothing new.
_CHARACTERS, _WORDS = 2000, 200

#: Share of the letters that a script must exceed: a few names in another script do not make a language.
_SHARE = 0.2

#: A run of letters in a script without spaces.
_RUN = re.compile(r"[\u3040-\u30ff\u3400-\u9fff]{2,}")


def language_of(text: str) -> str | None:
    """The language of a text by Snowball's name, such as ``english``; ``None`` if it cannot be told.

    Short questions may contain no common word of any language; a name alone belongs to no language.
    """
    text = text[:_CHARACTERS]
    letters = len(_LETTER.findall(text))
    for language, script in _SCRIPTS:
        if len(script.findall(text)) > _SHARE * letters:
            return language
    return _by_words(_WORD.findall(text.casefold())[:_WORDS])


def languages_of(texts: Iterable[str]) -> tuple[str, ...]:
    """The languages of many texts, the most frequent first; those of fewer than one text in a hundred are left out."""
    found = Counter(language_of(text) for text in texts)
    least = found.total() / 100
    return tuple(language for language, count in found.most_common() if language and count >= least)


def spaced(text: str) -> str:
    """The text with runs of letters in scripts without spaces split into bigrams, which searches can find."""
    return _RUN.sub(lambda run: f" {' '.join(map(''.join, pairwise(run[0])))} ", text)


def _by_words(words: list[str]) -> str | None:
    """The language with the most common words; a word shared by several counts less; English wins a tie."""
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
