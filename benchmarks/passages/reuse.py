"""What it saves to read a passage once: sequential retrieval and RaLMSpec with keys and values kept, and without.

``python -m benchmarks.passages.reuse KB --data FOLDER [--model NAME] [--questions N] [--new N]``

The four take turns, question by question. Without, every retrieval reads its prompt anew, as the papers run it.
"""

from __future__ import annotations

import argparse
import random
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import closing
from pathlib import Path
from statistics import median

import specrag
from benchmarks.rag.questions import load_found
from specrag.bench.statistics import PairedTimes, overall_speedup
from specrag.language_model import LanguageModel
from specrag.methods.decoding import make_decoder
from specrag.methods.ralmspec import RaLMSpec, Sequential
from specrag.methods.ralmspec.iterative import IterativeMethod
from specrag.methods.ralmspec.sequential import SequentialPipeline
from specrag.methods.ralmspec.speculative import RaLMSpecPipeline
from specrag.models.catalog import default_model

METHODS = ("sequential", "ralmspec")
#: A method, and whether it keeps what it has read.
Cell = tuple[str, bool]
CELLS: tuple[Cell, ...] = tuple((method, kept) for method in METHODS for kept in (True, False))
_KEPT = 2 << 30


def main() -> None:
    """Measure, then print the table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("kb", type=Path, help="a knowledge base")
    parser.add_argument("--data", type=Path, required=True, help="folder with the corpus questions")
    parser.add_argument("--model", default=default_model())
    parser.add_argument("--questions", type=int, default=60)
    parser.add_argument("--new", type=int, default=48, help="tokens of an answer")
    given = parser.parse_args()
    questions = [row.question for row in load_found(given.data, 1)]
    random.Random(0).shuffle(questions)
    with (
        closing(specrag.load(given.model, prefix_cache_bytes=_KEPT)) as llm,
        specrag.KnowledgeBase.open(given.kb) as kb,
    ):
        pipelines = make_pipelines(llm, kb)
        ask(pipelines, llm, questions[0], 0, given.new)  # compiles
        asked = questions[1 : given.questions + 1]
        runs = [ask(pipelines, llm, question, turn, given.new) for turn, question in enumerate(asked)]
    sys.stdout.write(table(runs))


def make_pipelines(llm: LanguageModel, kb: specrag.KnowledgeBase) -> dict[Cell, IterativeMethod]:
    """RaLMSpec is the paper's: OS3, asynchronous, prefetch 20."""
    decoder = make_decoder("plain", llm.resources)
    made: dict[Cell, IterativeMethod] = {}
    for method, kept in CELLS:
        if method == "sequential":
            made[method, kept] = SequentialPipeline(llm, kb, Sequential.Options(reuse=kept), decoder)
        else:
            made[method, kept] = RaLMSpecPipeline(llm, kb, RaLMSpec.Options(), decoder, reuse=kept)
    return made


def ask(
    pipelines: Mapping[Cell, IterativeMethod], llm: LanguageModel, question: str, turn: int, new: int
) -> dict[Cell, tuple[float, str]]:
    """Seconds and text of each cell's answer; the first one changes from turn to turn."""
    answers: dict[Cell, tuple[float, str]] = {}
    first = turn % len(CELLS)
    for cell in (*CELLS[first:], *CELLS[:first]):
        if not cell[1]:
            llm.prefixes.clear()
        started = time.perf_counter()
        answer = llm.executor.run(llm.executor.submit(pipelines[cell].answering(question, max_tokens=new)))
        answers[cell] = (time.perf_counter() - started, answer.text)
    return answers


def table(runs: Sequence[Mapping[Cell, tuple[float, str]]]) -> str:
    """A line for each method."""
    lines = [
        "| method | n | kept, median s | read anew | times as fast | equal texts |",
        "|---|---:|---:|---:|---|---:|",
    ]
    for method in METHODS:
        kept, anew = ([run[method, how] for run in runs] for how in (True, False))
        pairs = [PairedTimes([old], [new]) for (new, _), (old, _) in zip(kept, anew, strict=True)]
        ratio = overall_speedup(pairs)
        equal = sum(len({text for _, text in run.values()}) == 1 for run in runs)
        figures = f"{median(s for s, _ in kept):.2f} | {median(s for s, _ in anew):.2f}"
        interval = f"{ratio.value:.2f} [{ratio.low:.2f}, {ratio.high:.2f}]"
        lines.append(f"| {method} | {len(runs)} | {figures} | {interval} | {equal} |")
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    main()
