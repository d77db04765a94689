"""A store that is one collection of a database: opening, checking and loading, independent of the database's client."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import replace
from typing import Self

from specrag.errors import InputError
from specrag.retrieval.index.hnsw import HnswSettings
from specrag.retrieval.index.scoring import Floats
from specrag.retrieval.passage import Passage
from specrag.retrieval.progress import Progress
from specrag.retrieval.stores.base import Collection, Limits, Loading, StoreInfo, Words


class CollectionStore(ABC):
    """Base of such stores; the class methods are those of :class:`~specrag.retrieval.stores.base.StoreType`.

    Args:
        name: name of the collection.
        words: makes the errors.
    """

    def __init__(self, name: str, words: Words) -> None:
        self.place = words.place
        self._name = name
        self._words = words
        self._is_closed = False

    @classmethod
    def open(cls, address: str, limits: Limits) -> Self:
        store = cls._connect(address, limits)
        try:
            store._words.check_complete(store.info())
        except BaseException:
            store.close()
            raise
        return store

    @classmethod
    def check(cls, address: str, loading: Loading) -> None:
        store = cls._connect(address, loading.limits)
        try:
            store._is_taken(loading.replace)
        finally:
            store.close()

    @classmethod
    def load(cls, address: str, collection: Collection, loading: Loading) -> StoreInfo:
        cls.check(address, loading)
        store = cls._connect(address, loading.limits)
        try:
            if store._is_taken(loading.replace):
                store._drop()
            breadth = HnswSettings().ef_search if loading.approximate else None
            store._create(StoreInfo(0, collection.encoder, breadth=breadth, complete=False))
            for passages, vectors in collection.portions(loading.progress):
                store.add(passages, vectors)
            loading.progress(Progress("indexing", 0, 1))
            info = replace(store.info(), complete=True)
            store._record(info)
            loading.progress(Progress("indexing", 1, 1))
            return info
        finally:
            store.close()

    def _is_taken(self, replacing: bool) -> bool:
        if not self._exists():
            return False
        self.info()  # refuses a collection that specrag has not made
        if not replacing:
            raise InputError("store", self._name, "it exists already; replace it, or give another name")
        return True

    @classmethod
    @abstractmethod
    def _connect(cls, address: str, limits: Limits) -> Self:
        """Connect to the database; the collection need not be there."""

    @abstractmethod
    def info(self) -> StoreInfo: ...

    @abstractmethod
    def add(self, passages: Sequence[Passage], vectors: Floats) -> None: ...

    @abstractmethod
    def close(self) -> None:
        """Close all connections."""

    @abstractmethod
    def _exists(self) -> bool:
        """Whether there is a collection with the name."""

    @abstractmethod
    def _drop(self) -> None:
        """Delete the collection."""

    @abstractmethod
    def _create(self, info: StoreInfo) -> None:
        """Create an empty collection with this record."""

    @abstractmethod
    def _record(self, info: StoreInfo) -> None:
        """Write the collection's record."""
