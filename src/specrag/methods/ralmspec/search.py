"""One request's access to passages: encode a query, guess from the cache, search the knowledge base."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from specrag.errors import InputError, SpecragError
from specrag.methods.retriever import PassageRetriever, is_remote
from specrag.methods.timeline import Clocked
from specrag.retrieval import Passage
from specrag.retrieval.index import CAPACITY, Query, SpeculativeCache


@dataclass(frozen=True, slots=True, eq=False)
class Guess:
    """The cache's answer to a query.

    Attributes:
        text: the text that was searched with.
        query: the same, encoded; verified as it is.
        passage: the cache's best, ``None`` if it holds none that could be found.
        times: of encoding and look-up.
        failure: why the knowledge base could not rank the cache; the passage is then the newest one.
    """

    text: str
    query: Query
    passage: Passage | None
    times: tuple[Clocked, ...]
    failure: SpecragError | None = None

    @property
    def seconds(self) -> float:
        """Seconds of encoding and look-up."""
        return sum(time.end - time.start for time in self.times)


@dataclass(frozen=True, slots=True)
class Found:
    """The knowledge base's answer to a query.

    Attributes:
        passage: its best, ``None`` if it finds nothing.
        score: of this passage.
    """

    passage: Passage | None = None
    score: float | None = None


@dataclass(frozen=True, slots=True, eq=False)
class Searched:
    """A search of the knowledge base.

    Attributes:
        found: one for each query; empty if the search failed.
        times: of encoding, if the search did it, and of searching.
        failure: why there is no answer.
    """

    found: tuple[Found, ...]
    times: tuple[Clocked, ...]
    failure: SpecragError | None = None

    @property
    def seconds(self) -> float:
        """Seconds of the search alone."""
        return self.times[-1].end - self.times[-1].start


class PassageFinder:
    """Finds passages for one request. Its methods run in search threads, one after the other.

    Attributes:
        remote: whether :meth:`find` and :meth:`search` may wait for another machine; :meth:`guess` does not.

    Args:
        retriever: the knowledge base.
        clock: seconds.
        prefetch: passages that a search brings into the cache for each query.
        capacity: maximum number of passages in the cache, which are kept as text too.
    """

    def __init__(
        self,
        retriever: PassageRetriever,
        clock: Callable[[], float],
        prefetch: int = 1,
        capacity: int = CAPACITY,
    ) -> None:
        self.remote = is_remote(retriever)
        self._retriever = retriever
        self._clock = clock
        self._prefetch = prefetch
        self._cache = SpeculativeCache(retriever, capacity)
        self._passages: dict[int, Passage] = {}  # exactly the cache's, in its order

    def guess(self, text: str) -> Guess:
        """Encode a query and look it up in the cache."""
        began = self._clock()
        try:
            (query,) = self._retriever.encode([text])
            encoded = self._clock()
            best = self._cache.best(query)
        except InputError:  # a value is wrong, not the store
            raise
        except SpecragError as error:
            newest = next(iter(self._passages.values()), None)
            return Guess(text, Query(text), newest, (Clocked("look-up", began, self._clock()),), error)
        passage = None if best is None else self._passages[best]
        times = (Clocked("encode", began, encoded), Clocked("look-up", encoded, self._clock()))
        return Guess(text, query, passage, times)

    def find(self, text: str) -> Searched:
        """Encode one query and search with it."""
        began = self._clock()
        (query,) = self._retriever.encode([text])
        encoded = Clocked("encode", began, self._clock())
        searched = self.search([query])
        return Searched(searched.found, (encoded, *searched.times), searched.failure)

    def search(self, queries: Sequence[Query]) -> Searched:
        """Search with a batch of queries and put what is found into the cache."""
        began = self._clock()
        try:
            rankings = self._retriever.search(queries, self._prefetch)
            ids = [[int(id) for id in ranking.ids] for ranking in rankings]
            passages = self._read([id for some in ids for id in some])
        except InputError:  # a value is wrong, not the store
            raise
        except SpecragError as error:
            return Searched((), (Clocked("search", began, self._clock()),), error)
        found = [
            Found(passages[some[0]], float(ranking.scores[0])) if some else Found()
            for some, ranking in zip(ids, rankings, strict=True)
        ]
        for some in ids:
            self._cache.add(some)
        self._passages = {id: passages[id] for id in self._cache.ids}
        return Searched(tuple(found), (Clocked("search", began, self._clock()),))

    def _read(self, ids: Sequence[int]) -> dict[int, Passage]:
        """The text of these passages and of the cache's, so that a guess needs nothing else from the knowledge base."""
        missing = [id for id in dict.fromkeys(ids) if id not in self._passages]
        new = self._retriever.passages(missing) if missing else []
        return self._passages | {passage.id: passage for passage in new}
