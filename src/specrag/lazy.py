"""Packages that import their public names on first access (PEP 562)."""

from __future__ import annotations

import ast
import sys
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any


def lazy_names(package: str) -> Callable[[str], Any]:
    """A package's ``__getattr__`` that imports each name of its ``if TYPE_CHECKING:`` block on first access.

    The names are then written only once, as plain imports for type checkers and readers, and importing the package
    costs next to nothing, whatever the names depend on::

        if TYPE_CHECKING:
            from specrag.engine.kv import KeyValueCache  # needs torch
        else:
            __getattr__ = lazy_names(__name__)

        __all__ = ["KeyValueCache"]
    """
    modules: dict[str, str] = {}

    def import_name(name: str) -> Any:
        if not modules:
            modules.update(_modules(Path(str(sys.modules[package].__file__))))
        if name not in modules:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        return getattr(import_module(modules[name]), name)  # not kept, so that a name replaced there is found

    return import_name


def _modules(path: Path) -> dict[str, str]:
    """The module of each name that a package's ``if TYPE_CHECKING:`` block imports."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    blocks = [node for node in tree.body if isinstance(node, ast.If)]
    imports = [node for block in blocks for node in block.body if isinstance(node, ast.ImportFrom)]
    return {alias.name: str(node.module) for node in imports for alias in node.names}
