"""Questions with their five best passages of 68,980, and the order in which clients ask them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any, Literal, TypeAlias

import numpy as np

from specrag.bench.data import find_file, read_json_lines
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
    answers: tuple[str, ...]
    messages: tuple[Mapping[str, str], ...]


def load(folder: Path) -> list[RagQuestion]:
    """All questions of the four sets whose passages the corpus holds, with the five that BM25 ranks first.

    Raises:
        InputError: a file is not there.
    """
    rows: list[Mapping[str, Any]] = [
        row
        for name in SETS
        for row in read_json_lines(find_file(folder, f"corpus_questions_{name}_dev.jsonl"))
    ]
    corpus: Iterable[Mapping[str, Any]] = read_json_lines(find_file(folder, _CORPUS))
    needed = {number for row in rows for number in row["bm25_top20"][:PASSAGES]}
    passages = {
        row["id"]: Passage(row["id"], _CORPUS, row["title"], "", row["text"], {})
        for row in corpus
        if row["id"] in needed
    }
    return [
        RagQuestion(
            row["id"],
            tuple(row["answers"]),
            build_prompt(row["question"], [passages[number] for number in row["bm25_top20"][:PASSAGES]]),
        )
        for row in rows
    ]


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
