"""Options of the commands that draw tokens."""

from __future__ import annotations

from typing import Annotated

import typer

from specrag.cli import common

PANEL = "Sampling"

Temperature = Annotated[
    float,
    typer.Option(parser=common.number, metavar="X", help="0: the likeliest token.", rich_help_panel=PANEL),
]
TopK = Annotated[
    int,
    typer.Option(
        parser=common.integer, metavar="N", help="Draw among N tokens; 0: all.", rich_help_panel=PANEL
    ),
]
TopP = Annotated[
    float,
    typer.Option(
        parser=common.number,
        metavar="X",
        help="Draw among the likeliest tokens that hold this probability.",
        rich_help_panel=PANEL,
    ),
]
Seed = Annotated[
    int,
    typer.Option(
        parser=common.integer, metavar="N", help="The same seed gives the same text.", rich_help_panel=PANEL
    ),
]
