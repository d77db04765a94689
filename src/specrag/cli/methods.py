"""``specrag methods``: the ways to answer; ``specrag methods NAME``: everything that can be set about one."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from typing import Annotated, Any

import typer

from specrag.cli import common, completion, values


def methods(
    name: Annotated[
        str | None,
        typer.Argument(
            metavar="NAME", help="A method, to see its options.", autocompletion=completion.methods
        ),
    ] = None,
    as_json: common.Json = False,
) -> None:
    """List the methods, or the options of one with bounds, defaults and the papers' symbols.

    Example: specrag methods rapid
    """
    from specrag.methods import default_words, describe_method, describe_options, method_class, method_names

    if name is None:
        described = [describe_method(method_class(known)) for known in method_names()]
        if as_json:
            typer.echo(json.dumps(described))
            return
        _print_rows(("method", "needs", "what it is"), [_row(method) for method in described])
        typer.echo(
            "\nspecrag methods NAME lists the options of one: specrag ask -m NAME -o KEY=VALUE", err=True
        )
        return
    method = describe_method(method_class(name, "NAME"))
    groups = {name: method["options"], **{group: describe_options(of) for group, of in values.GROUPS}}
    if as_json:
        typer.echo(json.dumps({**method, "options": groups}, default=str))
        return
    typer.echo(f"{method['name']}: {method['summary']}\n")
    for group, options in groups.items():
        typer.echo(f"{group} options" if options else f"{group} has no options of its own")
        rows = [
            (key, default_words(one), one["values"], one["symbol"] or "", one["help"])
            for key, one in options.items()
        ]
        if rows:
            _print_rows(("option", "default", "values", "symbol", "meaning"), rows)
        typer.echo()


def _row(method: dict[str, Any]) -> tuple[str, ...]:
    return method["name"], ", ".join(method["needs"]), method["summary"]


def _print_rows(heads: tuple[str, ...], rows: Sequence[tuple[str, ...]]) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table(box=None, pad_edge=False, header_style="bold")
    for head in heads[:-1]:
        table.add_column(head, no_wrap=head in ("method", "option"))
    table.add_column(heads[-1], ratio=1)
    for row in rows:
        table.add_row(*row)
    Console(width=None if sys.stdout.isatty() else 160, highlight=False).print(table)
