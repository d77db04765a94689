"""A static corpus on disk: its files, their manifest, and how they are written, all or nothing."""

from __future__ import annotations

import contextlib
import json
import uuid
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np

from specrag.artifacts import MANIFEST, Refusal, checksum, disk_errors, new_folder
from specrag.errors import InputError

TOKENS = "tokens.npy"
POSITIONS = "suffix_array.npy"
TEXTS = "texts.npy"
FORMAT = "specrag suffix corpus 1"

_REBUILD = "build it again"


@dataclass(frozen=True)
class CorpusManifest:
    """What a corpus holds.

    Attributes:
        tokenizer: fingerprint of the tokenizer that made the tokens.
        texts: number of texts.
        tokens: number of tokens in them.
        checksums: of each file, by name.
        format: layout of the folder.
    """

    tokenizer: str
    texts: int
    tokens: int
    checksums: Mapping[str, str]
    format: str = FORMAT


def read_manifest(folder: Path) -> CorpusManifest:
    """Read the manifest of a corpus.

    Raises:
        InputError: there is none, or it cannot be read.
    """
    try:
        content = json.loads((folder / MANIFEST).read_text(encoding="utf-8"))
        manifest = CorpusManifest(**content)
        if manifest.format != FORMAT:
            raise InputError(
                "corpus", str(folder), f"its format is {manifest.format!r}, not {FORMAT!r}: {_REBUILD}"
            )
        whole = (
            isinstance(manifest.tokenizer, str)
            and isinstance(manifest.texts, int)
            and isinstance(manifest.tokens, int)
            and isinstance(manifest.checksums, dict)
            and set(manifest.checksums) == {TOKENS, POSITIONS, TEXTS}
        )
    except (FileNotFoundError, NotADirectoryError) as error:
        raise InputError("corpus", str(folder), "there is no corpus: build one there first") from error
    except InputError:
        raise
    except (OSError, ValueError, TypeError) as error:
        raise InputError("corpus", str(folder), f"{MANIFEST} cannot be read: {_REBUILD}") from error
    if not whole:
        raise InputError("corpus", str(folder), f"{MANIFEST} is damaged: {_REBUILD}")
    return manifest


def map_array(folder: Path, name: str, manifest: CorpusManifest) -> np.ndarray:
    """The array in a file of a corpus, mapped from disk, read-only.

    The whole file is read once to compare its checksum: a damaged one could lead a search out of bounds.

    Raises:
        InputError: the file is missing, cannot be read, or differs from the recorded one.
    """
    path = folder / name
    try:
        if checksum(path) != manifest.checksums[name]:
            raise InputError("corpus", str(folder), f"{name} has another checksum than recorded: {_REBUILD}")
        # A plain array over the mapped pages: the compiled loops accept it without conversion.
        return np.asarray(np.load(path, mmap_mode="r"))
    except FileNotFoundError as error:
        raise InputError("corpus", str(folder), f"{name} is missing: {_REBUILD}") from error
    except OSError as error:
        raise InputError(
            "corpus", str(folder), f"{name} cannot be read ({error.strerror or error})"
        ) from error


def write_array(folder: Path, name: str, array: np.ndarray) -> str:
    """Write a file of a corpus; returns its checksum."""
    np.save(folder / name, array)
    return checksum(folder / name)


def write_manifest(folder: Path, manifest: CorpusManifest) -> None:
    """Write the manifest of a corpus."""
    (folder / MANIFEST).write_text(json.dumps(asdict(manifest), indent=2) + "\n", encoding="utf-8")


def require_target(folder: Path) -> None:
    """Refuse to build a corpus where something else is stored.

    Raises:
        InputError: ``folder`` holds files that are not a corpus, or is a file.
    """
    if folder.exists() and not _is_corpus(folder) and not (folder.is_dir() and _is_empty(folder)):
        raise InputError("folder", str(folder), "it holds other files; give a new folder or that of a corpus")


@contextlib.contextmanager
def publishing(folder: Path) -> Iterator[Path]:
    """A new folder to fill; without an error it replaces ``folder`` and any older corpus there, else it is removed.

    An open corpus keeps its pages: what is mapped stays until it is closed.

    Raises:
        InputError: the disk refuses.
    """

    def described(refusal: Refusal) -> InputError:
        return InputError("folder", str(folder), f"it cannot be written ({refusal.reason}): give another")

    partial = folder.with_name(f".{folder.name}-{uuid.uuid4().hex}")
    with disk_errors(folder.parent, described), new_folder(folder, partial):
        yield partial


def _is_empty(folder: Path) -> bool:
    return next(folder.iterdir(), None) is None


def _is_corpus(folder: Path) -> bool:
    """Whether a folder may be replaced: it holds the files of a corpus and nothing else, such as a knowledge base."""
    names = {path.name for path in folder.iterdir()} if folder.is_dir() else set()
    return MANIFEST in names and names <= {MANIFEST, TOKENS, POSITIONS, TEXTS}
