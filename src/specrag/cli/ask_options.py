"""Options of ``specrag ask`` about finding passages."""

from __future__ import annotations

from typing import Annotated

import typer

from specrag.cli import common

_PANEL = "Retrieval"

K = Annotated[
    int | None,
    typer.Option(
        "-k",
        parser=common.integer,
        metavar="N",
        help="How many passages; by default 5.",
        rich_help_panel=_PANEL,
    ),
]
Index = Annotated[
    str | None,
    typer.Option(
        metavar="NAME",
        help="flat, hnsw, bm25 or hybrid (default); of a table flat (default) or hnsw.",
        rich_help_panel=_PANEL,
        show_default=False,
    ),
]
Where = Annotated[
    list[str] | None,
    typer.Option(
        metavar="CONDITION",
        help="Such as year>=2000 or title=A,B; may be repeated.",
        rich_help_panel=_PANEL,
    ),
]
Rerank = Annotated[
    str | None,
    typer.Option(
        metavar="NAME", help="Order the passages anew by this cross-encoder.", rich_help_panel=_PANEL
    ),
]
MinScore = Annotated[
    float | None,
    typer.Option(
        parser=common.number,
        metavar="X",
        help="Do not answer where no passage has this cosine similarity (default 0.4).",
        rich_help_panel=_PANEL,
        show_default=False,
    ),
]
NoAbstain = Annotated[
    bool, typer.Option("--no-abstain", help="Answer whatever is found.", rich_help_panel=_PANEL)
]
NoRewrite = Annotated[
    bool,
    typer.Option("--no-rewrite", help="Search for follow-up questions as they are.", rich_help_panel=_PANEL),
]
