"""Sparse search: BM25 (Robertson and Zaragoza, 2009) in Lucene's form.

The index stores how often each term occurs in each passage. Weights are computed from that when a term is searched, so
documents can be added and removed: the weights always reflect the current passages.
"""

from __future__ import annotations

import math
import threading
from collections import Counter, OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import bm25s
import numpy as np
import Stemmer

from specrag.checks import check_number
from specrag.errors import InputError
from specrag.retrieval.index.base import (
    Query,
    Ranking,
    Rows,
    best_of,
    checked_k,
    query_terms,
)
from specrag.retrieval.index.scoring import (
    Bools,
    Floats,
    Ints,
    Longs,
    rank_sparse,
    sparse_bound,
    sparse_scores,
)
from specrag.retrieval.language import COMMON_WORDS, language_of, languages_of, spaced

_STEMMED = frozenset(Stemmer.algorithms())

#: Languages with a stop-word list in bm25s. Its lists for Chinese and Korean are left out: they are not bigrams.
_WITH_STOP_WORDS = frozenset({*COMMON_WORDS, "russian"})

#: Languages that texts can be in.
LANGUAGES = _STEMMED | {"chinese", "japanese", "korean", "thai"}

_NO_MASK: Bools = np.empty(0, dtype=np.bool_)

_CACHED_BYTES = 64 << 20  # for the weights of recently searched terms


@dataclass(frozen=True, slots=True)
class BM25Settings:
    """Settings of BM25: tokenization and term weights.

    A term's weight for a passage is ``log(1 + (N - df + 0.5) / (df + 0.5)) * tf / (tf + k1 * (1 - b + b *
    length / average length))``, which is always positive.

    A text is split in its own language (:func:`~specrag.retrieval.language.language_of`): stop words are dropped, the
    others are stemmed. The language of a query may be impossible to tell, so it is split in all languages of the texts.

    Args:
        k1: how soon repetitions saturate.
        b: how strongly long passages are penalised, 0 to 1.
        languages: languages of the texts, the most frequent first, by Snowball's names; empty to leave words as they
            are.
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
        """Settings for the languages that these texts are in."""
        return cls(languages=languages_of(texts) or ("english",))

    def split(self, texts: Sequence[str]) -> list[list[str]]:
        """The terms of each text, in the order of the text: words of two or more letters or digits.

        In scripts without spaces, bigrams of letters take the place of words.
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
        """The terms of a query in all languages; each as often as in the language where it occurs most."""
        if len(self.languages) < 2:
            return self.split([text])[0]
        found: Counter[str] = Counter()
        for language in self.languages:
            found |= Counter(_terms([text], language)[0])
        return sorted(found.elements())


def _terms(texts: Sequence[str], language: str | None) -> list[list[str]]:
    # A stemmer keeps a buffer, so each call makes its own.
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
class TermCounts:
    """How often each term occurs in each of some texts.

    Attributes:
        terms: all terms, each once, ascending.
        starts: int64 [terms + 1]; the entries of term ``t`` are those from ``starts[t]`` up to ``starts[t + 1]``.
        rows: numbers of the texts that contain the term, int32, ascending within a term.
        times: how often they contain it, int32.
        lengths: number of terms of each text, int32 [texts].
    """

    terms: Sequence[str]
    starts: Longs
    rows: Ints
    times: Ints
    lengths: Ints


def count_terms(split: Sequence[Sequence[str]]) -> TermCounts:
    """Count the terms of texts.

    Args:
        split: the terms of each text, as returned by :meth:`BM25Settings.split`.
    """
    numbers: dict[str, int] = {}
    found = np.array(
        [numbers.setdefault(term, len(numbers)) for terms in split for term in terms], dtype=np.int64
    )
    lengths = np.array([len(terms) for terms in split], dtype=np.int32)
    # Sorted, since the insertion order of the terms depends on the order of the texts.
    vocabulary = sorted(numbers)
    places = np.empty(len(numbers), dtype=np.int64)
    places[[numbers[term] for term in vocabulary]] = np.arange(len(numbers))
    texts = max(len(split), 1)
    pairs, times = np.unique(
        places[found] * texts + np.repeat(np.arange(len(split)), lengths), return_counts=True
    )
    terms, rows = np.divmod(pairs, texts)
    starts = np.searchsorted(terms, np.arange(len(numbers) + 1))
    return TermCounts(vocabulary, starts, rows.astype(np.int32), times.astype(np.int32), lengths)


@dataclass(frozen=True, slots=True, eq=False)
class Occurrences:
    """The rows that contain a term, int32, ascending, and how often each contains it, int32."""

    rows: Ints
    times: Ints


class TermSource(Protocol):
    """Where an index gets its terms from."""

    @property
    def vocabulary(self) -> int:
        """Greater than the id of every term."""

    def find(self, terms: Sequence[str]) -> Mapping[str, int]:
        """The ids of those terms that are known."""

    def occurrences(self, term: int) -> Occurrences:
        """The occurrences of a term, by its id; may include rows that no longer hold a passage."""


class _CountedTerms:
    """Terms in memory."""

    def __init__(self, counts: TermCounts) -> None:
        self._counts = counts
        self._ids = {term: place for place, term in enumerate(counts.terms)}

    @property
    def vocabulary(self) -> int:
        return len(self._ids)

    def find(self, terms: Sequence[str]) -> Mapping[str, int]:
        return {term: self._ids[term] for term in terms if term in self._ids}

    def occurrences(self, term: int) -> Occurrences:
        own = slice(self._counts.starts[term], self._counts.starts[term + 1])
        return Occurrences(self._counts.rows[own], self._counts.times[own])


@dataclass(frozen=True, slots=True, eq=False)
class _Weighed:
    """The rows that contain a term, int32, the weights there, float32, and the largest weight."""

    rows: Ints
    weights: Floats
    largest: float

    @property
    def nbytes(self) -> int:
        return self.rows.nbytes + self.weights.nbytes


@dataclass(frozen=True, slots=True, eq=False)
class Postings:
    """The weights of the terms of some queries, term by term.

    Attributes:
        terms: the terms of each query, renumbered from 0, int32.
        starts: int64 [terms + 1]; the rows of term ``t`` are ``rows[starts[t] : starts[t + 1]]``.
        rows: int32, ascending within a term.
        weights: the weight for each entry of ``rows``, float32.
        largest: the largest weight of each term, float32 [terms].
    """

    terms: list[Ints]
    starts: Longs
    rows: Ints
    weights: Floats
    largest: Floats


class BM25Index:
    """All passages' terms with their weights.

    A passage's score for a query is the sum of its weights for the query's terms, repeated terms counted repeatedly.
    Only passages with at least one of the terms are returned: a query without a known term gets an empty ranking.

    Args:
        source: the terms.
        lengths: number of terms of each row's passage, int32 [rows].
        settings: the settings with which the texts were split.
        rows: which passage each row holds; by default the row's number is the passage's id.
    """

    def __init__(
        self, source: TermSource, lengths: Ints, settings: BM25Settings, rows: Rows | None = None
    ) -> None:
        self.settings = settings
        self.rows = Rows(len(lengths)) if rows is None else rows
        self._source = source
        live = lengths if self.rows.live is None else lengths[self.rows.live]
        average = float(live.sum(dtype=np.int64)) / max(len(live), 1) or 1.0
        self._held_back = settings.k1 * (1 - settings.b + settings.b * lengths / average)
        self._cache: OrderedDict[int, _Weighed] = OrderedDict()
        self._cached_bytes = 0
        self._lock = threading.Lock()

    @classmethod
    def build(
        cls, texts: Sequence[str], settings: BM25Settings | None = None, rows: Rows | None = None
    ) -> BM25Index:
        """Index texts in memory."""
        settings = settings or BM25Settings.of(texts)
        counts = count_terms(settings.split(texts))
        return cls(_CountedTerms(counts), counts.lengths, settings, rows)

    def __len__(self) -> int:
        return len(self.rows)

    @property
    def vocabulary(self) -> int:
        """Greater than the id of every term."""
        return self._source.vocabulary

    def terms(self, text: str) -> Ints:
        """The ids of a query's known terms, int32, in the order of the terms' texts, repeated as in the query."""
        words = self.settings.split_query(text)
        known = self._source.find(list(dict.fromkeys(words)))
        return np.array([known[word] for word in sorted(words) if word in known], dtype=np.int32)

    def shared_words(self, text: str, passage_ids: Sequence[int]) -> list[float]:
        """Share of a text's terms that occur in each passage, 0 to 1, each term weighted by its rarity in the passages.

        The text is split in each language and the largest share counts; 0 for a text without terms.
        """
        best = [0.0] * len(passage_ids)
        rows = self.rows.find(np.array(passage_ids, dtype=np.int64)).tolist()
        for language in self.settings.languages or (None,):
            words = sorted(set(_terms([text], language)[0]))
            known = self._source.find(words)
            holding = [self._weighed(known[word]).rows if word in known else None for word in words]
            # An unknown term counts as rare as the rarest known one.
            weights = [self._rarity(1 if own is None else max(len(own), 1)) for own in holding]
            for number, row in enumerate(rows):
                held = sum(
                    weight
                    for weight, own in zip(weights, holding, strict=True)
                    if own is not None and _holds(own, row)
                )
                best[number] = max(best[number], held / sum(weights) if weights else 0.0)
        return best

    def postings(self, terms: Sequence[Ints]) -> Postings:
        """The weights of the terms of some queries."""
        every, local = np.unique(np.concatenate([*terms, np.empty(0, dtype=np.int32)]), return_inverse=True)
        weighed = [self._weighed(term) for term in every.tolist()]
        ends = np.cumsum([len(own) for own in terms], dtype=np.int64)[:-1]
        return Postings(
            terms=np.split(local.astype(np.int32), ends) if len(terms) else [],
            starts=np.cumsum([0, *(len(one.rows) for one in weighed)], dtype=np.int64),
            rows=np.concatenate([np.empty(0, dtype=np.int32), *(one.rows for one in weighed)]),
            weights=np.concatenate([np.empty(0, dtype=np.float32), *(one.weights for one in weighed)]),
            largest=np.array([one.largest for one in weighed], dtype=np.float32),
        )

    def bound(self, terms: Ints) -> float:
        """The most that a passage can score for these terms."""
        found = self.postings([terms])
        return float(sparse_bound(found.terms[0], found.largest))

    def _rarity(self, holding: int) -> float:
        return math.log(1 + (len(self) - holding + 0.5) / (holding + 0.5))

    def _weighed(self, term: int) -> _Weighed:
        with self._lock:
            if term in self._cache:
                self._cache.move_to_end(term)
                return self._cache[term]
        found = self._source.occurrences(term)
        rows, times = found.rows, found.times
        if self.rows.live is not None:
            live = self.rows.live[rows]
            rows, times = rows[live], times[live]
        weights = (self._rarity(len(rows)) * (times / (times + self._held_back[rows]))).astype(np.float32)
        weighed = _Weighed(rows, weights, float(weights.max(initial=0.0)))
        with self._lock:
            if term not in self._cache:
                self._cache[term] = weighed
                self._cached_bytes += weighed.nbytes
            while self._cached_bytes > _CACHED_BYTES:
                self._cached_bytes -= self._cache.popitem(last=False)[1].nbytes
        return weighed

    def search(self, queries: Sequence[Query], k: int, allowed: Bools | None = None) -> list[Ranking]:
        """The best passages that contain a term of the query; see :class:`~specrag.retrieval.index.base.Index`."""
        k = checked_k(k, len(self))
        mask = self.rows.mask(allowed)
        return [self._rank(terms, k, mask) for terms in query_terms(queries, self.vocabulary)]

    def _rank(self, terms: Ints, k: int, mask: Bools | None) -> Ranking:
        found = self.postings([terms])
        scores = np.empty(k, dtype=np.float32)
        ids = np.empty(k, dtype=np.int64)
        size = rank_sparse(
            found.terms[0],
            found.starts,
            found.rows,
            found.weights,
            self.rows.total,
            _NO_MASK if mask is None else mask,
            self.rows.ids,
            scores,
            ids,
        )
        return best_of(scores[:size], ids[:size], size)

    def score(self, queries: Sequence[Query], passage_ids: Longs) -> Floats:
        """Sums of weights by the kernel, float32 [queries, ids given]; 0 where no term occurs."""
        rows = self.rows.find(passage_ids)
        scores = np.empty((len(queries), len(rows)), dtype=np.float32)
        found = self.postings(query_terms(queries, self.vocabulary))
        for place, terms in enumerate(found.terms):
            sparse_scores(terms, found.starts, found.rows, found.weights, rows, scores[place])
        return scores


def _holds(ascending: Ints, row: int) -> bool:
    place = int(np.searchsorted(ascending, row))
    return place < len(ascending) and int(ascending[place]) == row
