"""Passages from which questions are made, and the search that finds other passages to put beside them."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from specrag.bench.data import read_json_lines
from specrag.errors import InputError
from specrag.retrieval.passage import Passage, passage_text

if TYPE_CHECKING:
    from specrag.retrieval.index.bm25 import BM25Index
    from specrag.retrieval.knowledge_base import KnowledgeBase


class PassagePool(Protocol):
    """Passages by their numbers, from 0."""

    @property
    def checksums(self) -> Mapping[str, str]:
        """What distinguishes these passages from others, by the name of the file or folder."""

    def __len__(self) -> int:
        """How many there are."""

    def passage(self, number: int) -> Passage:
        """The passage with this number."""

    def find(self, questions: Sequence[str], k: int) -> list[list[int]]:
        """The numbers of the best ``k`` passages for each question, best first; perhaps fewer."""


class FilePassages:
    """Passages in JSON lines files, gzipped or not, with BM25 over title and text.

    Args:
        paths: files of ``title`` and ``text``; read on construction and indexed at the first search.

    Raises:
        InputError: a file cannot be read, a line lacks a text, or there are none.
    """

    def __init__(self, paths: Sequence[Path]) -> None:
        self._passages: list[Passage] = []
        checksums = {}
        for path in paths:
            for number, row in enumerate(read_json_lines(path), 1):
                title, text = row.get("title") or "", row.get("text")
                if not isinstance(title, str) or not isinstance(text, str) or not text.strip():
                    place = f"{path.name}:{number}: text"
                    raise InputError(
                        place, text, "give every passage a title and a text of at least one word"
                    )
                self._passages.append(Passage(len(self._passages), path.name, title, "", text, {}))
            checksums[path.name] = hashlib.sha256(path.read_bytes()).hexdigest()
        if not self._passages:
            raise InputError("--passages", [str(path) for path in paths], "there are no passages in it")
        self.checksums: Mapping[str, str] = checksums
        self._index: BM25Index | None = None

    def __len__(self) -> int:
        return len(self._passages)

    def passage(self, number: int) -> Passage:
        """See :class:`PassagePool`."""
        return self._passages[number]

    def find(self, questions: Sequence[str], k: int) -> list[list[int]]:
        """See :class:`PassagePool`."""
        from specrag.retrieval.index.base import Query

        index = self._indexed()
        queries = [Query(question, terms=index.terms(question)) for question in questions]
        return [ranking.ids.tolist() for ranking in index.search(queries, k)]

    def _indexed(self) -> BM25Index:
        if self._index is None:
            from specrag.retrieval.index.bm25 import BM25Index

            self._index = BM25Index.build([passage_text(each.title, each.text) for each in self._passages])
        return self._index


class KnowledgeBasePassages:
    """The passages of a knowledge base, found by one of its indexes.

    Args:
        base: the open knowledge base.
        index: the name of the index.

    Raises:
        InputError: the knowledge base has no such index.
    """

    def __init__(self, base: KnowledgeBase, index: str) -> None:
        base.index(index)  # checks
        self._base = base
        self._search_index = index
        self.checksums: Mapping[str, str] = {"passages": str(len(base)), "index": index}

    def __len__(self) -> int:
        return len(self._base)

    def passage(self, number: int) -> Passage:
        """See :class:`PassagePool`."""
        return self._base.passage(number)

    def find(self, questions: Sequence[str], k: int) -> list[list[int]]:
        """See :class:`PassagePool`."""
        found = self._base.search(questions, min(k, len(self._base)), index=self._search_index)
        return [[hit.passage.id for hit in hits] for hits in found]
