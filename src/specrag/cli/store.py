"""Options of the commands that work with a store of passages."""

from __future__ import annotations

from typing import Annotated

import typer

from specrag.errors import InputError

_PANEL = "Stores"

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
Address = Annotated[
    str | None,
    typer.Option(
        "--store",
        metavar="ADDRESS",
        help="Load it into qdrant://HOST/NAME, milvus://HOST/NAME, postgresql://HOST/DB#TABLE, or shards:A,B.",
        rich_help_panel=_PANEL,
    ),
]


def table_address(url: str | None, table: str | None, store: str | None = None) -> str | None:
    """The address of the store that the options name; ``None`` if they name none.

    Raises:
        InputError: they name two stores, or a table that is not valid.
        SpecragError: the packages for PostgreSQL are missing.
    """
    if url is None and table is None:
        return store
    if store is not None:
        raise InputError("--store", "(not shown)", "give it or --pgvector and --table, not both")
    from specrag.extras import needed_by

    with needed_by("pgvector"):
        from specrag.retrieval.stores.pgvector import table_address as address

    return address(url, table)
