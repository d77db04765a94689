"""What the passages suite asks, and the knowledge base that it asks it of."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING

from benchmarks.questions import SAMPLE
from benchmarks.retrieval.building import building_trial
from benchmarks.retrieval.data import (
    CORPUS,
    load_questions,
    part_of_corpus,
    spread,
    write_corpus,
)
from specrag.bench.data import SAMPLE as TEXT
from specrag.bench.data import Passage, find_file, read_json_lines
from specrag.bench.suite import BenchContext
from specrag.errors import InputError

if TYPE_CHECKING:
    from specrag.retrieval.knowledge_base import KnowledgeBase

#: Those of the paper for which the corpus holds answers; WikiQA joins them as it is.
SETS = ("nq", "webq", "triviaqa")
WIKIQA = "wikiqa"
_WIKIQA_FILE = "wikiqa_test.jsonl"
_QUICK_PASSAGES = 300


@dataclass(frozen=True, slots=True)
class Asked:
    """A question of a set; ``name`` is its own within the set."""

    task: str
    name: str
    text: str


class Source:
    """Questions and passages: those of the user's data, or without any the built-in sample.

    The knowledge base of all passages is the one that the retrieval suite builds: it stays beside the records.

    Args:
        context: of the run.
    """

    def __init__(self, context: BenchContext) -> None:
        self._data = context.data
        self._quick = context.quick
        self._work = context.out / ".records"
        self._opened: KnowledgeBase | None = None

    def close(self) -> None:
        """Let the knowledge base go."""
        if self._opened is not None:
            self._opened.close()
            self._opened = None

    # -- questions ------------------------------------------------------------------------------------------

    def questions(self, per_set: int) -> list[Asked]:
        """At most so many questions of each set, evenly spread; the first of each set come first.

        A quick run takes the first set alone.
        """
        sets = [
            [Asked(task, str(place), text) for place, text in spread(list(enumerate(texts)), per_set)]
            for task, texts in self._sets.items()
        ]
        return [some[place] for place in range(per_set) for some in sets if place < len(some)]

    @cached_property
    def _sets(self) -> dict[str, list[str]]:
        if self._data is None:
            return {"sample": [question.question for question in SAMPLE]}
        found = {
            entry.name: [question.text for question in entry.questions]
            for entry in load_questions(self._data)
            if entry.name in SETS
        }
        if any((self._data / f"{_WIKIQA_FILE}{ending}").is_file() for ending in ("", ".gz")):
            found[WIKIQA] = _wikiqa(find_file(self._data, _WIKIQA_FILE))
        if not found:
            remedy = (
                f"give a folder that holds corpus_questions_NAME_dev.jsonl for a NAME of {', '.join(SETS)}"
            )
            raise InputError("--data", str(self._data), remedy)
        return dict(list(found.items())[:1]) if self._quick else found

    # -- passages -------------------------------------------------------------------------------------------

    @property
    def knowledge_base(self) -> KnowledgeBase:
        """Open; built first if it is not there."""
        if self._opened is None:
            from specrag.retrieval.knowledge_base import KnowledgeBase

            folder = self._work / f"knowledge-base-{self._size}"
            if not (folder / "manifest.json").is_file():
                building_trial(self._documents(), folder)()
            self._opened = KnowledgeBase.open(folder)
        return self._opened

    @property
    def _size(self) -> str:
        if self._data is None:
            return "sample"
        return f"passages-{_QUICK_PASSAGES}" if self._quick else "whole"

    def _documents(self) -> Path:
        if self._data is None:
            return write_corpus(self._work / "corpus-sample.jsonl", sample_passages())
        if not self._quick:
            return find_file(self._data, CORPUS)
        sets = [entry for entry in load_questions(self._data, most=4) if entry.name in SETS]
        part = part_of_corpus(self._data, sets, _QUICK_PASSAGES)
        return write_corpus(self._work / f"corpus-passages-{_QUICK_PASSAGES}.jsonl", part)


def sample_passages() -> Sequence[Passage]:
    """The built-in passages: those that answer the sample's questions, and the paragraphs of the sample text."""
    texts = [(passage.title, passage.text) for passage in SAMPLE[0].passages]
    texts += [("", paragraph) for paragraph in TEXT.split("\n\n") if paragraph.strip()]
    return [
        Passage(identifier=str(number), title=title, text=text) for number, (title, text) in enumerate(texts)
    ]


def _wikiqa(path: Path) -> list[str]:
    texts = []
    for number, row in enumerate(read_json_lines(path), 1):
        text = row.get("question")
        if not isinstance(text, str) or not text.strip():
            raise InputError("data file", f"{path.name}:{number}", "give every line a question")
        texts.append(text)
    return texts
