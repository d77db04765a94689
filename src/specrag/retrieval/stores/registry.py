"""Stores by address: our own, and those that other packages provide in the entry-point group ``specrag.stores``.

An address is a URL whose scheme names the kind of store. ``shards:ADDRESS,ADDRESS`` combines several stores into one;
with ``partial-shards:...``, some of them may fail to answer. A shard may also be the folder of a knowledge base.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import ExitStack, nullcontext
from dataclasses import replace
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

from specrag.errors import InputError, StoreUnavailable
from specrag.extras import brought, load_brought, needed_by
from specrag.retrieval.stores.base import Collection, Limits, Loading, StoreType

if TYPE_CHECKING:
    from specrag.retrieval.encoder.encoder import Encoder
    from specrag.retrieval.encoder.loaded import Encoders
    from specrag.retrieval.index.filters import Where
    from specrag.retrieval.knowledge_base import KnowledgeBase, SingleIndex
    from specrag.retrieval.stores.retriever import StoreRetriever
    from specrag.retrieval.stores.sharded import MergedBases, ShardedRetriever

    Opened: TypeAlias = StoreRetriever | ShardedRetriever | MergedBases

GROUP = "specrag.stores"

INDEXES = ("flat", "hnsw", "bm25", "hybrid")
"""Stores offer exact and approximate search (the first two); the others exist only for folders."""

SHARDS, PARTIAL = "shards:", "partial-shards:"

#: The only place that names our own stores; each is imported on first use.
_OWN: Mapping[str, str] = {
    "postgresql": "specrag.retrieval.stores.pgvector.store:PgVectorStore",
    "postgres": "specrag.retrieval.stores.pgvector.store:PgVectorStore",
    "qdrant": "specrag.retrieval.stores.qdrant:QdrantStore",
    "milvus": "specrag.retrieval.stores.milvus:MilvusStore",
}


def schemes() -> tuple[str, ...]:
    """The schemes that an address may begin with, our own first."""
    return (*_OWN, *sorted(brought(GROUP).keys() - _OWN))


def is_address(text: str) -> bool:
    """Whether a text is the address of a store, and not a folder."""
    return "://" in text or text.startswith((SHARDS, PARTIAL))


def store_type(address: str) -> StoreType:
    """The kind of store that an address names.

    Raises:
        InputError: there is none.
        SpecragError: its packages are missing, or another package provides it but cannot be imported.
    """
    scheme = address.partition("://")[0].partition("+")[0]
    if scheme in _OWN:
        module, _, attribute = _OWN[scheme].partition(":")
        with needed_by(scheme):
            made: StoreType = getattr(import_module(module), attribute)
        return made
    entry = brought(GROUP).get(scheme)
    if entry is None:
        known = scheme[:40] if "://" in address else "(not shown)"  # it may be a password
        raise InputError("store", known, f"an address begins with {', '.join(schemes())}, and ://")
    found: StoreType = load_brought(entry, "store")
    return found


def shard_addresses(address: str) -> tuple[str, ...]:
    """The addresses after ``shards:``; any other address alone.

    Raises:
        InputError: there are none.
    """
    if not address.startswith((SHARDS, PARTIAL)):
        return (address,)
    found = tuple(part.strip() for part in address.partition(":")[2].split(",") if part.strip())
    if not found:
        raise InputError("shards", "", "give shards:ADDRESS,ADDRESS; write a comma of a password as %2C")
    return found


def open_store(
    address: str,
    *,
    index: str | None = None,
    where: Where | None = None,
    breadth: int | None = None,
    encoder: Encoder | Encoders | None = None,
    limits: Limits | None = None,
) -> Opened:
    """Open a store, or several as one, for searching; the caller closes it.

    Args:
        address: the store's address.
        index: ``flat`` (exact, the default) or ``hnsw``; for folders also ``bm25`` and ``hybrid``.
        where: find only passages that satisfy these conditions.
        breadth: candidates of an approximate search.
        encoder: an encoder to use instead of loading the one that the store names, or a collection to get that one
            from.
        limits: timeouts.

    Raises:
        InputError: a value cannot be used, or no passage satisfies the conditions.
        StoreUnavailable: a database cannot be reached.
        KnowledgeBaseError: a collection does not exist, was not made by specrag, lacks the index, or does not fit the
            encoder.
    """
    from specrag.retrieval.stores.retriever import StoreRetriever
    from specrag.retrieval.stores.sharded import ShardedRetriever

    limits = limits or Limits()
    known = INDEXES if address.startswith((SHARDS, PARTIAL)) else INDEXES[:2]
    if index is not None and index not in known:
        raise InputError("index", index, f"a store has {' and '.join(INDEXES[:2])}")

    def open_one(one: str) -> StoreRetriever:
        store = store_type(one).open(one, limits)
        try:
            return StoreRetriever(store, index=index or "flat", breadth=breadth, encoder=encoder)
        except BaseException:
            store.close()
            raise

    with ExitStack() as opened:
        found: StoreRetriever | ShardedRetriever
        if not address.startswith((SHARDS, PARTIAL)):
            found = opened.enter_context(open_one(address))
        elif index in ("bm25", "hybrid"):
            return _merged(shard_addresses(address), index, where, encoder)
        else:
            partial = address.startswith(PARTIAL)
            shards: dict[str, StoreRetriever | SingleIndex] = {}
            absent: list[str] = []
            refusal: StoreUnavailable | None = None
            for one in shard_addresses(address):
                try:
                    shards[one] = opened.enter_context(
                        open_one(one) if is_address(one) else _single(one, opened, index or "flat", encoder)
                    )
                except StoreUnavailable as error:
                    absent.append(shown(one))
                    refusal = error
            # The numbers of passages in folders depend on all that stand in front of them.
            if refusal is not None and not (partial and shards and all(map(is_address, shards))):
                raise refusal
            found = ShardedRetriever(
                list(shards.values()), [shown(one) for one in shards], partial=partial, absent=absent
            )
        if where is not None:
            found = found.narrowed(where)
        opened.pop_all()
        return found


def _single(folder: str, opened: ExitStack, index: str, encoder: Encoder | Encoders | None) -> Any:
    from specrag.retrieval.knowledge_base import KnowledgeBase, SingleIndex

    base = opened.enter_context(KnowledgeBase.open(Path(folder).expanduser(), encoder=encoder))
    return nullcontext(SingleIndex(base, index))


def _merged(
    addresses: Sequence[str], index: str, where: Where | None, encoder: Encoder | Encoders | None
) -> MergedBases:
    from specrag.retrieval.knowledge_base import KnowledgeBase
    from specrag.retrieval.stores.sharded import MergedBases

    if any(is_address(one) for one in addresses):
        raise InputError("index", index, "a store has flat and hnsw; words are searched in folders alone")
    with ExitStack() as opened:
        bases = [
            opened.enter_context(KnowledgeBase.open(Path(one).expanduser(), encoder=encoder))
            for one in addresses
        ]
        found = MergedBases(bases, index, where)
        opened.pop_all()
        return found


def shown(address: str) -> str:
    """An address without credentials."""
    if address.startswith((SHARDS, PARTIAL)):
        kind, _, _ = address.partition(":")
        return f"{kind}:{','.join(map(shown, shard_addresses(address)))}"
    scheme, separator, rest = address.partition("://")
    return f"{scheme}{separator}{rest.rpartition('@')[2]}".partition("?")[0] if separator else address


def check_load(address: str, loading: Loading) -> None:
    """Check whether :func:`load` can succeed, before a long build.

    Raises:
        SpecragError: it would fail.
    """
    for one in shard_addresses(address):
        if not is_address(one):
            raise InputError(
                "store", one, "documents are indexed into folders by --kb; give the address of a store"
            )
        store_type(one).check(one, loading)


def load(address: str, knowledge_base: KnowledgeBase, loading: Loading | None = None) -> int:
    """Load a knowledge base into a store; if there are several, each gets a part of the passages.

    Args:
        address: the store's address, or ``shards:...``.
        knowledge_base: an open knowledge base.
        loading: how to load it.

    Returns:
        How many passages there are now.

    Raises:
        SpecragError: a store already exists, cannot be reached, or goes away.
    """
    loading = loading or Loading()
    check_load(address, loading)
    addresses = shard_addresses(address)
    collection = Collection.of(knowledge_base)
    total = 0
    for number, one in enumerate(addresses):
        part = collection.part(number, len(addresses))
        total += store_type(one).load(one, part, replace(loading)).passages
    return total
