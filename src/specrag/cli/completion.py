"""What the shell offers after ``-m``, ``--model`` and ``-o``."""

from __future__ import annotations

from typing import Any

import typer


def methods(incomplete: str) -> list[tuple[str, str]]:
    """Names of methods, with their summaries."""
    from specrag.errors import SpecragError
    from specrag.methods import method_class, method_names

    found = []
    for name in method_names():
        if name.startswith(incomplete):
            try:
                found.append((name, method_class(name).summary))
            except SpecragError:  # a method of another package that cannot be imported
                found.append((name, ""))
    return found


def models(incomplete: str) -> list[tuple[str, str]]:
    """Names of the catalog's models, with their descriptions."""
    from specrag.models import catalog

    known = catalog.list_models()
    return [(model.name, model.description) for model in known if model.name.startswith(incomplete)]


def option_keys(context: typer.Context, incomplete: str) -> list[tuple[str, str]]:
    """Keys of ``-o`` for the method on the line; if only one fits, also its values.

    Two candidates with the same beginning keep the shell from putting a space after ``KEY=``.
    """
    from specrag.cli.values import GROUPS
    from specrag.errors import SpecragError
    from specrag.methods import describe_options, method_class

    try:
        own = method_class(context.params.get("method") or _usual(context)).Options
    except SpecragError:  # the name is wrong, or not complete yet
        return []
    known: dict[str, dict[str, Any]] = {}
    for group in (own, *(options for _, options in GROUPS)):
        known = {**describe_options(group), **known}
    key, equals, _ = incomplete.partition("=")
    fitting = [name for name in known if (name == key if equals else name.startswith(key))]
    offered = [(f"{name}=", known[name]["help"]) for name in fitting]
    if len(fitting) == 1:
        (name,) = fitting
        offered += [(f"{name}={value}", known[name]["help"]) for value in _values(known[name])]
    return [(text, help_) for text, help_ in offered if text.startswith(incomplete)]


def _usual(context: typer.Context) -> str:
    """The method if none is named."""
    from specrag.methods import DEFAULT_METHOD, DEFAULT_OVER_CONTEXT, DEFAULT_OVER_PASSAGES

    if context.params.get("context"):
        return DEFAULT_OVER_CONTEXT
    names = {parameter.name for parameter in context.command.params}
    return DEFAULT_OVER_PASSAGES if "kb" in names else DEFAULT_METHOD


def _values(option: dict[str, Any]) -> list[str]:
    """Values worth offering: true and false, the names of a choice, else the default."""
    default = option["default"]
    if isinstance(default, bool):
        return ["true", "false"]
    if option["choices"]:
        return [str(choice) for choice in option["choices"]]
    return ["none" if default is None else str(default)]
