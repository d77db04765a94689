"""Stores by their addresses: ours, and those that other packages bring by the entry-point group ``specrag.stores``.

An address is a URL, whose scheme names the kind of store; several are one: ``shards:ADDRESS,ADDRESS``, or
``partial-shards:...``, of which some may fail to answer. A shard may also be the folder of a knowledge base.
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
"""Exact and approximate search of stores; the others are of folders alone."""

SHARDS, PARTIAL = "shards:", "partial-shards:"

#: The only place that names our own stores; each is imported when it is asked for.
_OWN: Mapping[str, str] = {
    "postgresql": "specrag.retrieval.stores.pgvector.store:PgVectorStore",
    "postgres": "specrag.retrieval.stores.pgvector.store:PgVectorStore",
    "qdrant": "specrag.retrieval.stores.qdrant:QdrantStore",
    "milvus": "specrag.retrieval.stores.milvus:MilvusStore",
}


def schemes() -> tuple[str, ...]:
    """What an address may begin with, ours first."""
    return (*_OWN, *sorted(brought(GROUP).keys() - _OWN))


def is_address(text: str) -> bool:
    """Whether a text is the address of a store, and not a folder."""
    return "://" in text or text.startswith((SHARDS, PARTIAL))


def store_type(address: str) -> StoreType:
    """The kind of store that an address names.

    Raises:
        InputError: there is none.
        SpecragError: its packages are missing, or another package brings it, and it cannot be imported.
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
    """The addresses behind ``shards:``; of any other address itself.

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
        address: of it.
        index: ``flat`` (exact, the default) or ``hnsw``; of folders also ``bm25`` and ``hybrid``.
        where: only passages that satisfy these conditions are found.
        breadth: candidates of an approximate search.
        encoder: used in place of loading the one that the store names; or where that one is found.
        limits: time-outs.

    Raises:
        InputError: a value cannot be used, or no passage satisfies the conditions.
        StoreUnavailable: a database cannot be reached.
        KnowledgeBaseError: a collection is not there, is none of specrag's, lacks the index, or does not fit the
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
    """Check before a long build whether :func:`load` can succeed.

    Raises:
        SpecragError: it would not.
    """
    for one in shard_addresses(address):
        if not is_address(one):
            raise InputError(
                "store", one, "documents are indexed into folders by --kb; give the address of a store"
            )
        store_type(one).check(one, loading)


def load(address: str, knowledge_base: KnowledgeBase, loading: Loading | None = None) -> int:
    """Load a knowledge base into a store; into several, each gets a part of the passages.

    Args:
        address: of the store, or ``shards:...``.
        knowledge_base: open.
        loading: how.

    Returns:
        How many passages there are now.

    Raises:
        SpecragError: a store is there already, cannot be reached, or goes away.
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
