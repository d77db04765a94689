"""Files to the tokens of texts, for a kNN-LM datastore or for measuring a model's perplexity."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from specrag.errors import InputError
from specrag.models.tokenizer import Tokenizer
from specrag.retrieval.documents import find_files, read_file
from specrag.retrieval.files import Skipped
from specrag.retrieval.knn_windows import Tokens
from specrag.retrieval.progress import Progress, Reporter


@dataclass(frozen=True, slots=True, eq=False)
class Texts:
    """What some files hold.

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
        progress: told now and then how many files are read.
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
            # Half a surrogate pair, as damaged JSON has it, is no text that a tokenizer takes.
            clean = text.encode("utf-8", "replace").decode("utf-8")
            documents.append(np.array(tokenizer.encode(clean, special=True), dtype=np.int32))
    if progress is not None:
        progress(Progress("reading", len(found.files), len(found.files)))
    if not any(len(tokens) > 1 for tokens in documents):
        first = f", first {skipped[0].source}: {skipped[0].reason}" if skipped else ""
        raise InputError("path", f"{len(found.files)} files", f"none of them holds a text{first}")
    return Texts(tuple(documents), tuple(skipped))
