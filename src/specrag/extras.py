"""Optional packages: which extra of specrag brings each, what others bring, and one error for those that are missing.

The base install holds what speculation and the HTTP client need. Everything else is imported where it is used, inside
``with needed_by(...)`` or behind the command line, both of which name the extra.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from importlib.metadata import EntryPoint, entry_points
from typing import Any

from specrag.errors import SpecragError

#: Names as they are imported, by the extra that brings them; what several extras bring stands in the first of them.
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
# What comes along with another package.
_EXTRAS |= {"starlette": "serve", "anyio": "serve", "h11": "serve"}


class MissingPackage(SpecragError, ImportError):  # noqa: N818 - says what is the matter
    """A package that specrag needs for what was asked is not installed; the message names the extra that brings it."""


def missing(what: str, package: str | None, extra: str | None = None) -> MissingPackage | None:
    """The error for a package that could not be imported; None for one that no extra brings.

    Args:
        what: needs it; stands before the colon.
        package: as it is imported, submodules included.
        extra: the extra to name, where several bring the package.
    """
    top = (package or "").partition(".")[0]
    if top not in _EXTRAS:
        return None
    return MissingPackage(
        f"{what}: {top} is not installed; install specrag[{extra or _EXTRAS[top]}]", name=top
    )


@contextmanager
def needed_by(what: str, extra: str | None = None) -> Iterator[None]:
    """Report a package that is missing inside the ``with`` block by the extra that brings it.

    Raises:
        MissingPackage: an import inside failed.
    """
    try:
        yield
    except ModuleNotFoundError as error:
        if isinstance(error, MissingPackage) or (found := missing(what, error.name, extra)) is None:
            raise
        raise found from error


@cache
def brought(group: str) -> dict[str, EntryPoint]:
    """What installed packages bring in a group of entry points, by name."""
    return {entry.name: entry for entry in entry_points(group=group)}


def load_brought(entry: EntryPoint, kind: str) -> Any:
    """Import what another package brings.

    Args:
        kind: what it is, for the error.

    Raises:
        SpecragError: it cannot be imported.
    """
    try:
        return entry.load()
    except Exception as error:
        reason = " ".join(str(error).split())[:160]
        raise SpecragError(f"{kind} {entry.name!r} of {entry.value} cannot be imported: {reason}") from error
