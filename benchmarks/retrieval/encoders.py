"""The encoder in the retrieval suite: its speed, and what fewer bits cost, on a part of the corpus."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from benchmarks.retrieval.data import Questions, part_of_corpus
from specrag.bench.interleave import Row, Trial
from specrag.bench.measurement import Measurement
from specrag.bench.records import Outcome
from specrag.bench.suite import BenchContext
from specrag.retrieval.build import DEFAULT_ENCODER
from specrag.retrieval.encoder.encoder import Encoder, load_encoder
from specrag.retrieval.passage import passage_text

METHOD = "standard-rag"
DEPTHS = (1, 5, 20)

#: sentence-transformers' own forward, in bf16.
_OUTSIDE = "transformers+bf16"


@dataclass(frozen=True)
class _Task:
    """Texts to encode and to ask, which of them belong together, and what fp32 says.

    Attributes:
        right: bool ``[questions, passages]``.
        vectors: of the passages in fp32.
        best: each question's best passage in fp32.
    """

    passages: Sequence[str]
    questions: Sequence[str]
    right: np.ndarray
    vectors: np.ndarray
    best: np.ndarray


class Encoders:
    """The variants of the encoder, each loaded when it is first needed."""

    def __init__(self, context: BenchContext) -> None:
        self._context = context
        self._loaded: dict[str, Encoder] = {}

    @property
    def _methods(self) -> tuple[str, ...]:
        dtypes = ("fp32", "bf16", "int8") if self._context.device == "cpu" else ("fp32", "bf16")
        return (_OUTSIDE, *map(method_name, dtypes))

    def get(self, dtype: str) -> Encoder:
        """The default encoder in one of its types."""
        return self._get(method_name(dtype))

    def _get(self, method: str) -> Encoder:
        if method not in self._loaded:
            dtype = method.split("+")[1]
            self._loaded[method] = load_encoder(
                dtype=dtype, device=self._context.device, lean=method != _OUTSIDE
            )
        return self._loaded[method]

    def run(self, data: Path, sets: Sequence[Questions], count: int) -> Iterator[Measurement]:
        """Encode ``count`` passages with every variant, and search them exactly."""

        def prepare() -> Mapping[str, Trial]:
            task = self._task(data, sets, count)
            return {method: self._trial(method, task) for method in self._methods}

        row = Row(name="passages", task="encoders/passages", methods=self._methods, prepare=prepare)
        records = self._context.measure("encoders", [row], self._context.plan(1, warmups=0))
        found = self._context.summarise(
            records, baselines=[_OUTSIDE], dtype="bf16", model=DEFAULT_ENCODER, overall=False
        )
        for entry in found:
            yield replace(entry, dtype=entry.method.split("+")[1])

    def _task(self, data: Path, sets: Sequence[Questions], count: int) -> _Task:
        passages = part_of_corpus(data, sets, count)
        texts = [passage_text(passage.title, passage.text) for passage in passages]
        questions = [question for entry in sets for question in entry.questions]
        right = [[passage.identifier in question.positives for passage in passages] for question in questions]
        asked = [question.text for question in questions]
        exact = self.get("fp32")
        vectors = exact.encode_passages(texts)
        best = (exact.encode_queries(asked) @ vectors.T).argmax(axis=1)
        return _Task(texts, asked, np.array(right), vectors, best)

    def _trial(self, method: str, task: _Task) -> Trial:
        encoder = self._get(method)
        encoder.encode_passages(task.passages[:8])  # warm

        def trial() -> Outcome:
            started = time.perf_counter()
            vectors = encoder.encode_passages(task.passages)
            seconds = time.perf_counter() - started
            order = np.argsort(-(encoder.encode_queries(task.questions) @ vectors.T), axis=1, kind="stable")
            ranked = np.take_along_axis(task.right, order, axis=1)
            firsts = np.where(ranked.any(axis=1), ranked.argmax(axis=1), ranked.shape[1])
            return Outcome(
                seconds=seconds,
                figures={
                    "passages": float(len(task.passages)),
                    "passages_a_second": len(task.passages) / seconds,
                    **hit_shares(firsts),
                    "same_best": float((order[:, 0] == task.best).mean()),
                    "largest_cosine_error": max(1 - float((vectors * task.vectors).sum(axis=1).min()), 0.0),
                },
            )

        return trial


def method_name(variant: str) -> str:
    """The method's name of an index or of a type of the encoder."""
    return f"{METHOD}+{variant}"


def depth_name(depth: int) -> str:
    """The figure's name of the share of questions with a right passage among the first ``depth``."""
    return f"top_{depth}"


def hit_shares(firsts: np.ndarray) -> dict[str, float]:
    """Share of questions whose first right passage, counted from 0, is among the first 1, 5, 20."""
    return {depth_name(depth): float((firsts < depth).mean()) for depth in DEPTHS}
