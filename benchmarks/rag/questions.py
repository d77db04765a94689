"""Questions with their five best passages of 68,980, and the order in which clients ask them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import lru_cache
from itertools import islice
from pathlib import Path
from typing import Any, Literal, TypeAlias

import numpy as np

from benchmarks.server.subjects import WAKING
from specrag.bench.data import find_file, load_spec_bench, read_json_lines
from specrag.methods.prompts import build_prompt
from specrag.retrieval.passage import Passage

#: How questions are drawn: each once, in the order of a shuffle, or again and again by Zipf's law.
Draw: TypeAlias = Literal["uniform", "zipf"]

SETS = ("nq", "webq", "triviaqa", "popqa")
PASSAGES = 5
_CORPUS = "corpus_wiki_passages.jsonl"
_MOST_ASKED = 500


@dataclass(frozen=True, slots=True)
class RagQuestion:
    """A question, the answers that count as right, and the prompt with its passages in the order of their scores."""

    identifier: str
    question: str
    answers: tuple[str, ...]
    passages: tuple[Passage, ...]
    messages: tuple[Mapping[str, str], ...]


#: For :meth:`~benchmarks.server.subjects.ServerProcess.awake`.
GREETING = RagQuestion("", WAKING, (), (), ({"role": "user", "content": WAKING},))


@dataclass(frozen=True, slots=True)
class FoundQuestion:
    """A question with the passages that BM25 ranks first, best first.

    Attributes:
        set: of :data:`SETS`.
    """

    set: str
    identifier: str
    question: str
    answers: tuple[str, ...]
    passages: tuple[Passage, ...]


def load(folder: Path) -> list[RagQuestion]:
    """All questions with the five best passages in their prompt.

    Raises:
        InputError: a file is not there.
    """
    return [
        RagQuestion(
            row.identifier,
            row.question,
            row.answers,
            row.passages,
            build_prompt(row.question, row.passages),
        )
        for row in load_found(folder, PASSAGES)
    ]


def load_alone(folder: Path) -> list[RagQuestion]:
    """The first turns of Spec-Bench's questions with even identifiers, as prompts without passages.

    Raises:
        InputError: the file is not there.
    """
    rows = load_spec_bench(find_file(folder, "specbench_480.jsonl"))
    return [
        RagQuestion(row.identifier, row.turns[0], (), (), ({"role": "user", "content": row.turns[0]},))
        for row in rows
        if int(row.identifier) % 2 == 0
    ]


def load_found(folder: Path, count: int) -> list[FoundQuestion]:
    """All questions of the four sets whose passages the corpus holds, with the first of their twenty passages.

    Raises:
        InputError: a file is not there.
    """
    rows: list[tuple[str, Mapping[str, Any]]] = [
        (name, row)
        for name in SETS
        for row in read_json_lines(find_file(folder, f"corpus_questions_{name}_dev.jsonl"))
    ]
    needed = {number for _, row in rows for number in row["bm25_top20"][:count]}
    passages = _passages(str(find_file(folder, _CORPUS)), frozenset(needed))
    return [
        FoundQuestion(
            name,
            str(row["id"]),
            row["question"],
            tuple(row["answers"]),
            tuple(passages[number] for number in row["bm25_top20"][:count]),
        )
        for name, row in rows
    ]


@lru_cache(maxsize=1)
def _passages(path: str, needed: frozenset[int]) -> dict[int, Passage]:
    corpus: Iterable[Mapping[str, Any]] = read_json_lines(Path(path))
    return {
        row["id"]: Passage(row["id"], _CORPUS, row["title"], "", row["text"], {})
        for row in corpus
        if row["id"] in needed
    }


def drawn(questions: list[RagQuestion], draw: Draw, seed: int = 0) -> Iterator[RagQuestion]:
    """Questions as clients ask them, without end.

    Args:
        questions: in any order; ``zipf`` asks 500 of them, the first of a shuffle most often (s = 1).
        draw: how.
        seed: of the shuffle and the draws.
    """
    rng = np.random.default_rng(seed)
    shuffled = [questions[place] for place in rng.permutation(len(questions))]
    if draw == "uniform":
        while True:
            yield from shuffled
    asked = list(islice(shuffled, _MOST_ASKED))
    chances = 1 / np.arange(1, len(asked) + 1)
    chances /= chances.sum()
    while True:
        yield asked[rng.choice(len(asked), p=chances)]
