"""Writes docs/reference/options.md, the options of every method, from what the methods' classes say of themselves."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from specrag.cli.values import GROUPS
from specrag.methods.describe import default_words, describe_method, describe_options
from specrag.methods.registry import method_class, own_names

PAGE = Path(__file__).resolve().parents[1] / "docs" / "reference" / "options.md"

_HEAD = """\
<!-- Written by scripts/method_options.py: change the descriptions in the methods' classes, then run it again. -->

# Options of the methods

Every option of every method, with its default, the values that it takes and the paper's symbol for it. Give one as
`-o KEY=VALUE` on the command line, as a keyword in Python (`RAPID(eta=5)`), and in `specrag.options` of a request to
the server. `specrag methods NAME` prints the same for one method, also of another package.
"""

_BESIDE = """\
## With every method

On the command line `-o` takes these beside the method's own. In Python those of the search and the generation are
arguments of the call, and those of the model are arguments of `load`.
"""


def page() -> str:
    """The whole page."""
    return "\n".join(_parts())


def _parts() -> Iterator[str]:
    yield _HEAD
    for name in own_names():
        described = describe_method(method_class(name))
        yield f"## {name}\n\n{described['summary']}.\n"
        yield _table(described["options"]) if described["options"] else "It has no options.\n"
    yield _BESIDE
    for name, options in GROUPS:
        yield f"### {name.capitalize()}\n"
        yield _table(describe_options(options))


def _table(options: Mapping[str, Mapping[str, Any]]) -> str:
    rows = [("option", "symbol", "default", "values", "meaning"), ("---",) * 5]
    rows += [
        (f"`{name}`", one["symbol"] or "", default_words(one), one["values"], one["help"])
        for name, one in options.items()
    ]
    return "".join(f"| {' | '.join(cell.replace('|', '&#124;') for cell in row)} |\n" for row in rows)


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
