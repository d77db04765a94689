"""Optional packages: which extra of specrag installs each, entry points of other packages, one error for missing ones.

The base install covers what speculation and the HTTP client need. Everything else is imported where it is used, inside
``with needed_by(...)`` or behind the command line, both of which name the extra.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from importlib.metadata import EntryPoint, entry_points
from typing import Any

from specrag.errors import SpecragError

#: Import names by the extra that installs them; a package of several extras is listed under the first.
PACKAGES = {
    "local": (
        "torch",
        "transformers",
        "tokenizers",
        "safetensors",
        "gguf",
        "accelerate",
        "jinja2",
        "bs4",
        "charset_normalizer",
        "lxml",
        "mammoth",
        "markdownify",
        "pathspec",
        "pypdfium2",
        "semantic_text_splitter",
        "bm25s",
        "faiss",
        "Stemmer",
        "sklearn",
        "sentence_transformers",
        "threadpoolctl",
    ),
    "serve": (
        "fastapi",
        "httpx2",
        "llguidance",
        "prometheus_client",
        "pydantic_settings",
        "python_multipart",
        "structlog",
        "uvicorn",
    ),
    "ray": ("ray",),
    "tracing": ("opentelemetry",),
    "stores": ("pgvector", "psycopg", "psycopg_pool", "qdrant_client", "pymilvus"),
    "train": ("peft", "matplotlib"),
    "bench": ("psutil", "rouge_score", "pgserver"),
}
_EXTRAS = {package: extra for extra, packages in PACKAGES.items() for package in packages}
# Dependencies of other packages.
_EXTRAS |= {"starlette": "serve", "anyio": "serve", "h11": "serve"}


class MissingPackage(SpecragError, ImportError):  # noqa: N818 - says what is the matter
    """A package that the request needs is not installed; the message names the extra that installs it."""


def missing(what: str, package: str | None, extra: str | None = None) -> MissingPackage | None:
    """The error for a package that could not be imported; None if no extra installs it.

    Args:
        what: what needs the package; starts the message.
        package: its import name, possibly of a submodule.
        extra: the extra to name, if several install the package.
    """
    top = (package or "").partition(".")[0]
    if top not in _EXTRAS:
        return None
    return MissingPackage(
        f"{what}: {top} is not installed; install specrag[{extra or _EXTRAS[top]}]", name=top
    )


@contextmanager
def needed_by(what: str, extra: str | None = None) -> Iterator[None]:
    """Report a package that is missing inside the ``with`` block, naming the extra that installs it.

    Raises:
        MissingPackage: an import inside the block failed.
    """
    try:
        yield
    except ModuleNotFoundError as error:
        if isinstance(error, MissingPackage) or (found := missing(what, error.name, extra)) is None:
            raise
        raise found from error


@cache
def brought(group: str) -> dict[str, EntryPoint]:
    """The entry points of a group that installed packages declare, by name."""
    return {entry.name: entry for entry in entry_points(group=group)}


def load_brought(entry: EntryPoint, kind: str) -> Any:
    """Import the object behind another package's entry point.

    Args:
        kind: what it is, for the error message.

    Raises:
        SpecragError: it cannot be imported.
    """
    try:
        return entry.load()
    except Exception as error:
        reason = " ".join(str(error).split())[:160]
        raise SpecragError(f"{kind} {entry.name!r} of {entry.value} cannot be imported: {reason}") from error
