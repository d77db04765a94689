"""Options of the commands that work with a table of PostgreSQL, and the way to it."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Annotated

import typer

from specrag.extras import needed_by

if TYPE_CHECKING:
    from specrag.retrieval.index.filters import Where
    from specrag.retrieval.stores.pgvector.store import PgVectorStore

_PANEL = "PostgreSQL"

Url = Annotated[
    str | None,
    typer.Option(
        "--pgvector",
        metavar="URL",
        help="A database with pgvector, postgresql://USER@HOST/NAME; by default $SPECRAG_PGVECTOR_URL.",
        rich_help_panel=_PANEL,
    ),
]
Table = Annotated[
    str | None,
    typer.Option(metavar="NAME", help="The table there; by default passages.", rich_help_panel=_PANEL),
]


@contextmanager
def needing_psycopg() -> Iterator[None]:
    """Say what to install where the packages for PostgreSQL are missing.

    Raises:
        SpecragError: they are.
    """
    # The pool tells of each attempt that fails; the error at the end says it once.
    logging.getLogger("psycopg").addHandler(logging.NullHandler())
    with needed_by("pgvector"):
        yield


def open_store(
    url: str | None,
    table: str | None,
    index: str = "flat",
    *,
    where: Where | None = None,
    ef_search: int | None = None,
) -> PgVectorStore:
    """A table, open for searching; the caller closes it.

    A :class:`~specrag.methods.retriever.PassageRetriever`.

    Args:
        url, table: as given on the command line.
        index: ``flat`` or ``hnsw``.
        where: only passages that satisfy these conditions are found.
        ef_search: candidates of a walk through the HNSW index; by default as it was built.

    Raises:
        SpecragError: psycopg is not installed, or what
            :meth:`PgVectorStore.open <specrag.retrieval.stores.pgvector.store.PgVectorStore.open>` raises.
    """
    with needing_psycopg():
        from specrag.retrieval.stores.pgvector.store import PgVectorStore
        from specrag.retrieval.stores.pgvector.table import DEFAULT_TABLE

    table = DEFAULT_TABLE if table is None else table
    return PgVectorStore.open(url, table, index=index, where=where, ef_search=ef_search)
