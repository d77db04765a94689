"""Passages in Qdrant, searched over its REST interface in one request for all queries.

A collection consists of points: the passage's id, its vector (``Dot``, so that it is stored unchanged), and a payload
with its fields. What a search must know is kept in the collection's metadata, which needs Qdrant 1.16.
"""

from __future__ import annotations

import math
import os
import re
import warnings
from collections.abc import Callable, Sequence
from typing import Any, Self, TypeVar

import numpy as np
from qdrant_client import QdrantClient, models
from qdrant_client.http.exceptions import ResponseHandlingException, UnexpectedResponse

from specrag.errors import SpecragError
from specrag.retrieval.index.filters import Comparison, Condition, Filter, Leaf, Null, fold
from specrag.retrieval.index.hnsw import HnswSettings
from specrag.retrieval.index.scoring import Floats
from specrag.retrieval.manifest import KnowledgeBaseError
from specrag.retrieval.passage import Passage
from specrag.retrieval.stores.base import (
    Address,
    Fetched,
    Found,
    Limits,
    StoreInfo,
    Words,
    batches,
    from_payload,
    is_column,
    keep_trying,
    key_paths,
    to_payload,
)
from specrag.retrieval.stores.collection import CollectionStore

T = TypeVar("T")

KEY_VARIABLE = "SPECRAG_QDRANT_KEY"
"""Holds the API key if the address has none."""

_PORT = 6333
_RECORD = "specrag"  # in the collection's metadata
_BUSY = (429, 502, 503, 504)


class QdrantStore(CollectionStore):
    """A collection of Qdrant; a :class:`~specrag.retrieval.stores.base.Store`. Made by :meth:`open`.

    Args:
        client: a connected client; closed along with this object.
        name: name of the collection.
        words: makes the errors.
    """

    def __init__(self, client: QdrantClient, name: str, words: Words) -> None:
        super().__init__(name, words)
        self._client = client

    @classmethod
    def _connect(cls, address: str, limits: Limits) -> Self:
        found = Address.parse(address, "qdrant", _PORT)
        key = found.secret or os.environ.get(KEY_VARIABLE, "")
        words = Words(found.place("qdrant"), limits, (key,))
        found.reach(words)
        scheme = "https" if found.secure else "http"
        with warnings.catch_warnings():
            # The address decides whether a key goes over plain HTTP, for example between containers of one machine.
            warnings.filterwarnings("ignore", "Api key is used with an insecure connection")
            client = QdrantClient(
                url=f"{scheme}://{found.host}:{found.port}",
                api_key=key or None,
                timeout=math.ceil(limits.timeout),
                check_compatibility=False,  # the check would send a request and print warnings
                pool_size=limits.connections,
            )
        return cls(client, found.name, words)

    def _exists(self) -> bool:
        return bool(self._ask(lambda _: self._client.collection_exists(self._name)))

    def _drop(self) -> None:
        self._tell(lambda: self._client.delete_collection(self._name))

    def _record(self, info: StoreInfo) -> None:
        record = {_RECORD: info.to_json()}
        self._tell(lambda: self._client.update_collection(self._name, metadata=record))

    def _create(self, info: StoreInfo) -> None:
        # Without links (m=0) Qdrant builds no graph, which would take long and which exact search does not need.
        graph = models.HnswConfigDiff(m=HnswSettings().neighbors if info.breadth else 0)
        self._tell(
            lambda: self._client.create_collection(
                self._name,
                vectors_config=models.VectorParams(
                    size=info.encoder.dimension, distance=models.Distance.DOT, hnsw_config=graph
                ),
                metadata={_RECORD: info.to_json()},
            )
        )

    def close(self) -> None:
        """Close all connections."""
        self._is_closed = True
        self._client.close()

    # -- what there is ----------------------------------------------------------------------------------------

    def info(self) -> StoreInfo:
        found = self._ask(lambda _: self._client.get_collection(self._name))
        passages = self._ask(lambda _: self._client.count(self._name, exact=True)).count
        info = StoreInfo.from_json((found.config.metadata or {}).get(_RECORD), self.place, passages)
        vectors = found.config.params.vectors
        if not isinstance(vectors, models.VectorParams) or vectors.distance != models.Distance.DOT:
            raise KnowledgeBaseError(f"{self.place} was not made by specrag: name another one")
        if vectors.size != info.encoder.dimension:
            raise KnowledgeBaseError(
                f"{self.place} holds vectors of {vectors.size} dimensions and should hold {info.encoder.dimension}: "
                "load the knowledge base again"
            )
        return info

    def fetch(self, ids: Sequence[int]) -> list[Fetched]:
        wanted = list(ids)
        found = self._ask(
            lambda left: self._client.retrieve(self._name, wanted, with_vectors=True, timeout=math.ceil(left))
        )
        return [self._fetched(point) for point in found]

    def search(
        self, vectors: Floats, most: int, filter: Filter | None = None, breadth: int | None = None
    ) -> list[Found]:
        condition = None if filter is None else translate(filter)
        requests = [
            models.QueryRequest(
                query=vector,
                limit=most,
                filter=condition,
                with_vector=True,
                with_payload=True,
                params=models.SearchParams(exact=breadth is None, hnsw_ef=breadth),
            )
            for vector in vectors.tolist()
        ]
        answers = self._ask(
            lambda left: self._client.query_batch_points(self._name, requests, timeout=math.ceil(left))
        )
        # A point found by several queries is converted once.
        known: dict[Any, Fetched] = {}
        found = []
        for answer in answers:
            for point in answer.points:
                if point.id not in known:
                    known[point.id] = self._fetched(point)
            rest = min(point.score for point in answer.points) if len(answer.points) >= most else -math.inf
            found.append(Found([known[point.id] for point in answer.points], rest))
        return found

    def _fetched(self, point: models.ScoredPoint | models.Record) -> Fetched:
        if not isinstance(point.id, int) or not isinstance(point.vector, list):
            raise KnowledgeBaseError(f"{self.place} holds points that specrag has not made: name another one")
        return Fetched(
            from_payload(point.id, point.payload or {}, self.place), np.array(point.vector, dtype=np.float32)
        )

    # -- changes ----------------------------------------------------------------------------------------------

    def add(self, passages: Sequence[Passage], vectors: Floats) -> None:
        known = self.info()
        info = known.with_passages(passages, vectors)
        if info != known:  # before the passages, so that no search relies on too small a ``longest``
            self._record(info)
        for some, rows in batches(passages, vectors):
            points = models.Batch(
                ids=[passage.id for passage in some],
                vectors=rows.tolist(),
                payloads=[to_payload(passage) for passage in some],
            )
            self._ask(lambda _, points=points: self._client.upsert(self._name, points, wait=True))  # type: ignore[misc]

    def remove(self, ids: Sequence[int]) -> None:
        selector = models.PointIdsList(points=list(ids))
        self._ask(lambda _: self._client.delete(self._name, selector, wait=True))

    # -- errors -----------------------------------------------------------------------------------------------

    def _ask(self, request: Callable[[float], T]) -> T:
        """Send a request that may safely be repeated."""
        return self._told(lambda: keep_trying(self._words.limits, request, _is_transient))

    def _tell(self, request: Callable[[], T]) -> T:
        """Send a request once."""
        return self._told(request)

    def _told(self, request: Callable[[], T]) -> T:
        if self._is_closed:
            raise self._words.closed()
        try:
            return request()
        except ResponseHandlingException as error:
            if "timed out" in str(error).lower():
                raise self._words.too_late() from None
            raise self._words.unreachable(error) from None
        except UnexpectedResponse as error:
            raise self._described(error) from None
        except (RuntimeError, ValueError) as error:
            if isinstance(error, SpecragError):
                raise
            raise self._words.unusable(error) from None

    def _described(self, error: UnexpectedResponse) -> SpecragError:
        if error.status_code in (401, 403):
            return self._words.refused(f"status {error.status_code}")
        if error.status_code == 404:
            return self._words.missing()
        try:
            said = error.structured()["status"]["error"]
        except (KeyError, TypeError, ValueError):
            said = f"status {error.status_code}"
        return self._words.unusable(said)


def _is_transient(error: Exception) -> bool:
    if isinstance(error, UnexpectedResponse):
        return error.status_code in _BUSY
    return isinstance(error, ResponseHandlingException) and "timed out" not in str(error).lower()


# -- conditions ---------------------------------------------------------------------------------------------------

_PLAIN_KEY = re.compile(r"[\w-]+")
_EXACT = 2**53  # Qdrant compares numbers as floating-point numbers


def translate(filter: Filter) -> models.Filter | None:
    """Conditions that select at least what a filter selects; ``None`` to select all.

    Qdrant does not order text, and a field may hold something that we do not count as a value. What Qdrant cannot
    express is left to the reader of the candidates.
    """
    found = fold(filter, _leaf, _all_of, _any_of)
    if found is None or isinstance(found, models.Filter):
        return found
    return models.Filter(must=[found])


def _all_of(parts: list[models.Condition | None]) -> models.Condition | None:
    known = [part for part in parts if part is not None]
    return models.Filter(must=known) if known else None


def _any_of(parts: list[models.Condition | None]) -> models.Condition | None:
    known = [part for part in parts if part is not None]
    return models.Filter(should=known) if len(known) == len(parts) else None


def _leaf(leaf: Leaf) -> models.Condition | None:
    keys = _keys(leaf.field)
    if not keys:
        return None
    if isinstance(leaf, Null):
        is_empty = [models.IsEmptyCondition(is_empty=models.PayloadField(key=key)) for key in keys]
        return _any_of([models.Filter(must_not=[part]) for part in is_empty]) if leaf.negated else None
    agrees = [_agrees(key, leaf) for key in keys]
    if any(part is None for part in agrees):
        return None
    return models.Filter(must_not=agrees) if leaf.negated else _any_of(agrees)


def _keys(field: str) -> list[str]:
    """Where in a payload a field's values may be; empty if a path cannot express it."""
    if is_column(field):
        return [field]
    if not all(_PLAIN_KEY.fullmatch(part) for part in field.split(".")):
        return []
    quoted = [[f'"{part}"' if "." in part else part for part in path] for path in key_paths(field)]
    return [".".join(["metadata", *path]) for path in quoted]


def _agrees(key: str, condition: Condition) -> models.Condition | None:
    """A condition that one value satisfies all comparisons; ``None`` if Qdrant cannot express it."""
    comparisons = condition.comparisons
    values = [value for comparison in comparisons for value in comparison.values]
    numbers = [value for value in values if not isinstance(value, str)]
    if any(not -_EXACT < number < _EXACT for number in numbers):
        return None
    if [comparison.operator for comparison in comparisons] == ["="]:
        texts = [value for value in values if isinstance(value, str)]
        parts: list[models.Condition | None] = [_within(key, gte=number, lte=number) for number in numbers]
        if texts:
            parts.append(models.FieldCondition(key=key, match=models.MatchAny(any=texts)))
        return _any_of([*parts, *_booleans(key, condition)])
    if len(numbers) < len(values) or any(comparison.operator == "=" for comparison in comparisons):
        return None
    return _any_of([_within(key, **_limits(comparisons)), *_booleans(key, condition)])


def _limits(comparisons: Sequence[Comparison]) -> dict[str, float]:
    """The narrowest limits set by several comparisons."""
    names = {"<": "lt", "<=": "lte", ">": "gt", ">=": "gte"}
    found: dict[str, float] = {}
    for comparison in comparisons:
        name, value = names[comparison.operator], float(comparison.values[0])
        narrower = min if name.startswith("l") else max
        found[name] = narrower(found.get(name, value), value)
    return found


def _within(key: str, **limits: float) -> models.Condition:
    return models.FieldCondition(key=key, range=models.Range(**limits))


def _booleans(key: str, condition: Condition) -> list[models.Condition | None]:
    """Conditions for truth values, since we treat ``true`` as 1 and ``false`` as 0."""
    return [
        models.FieldCondition(key=key, match=models.MatchValue(value=value))
        for value in (True, False)
        if condition.agrees([value]) != condition.negated
    ]
