"""Scores of single answers, and their mean over many.

Answers are compared after SQuAD's normalisation (Rajpurkar et al., 2016, the official evaluation script). A
question may have several gold answers; the best match counts.
"""

from __future__ import annotations

import re
import string
import unicodedata
from collections import Counter
from collections.abc import Iterable, Sequence

from specrag.errors import InputError

_ARTICLES = re.compile(r"\b(a|an|the)\b")
_ASCII_PUNCTUATION = frozenset(string.punctuation)


def normalize_answer(text: str) -> str:
    """Lower case, without punctuation, articles (a, an, the) and surplus white space.

    For ASCII, the same as SQuAD's script. Beyond ASCII, all Unicode punctuation is removed (curly quotes, dashes), and
    composed and decomposed accents are made equal (NFC).
    """
    return _normalized(text, "")


def contains_answer(response: str, gold: str | Sequence[str]) -> bool:
    """Whether a gold answer occurs in the response as whole words, both normalised; the rule for free-form answers.

    Self-RAG and Speculative RAG accept any substring, so that "LA" is found in "Oklahoma". Punctuation may be dropped
    or separate words: "Curie" occurs in "Curie's" and in "Joliot-Curie", "US" in "U.S.". A gold answer that
    normalisation leaves empty ("The") occurs in no response.
    """
    readings = [f" {_normalized(response, gap)} " for gap in ("", " ")]
    wanted = {_normalized(answer, gap) for answer in _answers(gold) for gap in ("", " ")}
    return any(answer and f" {answer} " in reading for answer in wanted for reading in readings)


def token_f1(response: str, gold: str | Sequence[str]) -> float:
    """Harmonic mean of precision and recall of the response's words, for the best gold answer; in [0, 1]."""
    words = normalize_answer(response).split()
    return max(_f1(words, normalize_answer(answer).split()) for answer in _answers(gold))


def accuracy(correct: Iterable[bool | float]) -> float:
    """The mean of per-question scores: the share of right answers if they are booleans.

    Raises:
        InputError: there are no scores.
    """
    scores = [float(score) for score in correct]
    if not scores:
        raise InputError("correct", scores, "give the score of at least one question")
    return sum(scores) / len(scores)


def _answers(gold: str | Sequence[str]) -> Sequence[str]:
    answers = [gold] if isinstance(gold, str) else gold
    if not answers:
        raise InputError("gold", gold, "give at least one gold answer")
    return answers


def _normalized(text: str, gap: str) -> str:
    """:func:`normalize_answer` with ``gap`` in place of each punctuation mark."""
    lowered = unicodedata.normalize("NFC", text).lower()
    bare = "".join(gap if _is_punctuation(character) else character for character in lowered)
    return " ".join(_ARTICLES.sub(" ", bare).split())


def _is_punctuation(character: str) -> bool:
    return character in _ASCII_PUNCTUATION or unicodedata.category(character).startswith("P")


def _f1(words: Sequence[str], gold_words: Sequence[str]) -> float:
    if not words or not gold_words:
        return float(words == gold_words)
    common = (Counter(words) & Counter(gold_words)).total()
    return 2 * common / (len(words) + len(gold_words))
