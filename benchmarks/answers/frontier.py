"""Accuracy against seconds: a large model, a small one, and what the two do together, question by question.

``python -m benchmarks.answers.frontier OUT --data FOLDER [--sets S ...] [--rows N] [--part P] [--ways W ...]``

Every way answers the same questions of :mod:`benchmarks.answers.data` from the same passages, one after the other.
Settings are chosen on odd rows; even ones are for the table. Of ``longbench``, ten long passages a question, nothing
was chosen on any row. Answers are recorded in ``OUT/answers.jsonl`` as they come, so that a run that was stopped goes
on. ``--ways`` with nothing behind it only draws the table and the picture.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchmarks.answers.data import Question
from benchmarks.answers.figures import first_sentence
from benchmarks.answers.frontier_figures import draw, label_table, table
from benchmarks.answers.passage_reading import PassageReading
from benchmarks.answers.trials import Models, found_in
from benchmarks.rag import longbench
from benchmarks.records import append_records, read_records
from specrag.bench.metrics import token_f1
from specrag.methods.citations import find_citations, without_citations
from specrag.methods.speculative_rag import SpeculativeRAG
from specrag.methods.speculative_rag.pipeline import SpeculativeRAGPipeline
from specrag.methods.standard_rag import StandardRAG
from specrag.methods.standard_rag.cascade import Cascade, CascadeAnswer
from specrag.models.adapters import drafter_form, shipped_adapters
from specrag.models.roles import ScoringRequest, TextPart
from specrag.models.scoring import LocalScorer
from specrag.retrieval.passage import passage_text

if TYPE_CHECKING:
    from specrag.methods.base import Method
    from specrag.request import Result
    from specrag.retrieval.passage import Passage

LARGE, SMALL = "qwen2.5-coder-1.5b", "smollm2-135m"
SETS = (
    "popqa",
    "popqa-25",
    "hotpotqa",
    "musique",
    "nq-corpus",
    "triviaqa-corpus",
    "healthver",
    "climate-fever",
    "arc-challenge",
)
_TOKENS, _CHOICE_TOKENS = 64, 24
_MANY = 20
#: Of LongBench's texts: how many passages, and the most characters of one, some 550 tokens.
_LONG = {"passages": 10, "characters": 2400}
_PARTS = {"odd": slice(1, None, 2), "even": slice(0, None, 2), "all": slice(None)}

#: Speculative RAG as it comes; as the paper has it; with a verifier that is asked whether a draft is right, and one of
#: which counts what the passages add to that.
_OURS, _PAPER = SpeculativeRAG.Options(), SpeculativeRAG.Options(form="paper")
_JUDGED = SpeculativeRAG.Options(judge=True, evidence="passages")
_CALIBRATED = SpeculativeRAG.Options(judge=True, evidence="passages", calibrated=True)

Way = Callable[[Question], dict[str, Any]]


def main() -> None:
    """Write what has no record yet, then the table and the picture."""
    given = _arguments()
    given.out.mkdir(parents=True, exist_ok=True)
    path = given.out / "answers.jsonl"
    append_records(path, _write(given, read_records(path)))
    records = read_records(path)
    sys.stdout.write(f"{table(records)}\n{label_table(records)}")
    draw(records, given.out / "frontier.png")


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("out", type=Path)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--sets", nargs="+", default=SETS)
    parser.add_argument("--rows", type=int, default=100, help="of each set, of both parts")
    parser.add_argument("--part", choices=_PARTS, default="even")
    parser.add_argument("--ways", nargs="*")
    parser.add_argument("--small", default=SMALL)
    parser.add_argument("--adapter", type=Path, help="of the smaller model: the drafter of 'drafts, tuned'")
    return parser.parse_args()


def _write(given: argparse.Namespace, known: Sequence[Mapping[str, Any]]) -> Iterator[dict[str, Any]]:
    """What each way answers, of the questions that have no record."""
    asked = Asked(given.small, given.adapter)
    ways = asked.ways()
    chosen = given.ways
    if chosen is None:
        chosen = [way for way in ways if way != "drafts, tuned" or given.adapter is not None]
    done = {(one["set"], one["id"], one["way"]) for one in known}
    for question, row in asked.warm(_questions(given), chosen) if chosen else ():
        told = {"set": question.set, "id": question.identifier, "row": row, "n": len(question.passages)}
        for way in chosen:
            if (question.set, question.identifier, way) not in done and asked.answers(question, way, row):
                yield {**told, "way": way, **ways[way](question)}


def _questions(given: argparse.Namespace) -> Iterator[tuple[Question, int]]:
    """The first row of each set, then the second ones, so that a run that is stopped has all sets alike."""
    sets = longbench.load_among(given.data, given.sets, given.rows, **_LONG)
    for row in range(given.rows)[_PARTS[given.part]]:
        for questions in sets.values():
            if row < len(questions):
                yield questions[row], row


class Asked:
    """The models, and how each way answers a question.

    Args:
        small: the smaller model's name.
        adapter: of a drafter that was tuned for cited drafts.
    """

    def __init__(self, small: str = SMALL, adapter: Path | None = None) -> None:
        self._adapter = adapter
        self.models = Models("cpu", "auto")
        self.small = small
        self._read_before: dict[tuple[str, str, str, int], dict[str, Any]] = {}

    def ways(self) -> Mapping[str, Way]:
        """By name."""
        return {
            "large": lambda question: self._read(question, LARGE),
            "large, best 5": lambda question: self._read(question, LARGE, 5),
            "large, best 2": lambda question: self._read(question, LARGE, 2),
            "small": lambda question: self._read(question, self.small),
            "small, best 5": lambda question: self._read(question, self.small, 5),
            "small, best 2": lambda question: self._read(question, self.small, 2),
            "cascade": lambda question: self._cascade(question, 0.0),
            "cascade, doubted": lambda question: self._cascade(question, 1.0),
            "cascade, best 5": lambda question: self._cascade(
                replace(question, passages=question.passages[:5]), 0.0
            ),
            "drafts": lambda question: self._draft(question, _OURS, self.small),
            "drafts, paper": lambda question: self._draft(question, _PAPER, self.small),
            "drafts, tuned": lambda question: self._draft(question, _OURS, self.small, self._adapter),
            "large, calibrated": self._weigh,
            "drafts, judged": lambda question: self._draft(question, _JUDGED, self.small),
            "drafts, calibrated": lambda question: self._draft(question, _CALIBRATED, self.small),
            "drafts by large": lambda question: self._draft(question, _OURS, LARGE),
        }

    @staticmethod
    def answers(question: Question, way: str, row: int) -> bool:
        """Whether a way answers a question.

        A cascade none that has choices, and that it doubts an answer is run for every fifth only; labels are weighed
        where there are some, and the large model drafts where there are twenty passages.
        """
        if way == "large, calibrated":
            return question.task.kind != "free-form"
        if way == "drafts by large":
            return len(question.passages) >= _MANY
        return not way.startswith("cascade") or (
            question.task.kind == "free-form" and (way != "cascade, doubted" or row % 10 < 2)
        )

    def warm(
        self, questions: Iterator[tuple[Question, int]], chosen: Sequence[str]
    ) -> Iterator[tuple[Question, int]]:
        """The questions, the first of them once more: loops are compiled and models loaded in no answer's time."""
        for number, (question, row) in enumerate(questions):
            if not number:
                for way in chosen:
                    if self.answers(question, way, 0):
                        self.ways()[way](question)
                self._read_before.clear()
            yield question, row

    def _read(self, question: Question, name: str, best: int | None = None) -> dict[str, Any]:
        """Standard RAG; where there are no more passages than the best ones it is the same reading."""
        passages = question.passages[:best]
        key = question.set, question.identifier, name, len(passages)
        if key not in self._read_before:
            self._read_before = {
                known: one for known, one in self._read_before.items() if known[:2] == key[:2]
            }
            self._read_before[key] = self._reading(question, name, passages)
        return self._read_before[key]

    def _reading(self, question: Question, name: str, passages: tuple[Passage, ...]) -> dict[str, Any]:
        if question.task.kind == "free-form":
            return self._generate(replace(question, passages=passages), name, StandardRAG())[0]
        llm = self.models.get(name)
        reading = PassageReading(self.models.generator(name, "adaptive"), max_tokens=_CHOICE_TOKENS)
        started = time.perf_counter()
        read = llm.executor.run(llm.executor.submit(reading.answering(question.task, passages)))
        return _told(question, read.text, time.perf_counter() - started)

    def _weigh(self, question: Question) -> dict[str, Any]:
        """The choice whose probability the passages raise most: contextual calibration (Zhao et al. 2021)."""
        large, task = self.models.get(LARGE), question.task
        reading = PassageReading(self.models.generator(LARGE))
        started = time.perf_counter()
        prompts = [reading.request(task, passages).prompt for passages in (question.passages, ())]
        requests = [
            ScoringRequest(prompt, (TextPart("choice", choice),))
            for prompt in prompts
            for choice in task.choices
        ]
        scored = large.executor.run(large.executor.submit(LocalScorer(large.loaded).scoring(requests)))
        sizes = [one.parts["choice"].total for one in scored]
        count = len(task.choices)
        raised = [read - bare for read, bare in zip(sizes[:count], sizes[count:], strict=True)]
        chosen = task.choices[raised.index(max(raised))]
        return _told(question, chosen, time.perf_counter() - started)

    def _generate(self, question: Question, name: str, method: Method) -> tuple[dict[str, Any], Result]:
        llm = self.models.get(name)
        started = time.perf_counter()
        result = llm.generate(
            question.task.text, passages=question.passages, method=method, max_tokens=_TOKENS
        )
        seconds = time.perf_counter() - started
        return _told(question, result.text, seconds), result

    def _cascade(self, question: Question, confidence: float) -> dict[str, Any]:
        self.models.get(self.small)
        told, result = self._generate(question, LARGE, Cascade(confidence=confidence, drafter=self.small))
        details = result.details
        assert isinstance(details, CascadeAnswer)
        return {**told, "confidence": details.verdict.confidence, "phases": dict(result.timing.phases)}

    def _draft(
        self, question: Question, options: SpeculativeRAG.Options, drafter: str, adapter: Path | None = None
    ) -> dict[str, Any]:
        if options.settled().form == "paper":
            shipped = shipped_adapters(drafter)
            adapter = next((each for each in shipped if drafter_form(each) == "paper"), None)
        large = self.models.get(LARGE)
        method = SpeculativeRAGPipeline(
            self.models.generator(drafter, options.decoder, adapter=adapter),
            LocalScorer(large.loaded),
            found_in(question),
            options,
            vectors=self.models.vectors,
        )
        started = time.perf_counter()
        answer = method.executor.run(method.executor.submit(method.answering(question.task)))
        told = _told(question, answer.text, time.perf_counter() - started)
        drafts = [
            {
                "text": one.answer,
                "right": bool(one.answer) and question.is_right(one.answer),
                "held": one.held,
                "score": None if one.scores is None else round(one.scores.total, 5),
            }
            for one in answer.drafts
        ]
        phases = {"drafting": answer.timing.drafting, "verification": answer.timing.verification}
        return {**told, "drafts": drafts, "phases": phases}


def _told(question: Question, text: str, seconds: float) -> dict[str, Any]:
    """What is recorded of every answer.

    ``held`` is whether a passage that it cites holds it, ``f1`` SQuAD's of its first sentence.
    """
    sources = [passage_text(passage.title, passage.text) for passage in question.passages]
    held = any(citation.supported for citation in find_citations(text, sources).found)
    told = {"text": text, "right": question.is_right(text), "held": held, "seconds": round(seconds, 4)}
    if question.task.kind != "free-form":
        return {**told, "said": question.choice(text), "gold": question.answers[0]}
    bare = without_citations(text)
    return {
        **told,
        "f1": round(token_f1(first_sentence(bare), question.answers), 4),
        "words": len(bare.split()),
    }


if __name__ == "__main__":
    main()
