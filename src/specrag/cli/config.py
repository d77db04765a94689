"""``specrag config``: which defaults hold, and where they come from."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator, Mapping
from typing import Any

import typer

from specrag.cli import common, configuration
from specrag.cli.printable import printable

_SECRET = re.compile(r"(?i)(api.?keys?|^keys?|secret|password|token)$")
_PASSWORD = re.compile(r"(://[^:/@\s]*):[^@/\s]*@")
_PREFIX = "SPECRAG_"


def config(as_json: common.Json = False) -> None:
    """Show the defaults that hold and where each stands: in a file, or in the environment.

    The file is specrag.toml in the working folder, else what SPECRAG_CONFIG names, else config.toml in the user's
    configuration folder. It has a table for each command and one named default for all; keys are spelled like flags.

    Example: specrag config
    """
    file = configuration.find_file()  # its keys have been checked before any command runs
    tables = {} if file is None else configuration.read_file(file)
    rows = [(f"{file} [{table}]", key, _shown(key, value)) for table, key, value in _flat(tables)]
    rows += [
        ("environment", name, _shown(name, value))
        for name, value in sorted(os.environ.items())
        if name.startswith(_PREFIX)
    ]
    if as_json:
        described = [{"from": place, "key": key, "value": value} for place, key, value in rows]
        typer.echo(json.dumps({"file": None if file is None else str(file), "values": described}))
        return
    typer.echo(f"file: {'none' if file is None else file}", err=True)
    width = max((len(f"{place} {key}") for place, key, _ in rows), default=0)
    for place, key, value in rows:
        typer.echo(f"{f'{place} {key}':<{width}} = {printable(value)}")


def _flat(tables: Mapping[str, Any], above: str = "") -> Iterator[tuple[str, str, Any]]:
    """Table, key and value of each line; tables of commands within commands have dotted names."""
    for name, table in tables.items():
        place = f"{above}{name}"
        for key, value in table.items():
            if isinstance(value, dict) and key != "option":
                yield from _flat({key: value}, f"{place}.")
            else:
                yield place, key, value


def _shown(key: str, value: Any) -> str:
    if _SECRET.search(key):
        return "(not shown)"
    text = value if isinstance(value, str) else json.dumps(value, default=str)
    return _PASSWORD.sub(r"\1:***@", text)
