"""Texts as token windows for a kNN-LM datastore: one entry for each token that has a next one."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from specrag.errors import InputError
from specrag.methods.knn_lm.store.manifest import WindowSettings
from specrag.models import Tokenizer
from specrag.retrieval import Progress, Reporter
from specrag.retrieval.documents import Skipped, find_files, read_file

Tokens: TypeAlias = npt.NDArray[np.int32]

#: The ``windows`` file holds for each window a key of its text and the number of its entries.
WINDOW_TYPE = np.dtype([("text", "V16"), ("entries", "<i8")])


@dataclass(frozen=True, slots=True, eq=False)
class Window:
    """Tokens that the model reads in one pass.

    Args:
        tokens: int32, what the model reads.
        skipped: how many of them, from the first, make no entries.
        values: int32, the token after each of the others.
    """

    tokens: Tokens
    skipped: int
    values: Tokens

    @property
    def key(self) -> bytes:
        """Hash of the window, 16 bytes."""
        digest = hashlib.blake2b(self.tokens.tobytes(), digest_size=16)
        digest.update(f"/{self.skipped}/{self.values[-1]}".encode())
        return digest.digest()


def windows(documents: Sequence[Tokens], settings: WindowSettings) -> Iterator[Window]:
    """All windows of some texts, in order; a text of one token has none.

    Args:
        documents: the tokens of each text.
        settings: how to cut.
    """
    for tokens in documents:
        start, covered = 0, 0  # start of the window, and number of entries made so far
        while covered < len(tokens) - 1:
            end = min(start + settings.tokens, len(tokens) - 1)
            yield Window(tokens[start:end], covered - start, tokens[covered + 1 : end + 1])
            covered = end
            start = max(end - settings.context, 0)


def entries_of(documents: Sequence[Tokens]) -> int:
    """Number of entries of these texts."""
    return sum(max(len(tokens) - 1, 0) for tokens in documents)


def value_type(vocab_size: int) -> np.dtype[np.generic]:
    """The smallest type that holds every token."""
    return np.dtype("<u2") if vocab_size <= 1 << 16 else np.dtype("<i4")


@dataclass(frozen=True, slots=True, eq=False)
class Texts:
    """Tokens of some files.

    Args:
        documents: the tokens of each text, int32, in the order of the files' names.
        skipped: what could not be read, with the reason.
    """

    documents: tuple[Tokens, ...]
    skipped: tuple[Skipped, ...]


def read_texts(
    paths: Sequence[Path],
    tokenizer: Tokenizer,
    progress: Reporter | None = None,
    exclude: Sequence[Path] = (),
) -> Texts:
    """The texts below some paths; each record of a file of records is a text.

    Args:
        paths: files and folders.
        tokenizer: the model's.
        progress: receives how many files have been read, from time to time.
        exclude: files and folders to leave out, such as the datastore itself.

    Raises:
        InputError: a path cannot be used, or nothing below them can be read.
    """
    found = find_files([Path(path).expanduser() for path in paths], exclude)
    documents: list[Tokens] = []
    skipped = list(found.skipped)
    for number, file in enumerate(found.files):
        if progress is not None:
            progress(Progress("reading", number, len(found.files)))
        read = read_file(file)
        skipped += read.skipped
        for document in read.documents:
            text = "\n\n".join(part.text for part in document.parts)
            # Half a surrogate pair, as found in damaged JSON, is not text that a tokenizer accepts.
            clean = text.encode("utf-8", "replace").decode("utf-8")
            documents.append(np.array(tokenizer.encode(clean, special=True), dtype=np.int32))
    if progress is not None:
        progress(Progress("reading", len(found.files), len(found.files)))
    if not any(len(tokens) > 1 for tokens in documents):
        first = f", first {skipped[0].source}: {skipped[0].reason}" if skipped else ""
        raise InputError("path", f"{len(found.files)} files", f"none of them holds a text{first}")
    return Texts(tuple(documents), tuple(skipped))
