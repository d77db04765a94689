"""What ``specrag bench passages`` times: the sequential baselines and RaLMSpec, whole and in parts."""

from __future__ import annotations

import json
import time
from collections import defaultdict
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from statistics import fmean, median
from typing import TYPE_CHECKING, Any

from benchmarks.passages.retrievers import SYNTHETIC, threads_apart
from specrag.bench.interleave import Trial
from specrag.bench.machine import half_precision
from specrag.bench.records import Outcome
from specrag.methods.decoding import make_decoder
from specrag.methods.ralmspec import RaLMSpec, Sequential
from specrag.methods.ralmspec.iterative import IterativeMethod
from specrag.methods.ralmspec.sequential import SequentialPipeline
from specrag.methods.ralmspec.speculative import RaLMSpecPipeline
from specrag.methods.retriever import PassageRetriever
from specrag.methods.speculative_search import COST_AWARE as COST_AWARE_STRIDE

if TYPE_CHECKING:
    from specrag.language_model import LanguageModel
    from specrag.methods.ralmspec.result import IterativeAnswer
    from specrag.request import Options

SEQUENTIAL, REUSE = "sequential", "sequential-kv-reuse"
BASELINES = (SEQUENTIAL, REUSE)
RALMSPEC, PSA, UNCAPPED = "ralmspec", "ralmspec+PSA", "ralmspec+PSA+uncapped"
COST_AWARE = "ralmspec+P+cost-aware"
APART = "ralmspec+PSA+apart"


def _parts(letters: str, **others: Any) -> RaLMSpec.Options:
    """The paper's parts: prefetch (P), OS3 in place of a fixed stride (S), asynchronous verification (A)."""
    values: dict[str, Any] = {"asynchronous": "A" in letters}
    if "S" not in letters:
        values["stride"] = 3
    if "P" not in letters:
        values["prefetch"] = 1
    return RaLMSpec.Options(**{**values, **others})


#: Every combination of prefetch, scheduler and asynchronous verification.
COMBINATIONS: Mapping[str, RaLMSpec.Options] = {
    RALMSPEC: _parts(""),
    **{f"ralmspec+{letters}": _parts(letters) for letters in ("P", "S", "A", "PS", "PA", "SA", "PSA")},
}

VARIANTS: Mapping[str, RaLMSpec.Options] = {
    **COMBINATIONS,
    **{f"ralmspec+stride={stride}": _parts("", stride=stride) for stride in (2, 4, 8)},
    "ralmspec+prefetch=256": _parts("", prefetch=256),
    "ralmspec+S+uncapped": _parts("S", max_match=None),
    UNCAPPED: _parts("PSA", max_match=None),
    COST_AWARE: _parts("P", stride=COST_AWARE_STRIDE),
    APART: _parts("PSA"),  # half of the processors for searches, the other half for the model
}


def make(
    label: str, llm: LanguageModel, retriever: PassageRetriever, passage_tokens: int = 256
) -> IterativeMethod:
    """The method of a label."""
    decoder = make_decoder("plain", llm.resources)
    if label in BASELINES:
        waiting = Sequential.Options(reuse=label == REUSE, passage_tokens=passage_tokens)
        return SequentialPipeline(llm, retriever, waiting, decoder)
    options = VARIANTS[label].model_copy(update={"passage_tokens": passage_tokens})
    return RaLMSpecPipeline(llm, retriever, options, decoder)


class Models:
    """The model, loaded when it is first needed: a run that only resumes loads nothing.

    Args:
        name, device: of the model.
        dtype: by default :func:`~specrag.bench.machine.half_precision`.
        batch_invariant: as for :func:`specrag.load`.
    """

    def __init__(
        self, name: str, device: str, dtype: str | None = None, batch_invariant: bool = False
    ) -> None:
        self._name = name
        self._device = device
        self._dtype = dtype or half_precision(device)
        self._batch_invariant = batch_invariant
        self._loaded: LanguageModel | None = None

    def get(self) -> LanguageModel:
        """The model."""
        if self._loaded is None:
            from specrag.language_model import load

            self._loaded = load(
                self._name, dtype=self._dtype, device=self._device, batch_invariant=self._batch_invariant
            )
        return self._loaded

    def close(self) -> None:
        """Make room."""
        if self._loaded is not None:
            self._loaded.close()
            self._loaded = None


class Subjects:
    """Methods over one retriever; each learns from question to question, as in use.

    Args:
        llm: the model.
        retriever: what is searched.
        new: tokens of an answer.
    """

    def __init__(self, llm: LanguageModel, retriever: PassageRetriever, new: int) -> None:
        self._llm = llm
        self._retriever = retriever
        self._new = new
        self._made: dict[str, IterativeMethod] = {}

    def trials(
        self, labels: Sequence[str], question: str, *, keep_timeline: bool = False
    ) -> dict[str, Trial]:
        """A trial for each label: one whole answer, of the same number of tokens for all."""
        for label in labels:
            if label not in self._made:
                self._made[label] = make(label, self._llm, self._retriever)
        return {label: self._trial(label, question, keep_timeline) for label in labels}

    def _trial(self, label: str, question: str, keep_timeline: bool) -> Trial:
        method = self._made[label]
        options: Options = {"max_tokens": self._new, "ignore_eos": True}

        executor = method.llm.executor

        def run() -> Outcome:
            with threads_apart(self._retriever) if label == APART else nullcontext():
                started = time.perf_counter()
                answer = executor.run(executor.submit(method.answering(question, **options)))
                seconds = time.perf_counter() - started
            output = timeline_json(answer) if keep_timeline else fingerprint(answer)
            return Outcome(
                tokens=len(answer.tokens), seconds=seconds, output=output, figures=_figures(answer)
            )

        return run


def fingerprint(answer: IterativeAnswer) -> str:
    """The tokens, and the passage in front of which each part of them was written."""
    ids = {source.number: source.passage.id for source in answer.sources}
    passages = [None if chunk.source is None else ids[chunk.source] for chunk in answer.chunks]
    return json.dumps([[token.token for token in answer.tokens], passages])


def timeline_json(answer: IterativeAnswer) -> str:
    """When what ran: ``[activity, start, end, kept]`` for each span, in seconds."""
    return json.dumps(
        [[span.activity, round(span.start, 6), round(span.end, 6), span.kept] for span in answer.timeline]
    )


def search_figure(queries: int) -> str:
    """The name of the figure that holds the milliseconds of a search for so many queries (b)."""
    return f"search_{queries}_ms"


def _figures(answer: IterativeAnswer) -> dict[str, float]:
    timing, chunks = answer.timing, answer.counts.kept
    encoded = sum(span.activity == "encode" for span in answer.timeline)
    written = sum(
        span.seconds for span in answer.timeline if span.kept and span.activity in ("prefill", "decode")
    )
    figures = {
        "retrieval_ms": 1e3 * timing.retrieval,
        "generation_ms": 1e3 * timing.generation,
        "discarded_ms": 1e3 * timing.discarded,
        "overlapped_ms": 1e3 * timing.overlapped,
        "step_ms": 1e3 * (written / chunks + (timing.encoding + timing.lookup) / encoded),
        "chunks": float(chunks),
        "distractors": float(sum(source.passage.source == SYNTHETIC for source in answer.sources)),
    }
    searches: dict[int, list[float]] = defaultdict(list)
    if answer.rounds:
        figures["matched"] = float(sum(round.matched for round in answer.rounds))
        wrong = sum(round.matched < round.stride for round in answer.rounds)
        figures["looked_up"] = figures["matched"] + wrong
        figures["stride"] = fmean(round.stride for round in answer.rounds)
        for round in answer.rounds:
            searches[round.stride].append(round.verification_seconds)
    else:
        searches[1] = [span.seconds for span in answer.timeline if span.activity == "search"]
    figures.update({search_figure(queries): 1e3 * median(found) for queries, found in searches.items()})
    return figures
