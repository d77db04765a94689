"""Options of ``specrag ask`` that Speculative RAG alone takes."""

from __future__ import annotations

from typing import Annotated

import typer

from specrag.cli import common

SPECULATIVE_RAG = "speculative-rag"

FACTORS = ("draft", "self-contain", "self-reflect")
DEFAULT_DRAFTS, DEFAULT_K, DEFAULT_PASSAGES, DEFAULT_TOKENS = 5, 2, 10, 128
DEFAULT_MODEL = "smollm2-135m"

_PANEL = "Speculative RAG (--method speculative-rag)"

Verifier = Annotated[
    str | None,
    typer.Option(
        metavar="NAME|URL",
        help="Who scores the drafts of --drafter: a model, or http://HOST:PORT/v1#MODEL (default: the drafter).",
        rich_help_panel=_PANEL,
        show_default=False,
    ),
]
Drafts = Annotated[
    int | None,
    typer.Option(
        parser=common.integer,
        metavar="N",
        help=f"Drafts, each from -k passages (defaults {DEFAULT_DRAFTS} and {DEFAULT_K}); here also -m N.",
        rich_help_panel=_PANEL,
        show_default=False,
    ),
]
Passages = Annotated[
    int | None,
    typer.Option(
        parser=common.integer,
        metavar="N",
        help=f"How many to find for all drafts (default {DEFAULT_PASSAGES}).",
        rich_help_panel=_PANEL,
        show_default=False,
    ),
]
Strategy = Annotated[
    str | None,
    typer.Option(
        metavar="NAME",
        help="How they are dealt out: multi-perspective (default), balanced, random, same-cluster, "
        "anchored or anchored-whole.",
        rich_help_panel=_PANEL,
        show_default=False,
    ),
]
Evidence = Annotated[
    str | None,
    typer.Option(
        metavar="NAME",
        help="What the verifier reads with an answer: rationale (default), passages, both or all-passages.",
        rich_help_panel=_PANEL,
        show_default=False,
    ),
]
Without = Annotated[
    list[str] | None,
    typer.Option(
        metavar="FACTOR",
        help="Leave a factor out of the score: draft, self-contain or self-reflect; may be repeated.",
        rich_help_panel=_PANEL,
    ),
]
LengthNormalized = Annotated[
    bool,
    typer.Option(
        "--length-normalized",
        help="Score by the mean log-probability of a token, not by the product of all.",
        rich_help_panel=_PANEL,
    ),
]
Option = Annotated[
    list[str] | None,
    typer.Option(
        metavar="LETTER=TEXT",
        help="An option of a multiple choice, such as A=Lyon; may be repeated.",
        rich_help_panel=_PANEL,
    ),
]
Claim = Annotated[
    bool,
    typer.Option("--claim", help="What is asked is a claim to be checked.", rich_help_panel=_PANEL),
]
ShowDrafts = Annotated[
    bool,
    typer.Option(
        "--show-drafts", help="Show all drafts with their scores as a table.", rich_help_panel=_PANEL
    ),
]
