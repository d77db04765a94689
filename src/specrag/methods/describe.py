"""What a method's class says about itself, for help, pages and documentation."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from typing import TYPE_CHECKING, Any

from specrag.methods.base import Needs
from specrag.methods.registry import alternatives, resolved, value_kinds

if TYPE_CHECKING:
    from pydantic import BaseModel

    from specrag.methods.base import Method


def describe_method(method: type[Method]) -> dict[str, Any]:
    """Name, summary, needs and options of a method, as JSON."""
    return {
        "name": method.name,
        "summary": method.summary,
        "needs": [need.name.lower() for need in Needs if need in method.needs and need.name],
        "options": describe_options(method.Options),
    }


def describe_options(options: type[BaseModel]) -> dict[str, dict[str, Any]]:
    """Options by name, as JSON.

    Returns:
        For each option: ``type`` (``integer``, ``number``, ``boolean``, ``string``, ``array`` or ``choice``),
        ``default``, ``min``, ``max``, ``choices`` (for an array those of its items; for a number its named values),
        ``values`` (what may be given, in words), ``help``, ``symbol`` (the paper's), ``resource`` that the host
        resolves, ``own`` names that need no resource, and the ``prefix`` of names that do.
    """
    return {name: dict(option) for name, option in _described(options).items()}


def default_words(option: Mapping[str, Any]) -> str:
    """The default of a described option as people write it; nothing for an empty list."""
    value = option["default"]
    if value in (None, [], ()):
        return "" if value is not None else "none"
    return str(value).lower() if isinstance(value, bool) else str(value)


@cache
def _described(options: type[BaseModel]) -> dict[str, dict[str, Any]]:
    schema = options.model_json_schema()
    return {name: _describe(one, schema, options, name) for name, one in schema.get("properties", {}).items()}


def _describe(
    schema: Mapping[str, Any], root: Mapping[str, Any], options: type[BaseModel], name: str
) -> dict[str, Any]:
    kinds = [resolved(kind, root) for kind in alternatives(schema)]
    # The first alternative gives the type; the others are named values.
    first, *others = [kind for kind in kinds if kind.get("type") != "null"]
    items = resolved(first.get("items", {}), root)
    named = [value for other in others for value in other.get("enum", [other.get("const")])]
    choices = first.get("enum") or items.get("enum") or [value for value in named if value is not None]
    return {
        "type": "choice" if "enum" in first else first.get("type"),
        "default": schema.get("default"),
        "min": first.get("minimum", first.get("exclusiveMinimum")),
        "max": first.get("maximum", first.get("exclusiveMaximum")),
        "choices": choices or None,
        "values": value_kinds(schema, root),
        "help": schema.get("description", ""),
        "symbol": options.model_fields[name].title,
        "resource": schema.get("resource"),
        "own": schema.get("own"),
        "prefix": schema.get("prefix"),
    }
