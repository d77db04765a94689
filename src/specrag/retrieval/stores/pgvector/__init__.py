"""A knowledge base in PostgreSQL with the pgvector extension."""

from typing import TYPE_CHECKING

from specrag.lazy import lazy_names

if TYPE_CHECKING:
    from specrag.retrieval.stores.pgvector.store import table_address
else:
    __getattr__ = lazy_names(__name__)

__all__ = [
    "table_address",
]
