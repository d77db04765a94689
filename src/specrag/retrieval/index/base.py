"""The protocol of passage indexes: queries in, rankings out, all scores from the kernel in ``scoring.py``."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from specrag.checks import check_whole, plain
from specrag.errors import InputError
from specrag.retrieval.index.scoring import LONGEST, Bools, Doubles, Floats, Ints, Longs


@dataclass(frozen=True, slots=True, eq=False)
class Query:
    """A question, encoded for the indexes.

    Args:
        text: the question.
        vector: its dense vector, float32 [dimension]; needed by dense and hybrid indexes.
        terms: ids of its known terms, int32, in the order of the terms' texts; a term occurs as often as the question
            contains it. Needed by sparse and hybrid indexes; may be empty.
    """

    text: str
    vector: Floats | None = None
    terms: Ints | None = None


@dataclass(frozen=True, slots=True, eq=False)
class Ranking:
    """Passages by descending score, with ties broken by ascending id.

    Args:
        ids: ids of the passages, int64 [n].
        scores: their scores, float32 [n].
    """

    ids: Longs
    scores: Floats

    def __len__(self) -> int:
        return len(self.ids)


class Index(Protocol):
    """Finds passages for queries. Safe to use from several threads; an open index never changes."""

    def search(self, queries: Sequence[Query], k: int, allowed: Bools | None = None) -> list[Ranking]:
        """The best ``k`` passages for each query, fewer if there are not that many.

        A batch gives bit for bit the same results as single queries. Does not hold the interpreter lock for long.

        Args:
            queries: any number of queries.
            k: at least 1.
            allowed: bool [rows]; only the passages of these rows may be returned. An index built from texts or vectors
                has one row for each, in their order, and the row's number is the passage's id.

        Raises:
            InputError: a query lacks the required form or contains NaN; a shape does not fit.
        """

    def score(self, queries: Sequence[Query], passage_ids: Longs) -> Floats:
        """The scores by which :meth:`search` ranks, float32 [queries, ids given]: a function of each pair.

        Raises:
            InputError: as for :meth:`search`, or there is no passage with one of these ids.
        """

    def __len__(self) -> int:
        """Number of passages."""


class Rows:
    """Which passage each row of an index holds.

    Args:
        total: number of rows.
        ids: ids of the rows' passages, int64 [total], each once; None if a row's number is its passage's id.
        live: the rows that hold a passage, bool [total]; None if all do.
    """

    def __init__(self, total: int, ids: Longs | None = None, live: Bools | None = None) -> None:
        self.total = total
        self.live = None if live is None or live.all() else live
        self.ids: Longs = np.empty(0, dtype=np.int64) if ids is None else ids
        self._sorted: tuple[Longs, Longs] | None = None  # sorted ids of passages, and their rows

    def __len__(self) -> int:
        """Number of passages."""
        return self.total if self.live is None else int(np.count_nonzero(self.live))

    def named(self, rows: Longs) -> Longs:
        """The ids of the passages in these rows, int64."""
        return self.ids[rows] if len(self.ids) else rows

    def sorted_ids(self) -> Longs:
        """The ids of all passages, ascending."""
        ids = self.named(np.arange(self.total))
        return np.sort(ids if self.live is None else ids[self.live])

    def mask(self, allowed: Bools | None) -> Bools | None:
        """The mask of rows that a search may return; ``None`` if it may return all.

        Raises:
            InputError: the mask has another shape or type.
        """
        mask = checked_mask(allowed, self.total)
        if mask is None or self.live is None:
            return self.live if mask is None else mask
        both: Bools = mask & self.live
        return both

    def find(self, ids: Longs) -> Longs:
        """The rows of these passages, int64.

        Raises:
            InputError: there is no passage with one of these ids.
        """
        if not len(self.ids):
            return checked_ids(ids, self.total)
        wanted = _whole_numbers(ids)
        if self._sorted is None:  # threads that get here at the same time write the same
            order = np.argsort(self.ids, kind="stable")
            order = order if self.live is None else order[self.live[order]]
            self._sorted = self.ids[order], order
        known, order = self._sorted
        places = np.searchsorted(known, wanted)
        missing = places == len(known)
        missing[~missing] = known[places[~missing]] != wanted[~missing]
        if missing.any():
            raise InputError("passage_ids", int(wanted[missing][0]), "there is no passage of this id")
        rows: Longs = order[places]
        return rows


def best_of(scores: Floats, ids: Longs, k: int) -> Ranking:
    """The best ``k`` of some passages, each given once, in any order."""
    order = np.lexsort((ids, -scores))[:k]
    return Ranking(ids=ids[order], scores=scores[order])


def checked_k(k: int, passages: int) -> int:
    """Check ``k`` and limit it to the number of passages."""
    return min(check_whole("k", plain(k)), passages)


def checked_mask(allowed: Bools | None, passages: int) -> Bools | None:
    """Check a mask for the compiled loops; ``None`` if everything is allowed."""
    if allowed is None:
        return None
    mask = np.asarray(allowed)
    if mask.dtype != np.bool_ or mask.shape != (passages,):
        shape = f"{mask.dtype} {list(mask.shape)}"
        raise InputError("allowed", shape, f"give one truth value a passage: bool [{passages}]")
    return None if mask.all() else np.ascontiguousarray(mask)


def checked_ids(passage_ids: Longs, passages: int) -> Longs:
    """Check passage ids for the compiled loops."""
    ids = _whole_numbers(passage_ids)
    if ids.size and not (ids.min() >= 0 and ids.max() < passages):
        wrong = ids[(ids < 0) | (ids >= passages)][0]
        raise InputError("passage_ids", int(wrong), f"the ids go from 0 to {passages - 1}")
    return ids


def _whole_numbers(passage_ids: Longs) -> Longs:
    ids = np.asarray(passage_ids)
    if ids.ndim != 1 or (ids.size and not np.issubdtype(ids.dtype, np.integer)):
        raise InputError("passage_ids", f"{ids.dtype} {list(ids.shape)}", "give a list of whole numbers")
    return np.ascontiguousarray(ids, dtype=np.int64)


def query_vectors(queries: Sequence[Query], dimension: int) -> Floats:
    """The queries' vectors, float32 [queries, dimension]."""
    vectors = np.empty((len(queries), dimension), dtype=np.float32)
    for place, query in enumerate(queries):
        if query.vector is None:
            raise InputError(f"queries[{place}].vector", None, "encode the query for this index")
        vector = np.asarray(query.vector)
        if vector.dtype != np.float32 or vector.shape != (dimension,):
            shape = f"{vector.dtype} {list(vector.shape)}"
            raise InputError(f"queries[{place}].vector", shape, f"give float32 [{dimension}]")
        vectors[place] = vector
    wrong = np.flatnonzero(~(norms(vectors) <= LONGEST))
    if len(wrong):
        shown = vectors[wrong[0]].tolist()
        raise InputError(f"queries[{wrong[0]}].vector", shown, "give finite numbers of a length below 2^60")
    return vectors


def query_terms(queries: Sequence[Query], vocabulary: int) -> list[Ints]:
    """The queries' terms, an int32 array each.

    Args:
        queries: the queries.
        vocabulary: greater than every term's id.
    """
    found = []
    for place, query in enumerate(queries):
        field = f"queries[{place}].terms"
        if query.terms is None:
            raise InputError(field, None, "take the query's terms from the sparse index")
        terms = np.asarray(query.terms)
        if terms.ndim != 1 or (terms.size and not np.issubdtype(terms.dtype, np.integer)):
            raise InputError(field, f"{terms.dtype} {list(terms.shape)}", "give int32 [terms]")
        if terms.size and not (terms.min() >= 0 and terms.max() < vocabulary):
            raise InputError(field, terms.tolist(), f"give ids from 0 to {vocabulary - 1}")
        found.append(np.ascontiguousarray(terms, dtype=np.int32))
    return found


def norms(vectors: Floats) -> Doubles:
    """Euclidean length of each row, float64 [rows]."""
    lengths: Doubles = np.sqrt(np.square(vectors, dtype=np.float64).sum(axis=1))
    return lengths
