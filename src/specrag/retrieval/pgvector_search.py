"""Asks a table for candidates and ranks them by the kernel of ``scoring.py``.

The database hands over candidates with their vectors, and a few more than asked for: all whose order its own rounding
might have changed (``pgvector_queries.py``). The client scores them, so that no bit of a ranking is the database's.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from psycopg.rows import TupleRow

from specrag.retrieval import pgvector_filters
from specrag.retrieval.disk import KnowledgeBaseError
from specrag.retrieval.index import Ranking, best_of, norms
from specrag.retrieval.passage import Passage
from specrag.retrieval.pgvector_connection import Database, Session
from specrag.retrieval.pgvector_queries import (
    EXACT_SETTINGS,
    LOOKUP_SETTINGS,
    NEAR_TIES,
    Statements,
    sampled_percent,
    walk_settings,
)
from specrag.retrieval.pgvector_schema import FoundStore
from specrag.retrieval.rounding import dense_slack
from specrag.retrieval.scoring import Bools, Doubles, Floats, Longs, dense_scores
from specrag.retrieval.seen_passages import Fetched, SeenPassages


@dataclass(slots=True)
class _Asked:
    """What a statement has returned for one query.

    Attributes:
        places: of its passages among all that were returned.
        candidates: how many passages they were chosen from.
    """

    places: list[int]
    candidates: int = 0


@dataclass(frozen=True, slots=True, eq=False)
class _Answer:
    """What a statement has returned: passages without duplicates, and which of them are whose."""

    ids: Longs
    vectors: Floats
    queries: list[_Asked]


class TableSearch:
    """Searches one table. Every method may raise what :meth:`Database.run` raises.

    Args:
        database: where it is.
        table: its name.
        found: what is known of it.
        seen: is told every passage that comes.
    """

    def __init__(self, database: Database, table: str, found: FoundStore, seen: SeenPassages) -> None:
        self._database = database
        self._record = found.record
        self._oid = found.oid
        self._statements = Statements(table)
        self._seen = seen

    def exact(self, vectors: Floats, k: int, mask: Bools | None) -> list[Ranking]:
        """The best ``k`` allowed passages for each query, by one scan of the table.

        Args:
            vectors: float32 [queries, dimension].
            mask: bool [passages], or None: all are allowed.
        """
        most = k + NEAR_TIES
        parameters = {
            **self._parameters(vectors, k, most),
            "percent": sampled_percent(k, self._record.passages),
            **_masking(mask),
        }
        statement = self._statements.exact(masked=mask is not None)
        rows = self._database.run(lambda session: session.rows(statement, parameters, EXACT_SETTINGS))
        answer = self._read(rows, len(vectors))
        rankings = _rank_each(vectors, answer, k)
        for place, asked in enumerate(answer.queries):
            if len(asked.places) == most:
                rankings[place] = self._with_all_near_ties(vectors[place], rankings[place], mask)
        return rankings

    def walk(self, vectors: Floats, k: int, ef_search: int) -> list[Ranking]:
        """The best ``k`` of the ``ef_search`` candidates that the HNSW index finds for each query.

        A walk that finds fewer candidates than there are (a graph torn by duplicates) is replaced by exact search,
        whatever ``k`` is, so that a smaller one gives a prefix of the same ranking.
        """
        most = min(ef_search, self._record.passages)
        parameters = self._parameters(vectors, k, most)
        statement, settings = self._statements.walk(), walk_settings(ef_search)
        rows = self._database.run(lambda session: session.rows(statement, parameters, settings))
        answer = self._read(rows, len(vectors))
        rankings = _rank_each(vectors, answer, k)
        torn = [place for place, asked in enumerate(answer.queries) if asked.candidates < most]
        if torn:
            for place, ranking in zip(torn, self.exact(vectors[torn], k, None), strict=True):
                rankings[place] = ranking
        return rankings

    def fetch(self, ids: Sequence[int]) -> dict[int, Fetched]:
        """Passages with their vectors, by id.

        Raises:
            KnowledgeBaseError: one is not there any more.
        """
        parameters = {"ids": list(ids)}
        statement = self._statements.lookup()
        rows = self._database.run(lambda session: session.rows(statement, parameters, LOOKUP_SETTINGS))
        fetched = [self._fetched(row) for row in rows]
        self._seen.add(fetched)
        found = {one.passage.id: one for one in fetched}
        for id in ids:
            if id not in found:
                raise KnowledgeBaseError(
                    f"pgvector: {self._database.place} has no passage {id} any more: load the knowledge base again"
                )
        return found

    def allowed(self, where: Mapping[str, Any]) -> Bools:
        """The passages that satisfy all conditions, bool [passages]; reads the whole table.

        Raises:
            InputError: an operator is unknown, or a value cannot be compared.
        """
        selection = pgvector_filters.select(self._statements.table, where)
        rows = self._database.run(
            lambda session: session.rows(selection.statement, selection.parameters, LOOKUP_SETTINGS)
        )
        mask = np.zeros(self._record.passages, dtype=bool)
        mask[[id for (id,) in rows]] = True
        return mask

    def _parameters(self, vectors: Floats, k: int, most: int) -> dict[str, Any]:
        return {"vectors": list(vectors), "slacks": self._slacks(vectors).tolist(), "k": k, "most": most}

    def _slacks(self, vectors: Floats) -> Doubles:
        return dense_slack(norms(vectors), self._record.longest, vectors.shape[1])

    def _read(self, rows: Sequence[TupleRow], queries: int) -> _Answer:
        asked = [_Asked([]) for _ in range(queries)]
        for place, (numbers, counts, *_) in enumerate(rows):
            for number, count in zip(numbers, counts, strict=True):
                asked[number - 1].places.append(place)
                asked[number - 1].candidates = count
        fetched = [self._fetched(row[2:]) for row in rows]
        self._seen.add(fetched)
        ids = np.array([one.passage.id for one in fetched], dtype=np.int64)
        return _Answer(ids, _stacked([one.vector for one in fetched]), asked)

    def _fetched(self, row: Sequence[Any]) -> Fetched:
        oid, id, embedding, source, title, place, text, metadata = row
        self._check_table([oid])
        return Fetched(Passage(id, source, title, place, text, metadata), embedding.to_numpy())

    def _check_table(self, oids: Iterable[int]) -> None:
        if any(oid != self._oid for oid in oids):
            raise KnowledgeBaseError(
                f"pgvector: {self._database.place} has been replaced since it was opened: open it again"
            )

    def _with_all_near_ties(self, vector: Floats, ranking: Ranking, mask: Bools | None) -> Ranking:
        """The ranking after every passage has been scored that might reach its last score."""
        slack = float(self._slacks(vector[None])[0])
        parameters = {"vector": vector, "farthest": slack - float(ranking.scores[-1]), **_masking(mask)}
        statement = self._statements.near(masked=mask is not None)

        def rank(session: Session) -> Ranking:
            best = ranking

            def take(rows: list[TupleRow]) -> None:
                nonlocal best
                self._check_table(oid for _, oid, _ in rows)
                ids = np.array([id for id, _, _ in rows], dtype=np.int64)
                new = np.flatnonzero(~np.isin(ids, best.ids))
                vectors = _stacked([embedding.to_numpy() for _, _, embedding in rows])
                best = _merged(best, _rank(vector, vectors, ids, new, len(ranking)))

            session.each_batch(statement, parameters, EXACT_SETTINGS, take)
            return best

        return self._database.run(rank)


def _masking(mask: Bools | None) -> dict[str, Any]:
    """The parameter that tells a statement which passages are allowed: a bit for each id."""
    return {} if mask is None else {"mask": np.packbits(mask, bitorder="little").tobytes()}


def _stacked(vectors: Sequence[Floats]) -> Floats:
    return np.stack(vectors) if vectors else np.empty((0, 1), dtype=np.float32)


def _rank_each(vectors: Floats, answer: _Answer, k: int) -> list[Ranking]:
    return [
        _rank(vector, answer.vectors, answer.ids, np.array(asked.places, dtype=np.int64), k)
        for vector, asked in zip(vectors, answer.queries, strict=True)
    ]


def _rank(query: Floats, vectors: Floats, ids: Longs, places: Longs, k: int) -> Ranking:
    """The best ``k`` of the passages at some places, by the kernel."""
    scores = np.empty(len(places), dtype=np.float32)
    dense_scores(query, vectors, places, scores)
    return best_of(scores, ids[places], k)


def _merged(first: Ranking, second: Ranking) -> Ranking:
    """The best of two rankings that share no passage, as many as the first has."""
    scores = np.concatenate([first.scores, second.scores])
    return best_of(scores, np.concatenate([first.ids, second.ids]), len(first))
