"""The texts that prompts are made of."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from specrag.bench.data import read_text
from specrag.errors import InputError
from specrag.retrieval.chunking import Chunker
from specrag.retrieval.documents import Document, SourceFile, find_files, read_file

#: Tokens of the longest passage.
PASSAGE_TOKENS = 200
#: A passage that shares this many words in a row with an excluded text is left out. The usual length for finding
#: test data in training data (Brown et al. 2020, appendix C).
SHARED_WORDS = 13
_WORD = re.compile(r"\w+")


@dataclass(frozen=True, slots=True)
class Passage:
    """A text; ``title`` is empty where the text does not name what it is about."""

    text: str
    title: str


@dataclass(frozen=True, slots=True)
class Sources:
    """What was read.

    Attributes:
        passages: in the order of files.
        prompts: texts that are prompts as they are.
        checksums: sha256 of each file, by its name.
        excluded: texts left out.
    """

    passages: tuple[Passage, ...]
    prompts: tuple[str, ...]
    checksums: dict[str, str]
    excluded: int


def read_sources(
    data: Sequence[Path], prompts: Sequence[Path], tokenizer_file: Path, exclude: Sequence[Path] = ()
) -> Sources:
    """Read everything that a knowledge base can read (text, JSON lines, Markdown, PDF, ...; also with ``.gz``).

    Args:
        data: files and folders of texts, which are cut into passages.
        prompts: files and folders of prompts; each record of a file of records is one.
        tokenizer_file: the target's; measures passages.
        exclude: text and JSON lines files whose text must not be trained on, such as the prompts that the head
            is measured with.

    Raises:
        InputError: a path does not exist, or there is no text.
    """
    forbidden = frozenset(run for text in _excluded_texts(exclude) for run in _runs(text))
    chunker = Chunker(tokenizer_file, PASSAGE_TOKENS, overlap=0)
    checksums: dict[str, str] = {}
    passages: list[Passage] = []
    for document in _documents(data, "--data", checksums):
        for chunk in chunker.chunk(document):
            # A file's name often stands for a missing title.
            named = chunk.title.lower() in chunk.text.lower()
            passages.append(Passage(chunk.text, chunk.title if named else ""))
    asked = [
        "\n\n".join(part.text for part in document.parts)
        for document in _documents(prompts, "--prompts", checksums)
    ]
    allowed = tuple(each for each in passages if forbidden.isdisjoint(_runs(each.text)))
    allowed_prompts = tuple(text for text in asked if forbidden.isdisjoint(_runs(text)))
    left = len(allowed) + len(allowed_prompts)
    if not left:
        remedy = "all of its text is in the files to exclude; give other texts"
        raise InputError("--data", [str(path) for path in (*data, *prompts)], remedy)
    return Sources(allowed, allowed_prompts, checksums, len(passages) + len(asked) - left)


def _documents(paths: Sequence[Path], option: str, checksums: dict[str, str]) -> list[Document]:
    """Everything in the files; notes their checksums."""
    documents: list[Document] = []
    reasons: list[str] = []
    for file in _find(paths, option) if paths else ():
        read = read_file(file)
        checksums[file.source] = read.sha256
        documents += read.documents
        reasons += [f"{skipped.source}: {skipped.reason}" for skipped in read.skipped]
    if paths and not documents:
        shown = str(paths[0]) if len(paths) == 1 else [str(path) for path in paths]
        raise InputError(option, shown, f"there is no text in it; {'; '.join(reasons[:2])}")
    return documents


def _find(paths: Sequence[Path], option: str) -> tuple[SourceFile, ...]:
    try:
        return find_files(paths).files
    except InputError as error:
        raise InputError(option, error.value, error.remedy) from None


def _excluded_texts(paths: Sequence[Path]) -> Iterator[str]:
    """Every string of a JSON lines file, since benchmarks name their fields as they like; else the whole text."""
    for file in _find(paths, "--exclude") if paths else ():
        text = read_text(file.path)
        try:
            yield from _strings([json.loads(line) for line in text.splitlines() if line.strip()])
        except ValueError:
            yield text


def _strings(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict | list):
        for part in value.values() if isinstance(value, dict) else value:
            yield from _strings(part)


def _runs(text: str) -> Iterator[tuple[str, ...]]:
    words = _WORD.findall(text.lower())
    for start in range(len(words) - SHARED_WORDS + 1):
        yield tuple(words[start : start + SHARED_WORDS])
