"""Questions of LongBench with the passages of their own long text that are nearest to them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
from semantic_text_splitter import TextSplitter

from benchmarks.answers.data import Question, load_sets
from specrag.bench.data import LongPrompt, find_file, load_long_bench
from specrag.methods.speculative_rag.task import Task
from specrag.retrieval.encoder.encoder import load_encoder
from specrag.retrieval.passage import Passage

NAME = "longbench"
#: Questions with short answers that stand in the text; TriviaQA's prompts hold other questions as examples.
TASKS = ("hotpotqa", "2wikimqa", "musique", "multifieldqa_en", "qasper")
#: Of a text, and the most characters of one: together about 2,000 tokens.
PASSAGES, CHARACTERS = 12, 800


def load(folder: Path, passages: int = PASSAGES, characters: int = CHARACTERS) -> list[Question]:
    """All rows, each with its best passages, best first.

    Args:
        folder: where the data sets are.
        passages: of a text.
        characters: most of a passage.

    Raises:
        InputError: the file is missing or of another form.
    """
    return list(_questions(load_rows(folder), passages, characters))


def load_rows(folder: Path) -> list[LongPrompt]:
    """The rows of :data:`TASKS`, as they are.

    Raises:
        InputError: the file is missing or of another form.
    """
    rows = load_long_bench(find_file(folder, "longbench_v1_mini.jsonl"))
    return [row for row in rows if row.task in TASKS]


def load_among(
    folder: Path, names: Sequence[str], rows: int, passages: int = PASSAGES, characters: int = CHARACTERS
) -> dict[str, list[Question]]:
    """Sets of :func:`benchmarks.answers.data.load_sets`, of which :data:`NAME` may be one: it comes last and whole.

    Raises:
        InputError: a file is missing or of another form.
    """
    sets = load_sets(folder, [name for name in names if name != NAME], rows)
    return {**sets, NAME: load(folder, passages, characters)} if NAME in names else sets


def _questions(rows: Sequence[LongPrompt], passages: int, characters: int) -> Iterator[Question]:
    encoder = load_encoder()
    for row in rows:
        text, question = split(row.prompt)
        parts = TextSplitter(characters).chunks(text)
        scores = encoder.encode_passages(parts) @ encoder.encode_queries([question])[0]
        best = np.argsort(-scores, kind="stable")[:passages]
        yield Question(
            set=NAME,
            identifier=row.identifier,
            task=Task(question),
            answers=row.answers,
            passages=tuple(Passage(int(place), NAME, "", "", parts[place], {}) for place in best),
            group=row.task,
        )


def split(prompt: str) -> tuple[str, str]:
    """The long text of a prompt and its question, without the instructions around them."""
    before, _, behind = prompt.rpartition("\nQuestion:")
    text = before.split("\n\n", 1)[-1].rsplit("\n\n", 1)[0]
    return text.strip(), behind.removesuffix("Answer:").strip()
