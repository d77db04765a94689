"""Passages in Milvus, searched over gRPC in one request for all queries.

A collection has each passage's id, its vector under a ``FLAT`` index (exact, inner product), and its fields. What a
search must know is kept in the collection's properties. A search returns at most 16,384 candidates, which is Milvus'
own limit.
"""

from __future__ import annotations

import json
import logging
import math
import os
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Self, TypeVar

import grpc
import numpy as np
from pymilvus import DataType, MilvusClient, MilvusException

from specrag.errors import InputError, SpecragError, StoreUnavailable
from specrag.retrieval.index.filters import Comparison, Condition, Filter, Leaf, Null, fold
from specrag.retrieval.index.scoring import Floats
from specrag.retrieval.manifest import KnowledgeBaseError
from specrag.retrieval.passage import Passage
from specrag.retrieval.stores.base import (
    Address,
    Fetched,
    Found,
    Limits,
    Loading,
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

TOKEN_VARIABLE = "SPECRAG_MILVUS_TOKEN"  # noqa: S105 - its name
"""Holds ``USER:PASSWORD`` or an API key if the address has none."""

MOST = 16_384
"""The most candidates of a search."""

_PORT = 19530
_RECORD = "specrag"  # in the collection's properties
_LONGEST = 65_535  # bytes of a text
_TEXTS = ("source", "title", "place", "text")
_FIELDS = ["id", "embedding", *_TEXTS, "metadata"]
_AT_ONCE = 1_000  # ids looked up in one request
_NOT_FOUND = (4, 100)
_NO_CONNECTION = 2
_MANNER = re.compile(r"auth|permission|privilege|password", re.IGNORECASE)


class MilvusStore(CollectionStore):
    """A collection of Milvus; a :class:`~specrag.retrieval.stores.base.Store`. Made by :meth:`open`.

    Args:
        client: a connected client; closed along with this object.
        name: name of the collection.
        words: makes the errors.
    """

    def __init__(self, client: MilvusClient, name: str, words: Words) -> None:
        super().__init__(name, words)
        self._client = client
        self._lists: frozenset[str] = frozenset()

    @classmethod
    def check(cls, address: str, loading: Loading) -> None:
        if loading.approximate:
            remedy = "a collection of Milvus is searched exactly here; leave it out"
            raise InputError("hnsw", loading.approximate, remedy)
        super().check(address, loading)

    @classmethod
    def _connect(cls, address: str, limits: Limits) -> Self:
        # The client logs every error with a traceback; our own error is enough.
        logging.getLogger("pymilvus").setLevel(logging.CRITICAL)
        found = Address.parse(address, "milvus", _PORT)
        token = f"{found.user}:{found.secret}" if found.user else found.secret
        token = token or os.environ.get(TOKEN_VARIABLE, "")
        words = Words(found.place("milvus"), limits, (token, token.partition(":")[2]))
        found.reach(words)
        scheme = "https" if found.secure else "http"
        try:
            client = MilvusClient(
                uri=f"{scheme}://{found.host}:{found.port}",
                token=token,
                db_name=found.database,
                timeout=limits.connect_timeout,
            )
        except (MilvusException, grpc.RpcError) as error:
            if getattr(error, "code", None) == _NO_CONNECTION:  # also the code for a wrong password
                found.reach(words)
                raise words.refused(
                    "somebody listens there, and takes no connection with these words"
                ) from None
            raise _described(error, words) from None
        return cls(client, found.name, words)

    def _exists(self) -> bool:
        return bool(self._ask(lambda left: self._client.has_collection(self._name, timeout=left)))

    def _drop(self) -> None:
        self._ask(lambda left: self._client.drop_collection(self._name, timeout=left))

    def _record(self, info: StoreInfo) -> None:
        record = {_RECORD: info.to_json()}
        self._ask(
            lambda left: self._client.alter_collection_properties(self._name, properties=record, timeout=left)
        )

    def _create(self, info: StoreInfo) -> None:
        schema = MilvusClient.create_schema(auto_id=False, enable_dynamic_field=False)
        schema.add_field("id", DataType.INT64, is_primary=True)
        schema.add_field("embedding", DataType.FLOAT_VECTOR, dim=info.encoder.dimension)
        for name in _TEXTS:
            schema.add_field(name, DataType.VARCHAR, max_length=_LONGEST)
        schema.add_field("metadata", DataType.JSON)
        index = MilvusClient.prepare_index_params()
        index.add_index(field_name="embedding", index_type="FLAT", metric_type="IP")
        self._ask(
            lambda left: self._client.create_collection(
                self._name,
                schema=schema,
                index_params=index,
                consistency_level="Strong",  # the next search finds what was written
                properties={_RECORD: info.to_json()},
                timeout=left,
            )
        )

    def close(self) -> None:
        """Close all connections."""
        if not self._is_closed:
            self._is_closed = True
            self._client.close()

    # -- what there is ----------------------------------------------------------------------------------------

    def info(self) -> StoreInfo:
        found = self._ask(lambda left: self._client.describe_collection(self._name, timeout=left))
        counted = self._ask(
            lambda left: self._client.query(self._name, filter="", output_fields=["count(*)"], timeout=left)
        )
        record = dict(found.get("properties") or {}).get(_RECORD)
        info = StoreInfo.from_json(record, self.place, int(counted[0]["count(*)"]))
        sizes = [field["params"].get("dim") for field in found["fields"] if field["name"] == "embedding"]
        if sizes != [info.encoder.dimension]:
            raise KnowledgeBaseError(
                f"{self.place} holds vectors of {sizes} dimensions and should hold {info.encoder.dimension}: "
                "load the knowledge base again"
            )
        self._lists = frozenset(info.lists)
        return info

    def fetch(self, ids: Sequence[int]) -> list[Fetched]:
        found: list[Fetched] = []
        for first in range(0, len(ids), _AT_ONCE):
            some = list(ids[first : first + _AT_ONCE])
            rows = self._ask(
                lambda left, some=some: self._client.get(  # type: ignore[misc]
                    self._name, ids=some, output_fields=_FIELDS, timeout=left
                )
            )
            found += map(self._fetched, rows)
        return found

    def search(
        self, vectors: Floats, most: int, filter: Filter | None = None, breadth: int | None = None
    ) -> list[Found]:
        if breadth is not None:
            raise InputError(
                "breadth", breadth, "a collection of Milvus is searched exactly here; leave it out"
            )
        limit = min(most, MOST)
        answers = self._ask(
            lambda left: self._client.search(
                self._name,
                data=vectors,
                limit=limit,
                filter="" if filter is None else translate(filter, self._lists),
                output_fields=_FIELDS,
                search_params={"metric_type": "IP"},
                timeout=left,
            )
        )
        known: dict[int, Fetched] = {}
        found = []
        for hits in answers:
            for hit in hits:
                if hit["id"] not in known:
                    known[hit["id"]] = self._fetched(hit["entity"])
            rest = min(hit["distance"] for hit in hits) if len(hits) >= limit else -math.inf
            if limit < most and rest > -math.inf:
                raise StoreUnavailable(
                    f"{self.place}: more than {MOST:,} passages have to be looked at, and Milvus gives no more: "
                    "ask for fewer, or for other conditions"
                )
            found.append(Found([known[hit["id"]] for hit in hits], rest))
        return found

    def _fetched(self, row: Mapping[str, Any]) -> Fetched:
        return Fetched(from_payload(row["id"], row, self.place), np.array(row["embedding"], dtype=np.float32))

    # -- changes ----------------------------------------------------------------------------------------------

    def add(self, passages: Sequence[Passage], vectors: Floats) -> None:
        for passage in passages:
            self._check(passage)
        known = self.info()
        info = known.with_passages(passages, vectors)
        if info != known:  # before the passages, so that no search relies on too small a ``longest``
            self._record(info)
            self._lists = frozenset(info.lists)
        for some, rows in batches(passages, vectors):
            data = [
                {"id": passage.id, "embedding": row, **to_payload(passage)}
                for passage, row in zip(some, rows, strict=True)
            ]
            self._ask(lambda left, data=data: self._client.upsert(self._name, data, timeout=left))  # type: ignore[misc]

    def _check(self, passage: Passage) -> None:
        for name in _TEXTS:
            length = len(str(getattr(passage, name)).encode())
            if length > _LONGEST:
                remedy = f"Milvus keeps texts of at most {_LONGEST:,} bytes; index with shorter passages"
                raise InputError(f"passage {passage.id}: {name}", f"{length:,} bytes", remedy)

    def remove(self, ids: Sequence[int]) -> None:
        for first in range(0, len(ids), _AT_ONCE):
            some = list(ids[first : first + _AT_ONCE])
            self._ask(lambda left, some=some: self._client.delete(self._name, ids=some, timeout=left))  # type: ignore[misc]

    # -- errors -----------------------------------------------------------------------------------------------

    def _ask(self, request: Callable[[float], T]) -> T:
        """Send a request; all requests here may safely be repeated."""
        if self._is_closed:
            raise self._words.closed()
        try:
            return keep_trying(self._words.limits, request, _is_transient)
        except (MilvusException, grpc.RpcError) as error:
            raise _described(error, self._words) from None
        except (RuntimeError, ValueError, TypeError) as error:
            if isinstance(error, SpecragError):
                raise
            raise self._words.unusable(error) from None


def _is_transient(error: Exception) -> bool:
    if isinstance(error, grpc.RpcError):
        return bool(error.code() == grpc.StatusCode.UNAVAILABLE)
    text = str(error)
    return isinstance(error, MilvusException) and ("unavailable" in text.lower() or "not ready" in text)


def _described(error: Any, words: Words) -> SpecragError:
    """An error of the client, or of gRPC underneath, as one of ours."""
    if isinstance(error, grpc.RpcError):
        text, code = f"{error.details()} ({error.code().name.replace('_', ' ').lower()})", None
    else:
        text, code = str(error.message), error.code
    if code in _NOT_FOUND or "collection not found" in text or "can't find collection" in text:
        return words.missing()
    if _MANNER.search(text):
        return words.refused(text)
    if "deadline" in text.lower() or "timeout" in text.lower():
        return words.too_late()
    if code == _NO_CONNECTION or "unavailable" in text.lower() or "closed channel" in text.lower():
        return words.unreachable(text)
    return words.unusable(text)


# -- conditions ---------------------------------------------------------------------------------------------------

_PLAIN_KEY = re.compile(r"[\w-]+")
_UNSAFE = re.compile(r'["\'\\]')
_EXACT = 2**53  # Milvus compares numbers of JSON as floating-point numbers


def translate(filter: Filter, lists: frozenset[str]) -> str:
    """An expression that selects at least what a filter selects; empty to select all.

    Older servers take no parameters, so a text that could end its quotes never goes into an expression. Conditions with
    such texts, and conditions that Milvus cannot express, are left to the reader of the candidates.

    Args:
        lists: fields that hold a list in some passage.
    """
    return (
        fold(
            filter,
            lambda leaf: _leaf(leaf, lists),
            lambda parts: _joined([part for part in parts if part is not None], " and "),
            lambda parts: (
                None if None in parts else _joined([part for part in parts if part is not None], " or ")
            ),
        )
        or ""
    )


def _joined(parts: Sequence[str], word: str) -> str | None:
    return f"({word.join(parts)})" if parts else None


def _leaf(leaf: Leaf, lists: frozenset[str]) -> str | None:
    if isinstance(leaf, Null):
        return None
    terms = []
    for key in _keys(leaf.field):
        agrees = _agrees(key, leaf, leaf.field in lists)
        if agrees is None:
            return None
        terms.append(agrees)
    agreed = _joined(terms, " or ")
    return f"(not {agreed})" if agreed and leaf.negated else agreed


def _keys(field: str) -> list[str]:
    """Where a field's values may be; empty if that cannot be expressed safely."""
    if is_column(field):
        return [field]
    if not all(_PLAIN_KEY.fullmatch(part) for part in field.split(".")):
        return []
    return ["metadata" + "".join(f'["{part}"]' for part in path) for path in key_paths(field)]


def _agrees(key: str, condition: Condition, is_list: bool) -> str | None:
    """A condition that one value satisfies all comparisons; ``None`` if Milvus cannot express it."""
    comparisons = condition.comparisons
    values = [value for comparison in comparisons for value in comparison.values]
    if not all(_is_sayable(value) for value in values):
        return None
    inside = key.startswith("metadata[")
    if [comparison.operator for comparison in comparisons] == ["="]:
        said = [json.dumps(value, ensure_ascii=False) for value in values if inside or isinstance(value, str)]
        terms = [f"{key} == {value}" for value in said]
        terms += [f"json_contains({key}, {value})" for value in said if is_list]
    elif is_list or any(comparison.operator == "=" for comparison in comparisons):
        return None
    else:
        terms = [_joined([_limit(key, comparison) for comparison in comparisons], " and ") or ""]
    if inside:  # we treat true as 1 and false as 0
        both = [
            word
            for word, value in (("true", True), ("false", False))
            if condition.agrees([value]) != condition.negated
        ]
        terms += [f"{key} == {word}" for word in both]
        terms += [f"json_contains({key}, {word})" for word in both if is_list]
    return _joined(terms, " or ") or "(id < 0)"


def _limit(key: str, comparison: Comparison) -> str:
    value = comparison.values[0]
    if not key.startswith("metadata[") and not isinstance(value, str):
        return "(id < 0)"  # a text never matches a number
    return f"{key} {comparison.operator} {json.dumps(value, ensure_ascii=False)}"


def _is_sayable(value: str | int | float) -> bool:
    if isinstance(value, str):
        return value.isprintable() and not _UNSAFE.search(value)
    return -_EXACT < value < _EXACT
