"""Sparse search: BM25 (Robertson and Zaragoza, 2009) in Lucene's form, weights computed once by bm25s."""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import bm25s
import numpy as np
import numpy.typing as npt
import Stemmer

from specrag.checks import check_number
from specrag.errors import InputError
from specrag.retrieval.index.base import (
    Query,
    Ranking,
    best_of,
    checked_ids,
    checked_k,
    checked_mask,
    query_terms,
)
from specrag.retrieval.index.scoring import Bools, Floats, Ints, Longs, rank_sparse, sparse_scores
from specrag.retrieval.language import COMMON_WORDS, language_of, languages_of, spaced

STARTS_FILE = "bm25_starts.npy"
POSTINGS_FILE = "bm25_postings.npy"
WEIGHTS_FILE = "bm25_weights.npy"
LARGEST_FILE = "bm25_largest.npy"
SETTINGS_FILE = "bm25.json"
FILES = (STARTS_FILE, POSTINGS_FILE, WEIGHTS_FILE, LARGEST_FILE, SETTINGS_FILE)

_STEMMED = frozenset(Stemmer.algorithms())

#: Of bm25s's lists of stop words. Those of Chinese and Korean are no pairs of letters.
_WITH_STOP_WORDS = frozenset({*COMMON_WORDS, "russian"})

#: That texts can be in.
LANGUAGES = _STEMMED | {"chinese", "japanese", "korean", "thai"}

_NONE: Ints = np.empty(0, dtype=np.int32)
_NO_MASK: Bools = np.empty(0, dtype=np.bool_)


@dataclass(frozen=True, slots=True)
class BM25Settings:
    """Settings of BM25: tokenization and term weights.

    A term's weight for a passage is ``log(1 + (N - df + 0.5) / (df + 0.5)) * tf / (tf + k1 * (1 - b + b *
    length / average length))``: always positive.

    A text is read in its own language (:func:`~specrag.retrieval.language.language_of`): without its commonest words,
    the rest by their stems. A query may be too short to tell, and is read in all languages of the texts.

    Args:
        k1: how soon repetitions saturate.
        b: how much long passages are held back, 0 to 1.
        languages: of the texts, the commonest first, by Snowball's names; none: words as they are.
    """

    k1: float = 1.5
    b: float = 0.75
    languages: tuple[str, ...] = ("english",)

    def __post_init__(self) -> None:
        check_number("k1", self.k1, 0)
        check_number("b", self.b, 0, 1)
        for language in self.languages:
            if language not in LANGUAGES:
                raise InputError("languages", language, f"choose from {', '.join(sorted(LANGUAGES))}")

    @classmethod
    def of(cls, texts: Sequence[str]) -> BM25Settings:
        """For texts in the languages that they are in."""
        return cls(languages=languages_of(texts) or ("english",))

    def split(self, texts: Sequence[str]) -> list[list[str]]:
        """The terms of each text, in the order of the text: words of two or more letters or digits.

        Of scripts without spaces pairs of neighbouring letters take the place of words.
        """
        if len(self.languages) < 2:
            return _terms(texts, next(iter(self.languages), None))
        found: list[list[str]] = [[] for _ in texts]
        groups: dict[str, list[int]] = {}
        for place, text in enumerate(texts):
            language = language_of(text)
            groups.setdefault(language if language in self.languages else self.languages[0], []).append(place)
        for language, places in groups.items():
            for place, terms in zip(
                places, _terms([texts[place] for place in places], language), strict=True
            ):
                found[place] = terms
        return found

    def split_query(self, text: str) -> list[str]:
        """The terms of a query in all languages; each as often as in the language that has it most."""
        if len(self.languages) < 2:
            return self.split([text])[0]
        found: Counter[str] = Counter()
        for language in self.languages:
            found |= Counter(_terms([text], language)[0])
        return sorted(found.elements())


def _terms(texts: Sequence[str], language: str | None) -> list[list[str]]:
    # A stemmer keeps a buffer, so that each call takes its own.
    stemmer = Stemmer.Stemmer(language) if language in _STEMMED else None
    stop_words = language if language in _WITH_STOP_WORDS else None
    terms: list[list[str]] = bm25s.tokenize(
        [spaced(text) for text in texts],
        stopwords=stop_words,
        stemmer=stemmer,
        return_ids=False,
        show_progress=False,
    )
    return terms


@dataclass(frozen=True, slots=True, eq=False)
class Postings:
    """The weights, term by term.

    Args:
        starts: int64 [terms + 1]; the passages of term ``t`` are ``passages[starts[t] : starts[t + 1]]``.
        passages: int32, ascending within a term.
        weights: float32, at the same places.
        largest: the largest weight of each term, float32 [terms].
    """

    starts: Longs
    passages: Ints
    weights: Floats
    largest: Floats


class BM25Index:
    """All passages' terms with their weights.

    A query's score of a passage is the sum of the weights of its terms there, repeated terms counted
    repeatedly. Only passages with at least one of the terms are returned: a query without a known term gets
    an empty ranking.

    Args:
        vocabulary: the terms in ascending order; a term's id is its place.
        postings: their weights.
        passages: number of passages.
        settings: as the index was built.
    """

    def __init__(
        self, vocabulary: Sequence[str], postings: Postings, passages: int, settings: BM25Settings
    ) -> None:
        sizes = [len(postings.starts) - 1, len(postings.largest), len(vocabulary)]
        if len(set(sizes)) > 1 or len(postings.passages) != len(postings.weights):
            raise InputError("postings", sizes, "build the index again: its parts do not belong together")
        self.settings = settings
        self.postings = postings
        self._vocabulary = {term: place for place, term in enumerate(vocabulary)}
        self._passages = passages

    @classmethod
    def build(cls, texts: Sequence[str], settings: BM25Settings | None = None) -> BM25Index:
        """Index the texts; the same texts give the same index, bit for bit."""
        settings = settings or BM25Settings.of(texts)
        split = settings.split(texts)
        # Sorted: bm25s itself numbers terms by Python's string hashes, which change from run to run.
        vocabulary = sorted({term for terms in split for term in terms})
        numbers = {term: place for place, term in enumerate(vocabulary)}
        ids = [[numbers[term] for term in terms] for terms in split]
        return cls(vocabulary, _weigh(ids, len(vocabulary), settings), len(texts), settings)

    def __len__(self) -> int:
        return self._passages

    def terms(self, text: str) -> Ints:
        """The known terms of a query, int32, ascending, as often as the text holds them; may be empty."""
        known = [self._vocabulary.get(term, -1) for term in self.settings.split_query(text)]
        return np.array(sorted(term for term in known if term >= 0), dtype=np.int32)

    def shared_words(self, text: str, passage_ids: Sequence[int]) -> list[float]:
        """Share of a text's terms that each passage holds, 0 to 1, each weighed by how rare it is among the passages.

        In the language in which it is most; 0 for a text without terms.
        """
        best = [0.0] * len(passage_ids)
        for language in self.settings.languages or (None,):
            places = [self._vocabulary.get(term, -1) for term in set(_terms([text], language)[0])]
            holding = [self._passages_of(place) for place in places]
            counts = [max(len(ids), 1) for ids in holding]  # an unknown term is as rare as the rarest
            weights = [math.log(1 + (len(self) - count + 0.5) / (count + 0.5)) for count in counts]
            for number, identifier in enumerate(passage_ids):
                held = sum(
                    weight for weight, ids in zip(weights, holding, strict=True) if _holds(ids, identifier)
                )
                best[number] = max(best[number], held / sum(weights) if weights else 0.0)
        return best

    def _passages_of(self, term: int) -> Ints:
        starts = self.postings.starts
        return self.postings.passages[starts[term] : starts[term + 1]] if term >= 0 else _NONE

    def save(self, folder: Path) -> None:
        """Write :data:`FILES`."""
        np.save(folder / STARTS_FILE, self.postings.starts)
        np.save(folder / POSTINGS_FILE, self.postings.passages)
        np.save(folder / WEIGHTS_FILE, self.postings.weights)
        np.save(folder / LARGEST_FILE, self.postings.largest)
        content = {
            "passages": len(self),
            "settings": asdict(self.settings),
            "vocabulary": list(self._vocabulary),
        }
        (folder / SETTINGS_FILE).write_text(json.dumps(content, ensure_ascii=False) + "\n", encoding="utf-8")

    @classmethod
    def load(cls, folder: Path) -> BM25Index:
        """Open what :meth:`save` wrote; the weights are mapped, not read.

        Raises:
            InputError: the files do not belong together.
        """
        content = json.loads((folder / SETTINGS_FILE).read_text(encoding="utf-8"))
        postings = Postings(
            starts=np.load(folder / STARTS_FILE),
            passages=_mapped(folder / POSTINGS_FILE),
            weights=_mapped(folder / WEIGHTS_FILE),
            largest=np.load(folder / LARGEST_FILE),
        )
        settings = _settings(content["settings"])
        return cls(content["vocabulary"], postings, content["passages"], settings)

    def search(self, queries: Sequence[Query], k: int, allowed: Bools | None = None) -> list[Ranking]:
        """The best passages that hold a term of the query; see :class:`~specrag.retrieval.index.base.Index`."""
        k = checked_k(k, len(self))
        mask = checked_mask(allowed, len(self))
        return [self._rank(terms, k, mask) for terms in query_terms(queries, len(self._vocabulary))]

    def _rank(self, terms: Ints, k: int, mask: Bools | None) -> Ranking:
        scores = np.empty(k, dtype=np.float32)
        ids = np.empty(k, dtype=np.int64)
        size = rank_sparse(
            terms,
            self.postings.starts,
            self.postings.passages,
            self.postings.weights,
            len(self),
            _NO_MASK if mask is None else mask,
            scores,
            ids,
        )
        return best_of(scores[:size], ids[:size], size)

    def score(self, queries: Sequence[Query], passage_ids: Longs) -> Floats:
        """Sums of weights by the kernel, float32 [queries, ids given]; 0 where no term occurs."""
        ids = checked_ids(passage_ids, len(self))
        scores = np.empty((len(queries), len(ids)), dtype=np.float32)
        postings = self.postings
        for place, terms in enumerate(query_terms(queries, len(self._vocabulary))):
            sparse_scores(terms, postings.starts, postings.passages, postings.weights, ids, scores[place])
        return scores


def _holds(ascending: Ints, identifier: int) -> bool:
    place = int(np.searchsorted(ascending, identifier))
    return place < len(ascending) and int(ascending[place]) == identifier


def _settings(written: dict[str, Any]) -> BM25Settings:
    """Settings as they were saved; those of earlier versions name a stemmer."""
    if "languages" in written:
        return BM25Settings(**{**written, "languages": tuple(written["languages"])})
    languages = () if written["stemmer"] is None else (written["stemmer"],)
    return BM25Settings(written["k1"], written["b"], languages)


def _mapped(path: Path) -> npt.NDArray[Any]:
    """The array in a file, mapped, as a plain view of the map."""
    return np.asarray(np.load(path, mmap_mode="r"))


def _weigh(ids: list[list[int]], vocabulary: int, settings: BM25Settings) -> Postings:
    """Compute all weights with bm25s; passages of a term are sorted by id."""
    if not vocabulary:
        no_ints, no_floats = np.empty(0, dtype=np.int32), np.empty(0, dtype=np.float32)
        return Postings(np.zeros(1, dtype=np.int64), no_ints, no_floats, no_floats)
    model = bm25s.BM25(k1=settings.k1, b=settings.b, method="lucene")
    found = model.build_index_from_ids(list(range(vocabulary)), ids, show_progress=False)
    starts = np.asarray(found["indptr"], dtype=np.int64)
    passages = np.asarray(found["indices"], dtype=np.int32)
    weights = np.asarray(found["data"], dtype=np.float32)
    terms = np.repeat(np.arange(vocabulary), np.diff(starts))
    order = np.lexsort((passages, terms))
    weights = weights[order]
    largest = np.maximum.reduceat(weights, starts[:-1])
    return Postings(starts, passages[order], weights, largest)
