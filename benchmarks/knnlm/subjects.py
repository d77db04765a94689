"""The methods of the kNN-LM suite, and what one run of them tells."""

from __future__ import annotations

import json
import time
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean, median
from typing import TYPE_CHECKING

from benchmarks.passages.subjects import search_figure
from specrag.bench.interleave import Trial
from specrag.bench.records import Outcome
from specrag.methods.speculative_search import COST_AWARE, MAX_MATCH
from specrag.speculation.schedule.strides import MAX_STRIDE

if TYPE_CHECKING:
    from specrag.language_model import LanguageModel
    from specrag.methods.knn_lm.decoder import KnnDecoder, KnnRecord, Stride
    from specrag.methods.knn_lm.mixture import Mixture
    from specrag.methods.knn_lm.store.datastore import Datastore
    from specrag.methods.knn_lm.store.index import KeyIndex
    from specrag.request import Options

SEQUENTIAL, FIXED = "sequential", "knn-lm"
SCHEDULED, UNCAPPED = "knn-lm+S", "knn-lm+S+uncapped"
WEIGHED = "knn-lm+cost-aware"
ASYNCHRONOUS = "knn-lm+SA+uncapped"
BOTH = "knn-lm+cost-aware+respec"

#: What P switches on: neighbours whose followers are cached where k is smaller.
PREFETCH = 64


@dataclass(frozen=True, slots=True)
class Variant:
    """How it speculates; ``stride=None`` is one search after the other; the paper reads one token a pass."""

    stride: Stride | None = 3
    prefetch: int | None = None
    asynchronous: bool = False
    max_match: float | None = MAX_MATCH
    decoder: str | None = None


VARIANTS: Mapping[str, Variant] = {
    SEQUENTIAL: Variant(None),
    FIXED: Variant(),
    **{f"knn-lm+stride={stride}": Variant(stride) for stride in (2, 4, 8, 16)},
    SCHEDULED: Variant("os3"),
    UNCAPPED: Variant("os3", max_match=None),
    WEIGHED: Variant(COST_AWARE),
    BOTH: Variant(COST_AWARE, decoder="adaptive"),
    "knn-lm+A": Variant(3, asynchronous=True),
    "knn-lm+SA": Variant("os3", asynchronous=True),
    ASYNCHRONOUS: Variant("os3", asynchronous=True, max_match=None),
    "knn-lm+PS+uncapped": Variant("os3", PREFETCH, max_match=None),
}


class Subjects:
    """Methods over one datastore, index and mixture; each learns from prompt to prompt, as in use.

    Args:
        llm: the model.
        datastore: that is searched.
        index: finds neighbours.
        mixture: how much they count.
    """

    def __init__(
        self, llm: LanguageModel, datastore: Datastore, index: str | KeyIndex, mixture: Mixture
    ) -> None:
        self._llm = llm
        self._datastore = datastore
        self._index = index
        self._mixture = mixture
        self._made: dict[str, KnnDecoder] = {}
        self._seen: list[KnnRecord] = []

    def trials(self, labels: Sequence[str], prompt: Sequence[int], options: Options) -> dict[str, Trial]:
        """A trial for each label: one whole text, of the same number of tokens for all."""
        return {label: self._trial(label, prompt, options) for label in labels}

    def _trial(self, label: str, prompt: Sequence[int], options: Options) -> Trial:
        method = self._method(label)
        whole: Options = {**options, "ignore_eos": True, "method": method}

        def run() -> Outcome:
            self._seen.clear()
            started = time.perf_counter()
            generation = self._llm.generate(list(prompt), **whole)
            seconds = time.perf_counter() - started
            tokens = [token.token for token in generation.tokens]
            (record,) = self._seen
            return Outcome(
                tokens=len(tokens),
                seconds=seconds,
                output=json.dumps(tokens),
                drafted=generation.usage.drafted,
                accepted=generation.usage.accepted,
                figures=_figures(record, len(tokens)),
            )

        return run

    def _method(self, label: str) -> KnnDecoder:
        from specrag.methods.knn_lm.decoder import KnnDecoder

        if label not in self._made:
            variant = VARIANTS[label]
            self._made[label] = KnnDecoder(
                self._datastore,
                self._mixture,
                index=self._index,
                stride=variant.stride,
                prefetch=variant.prefetch,
                asynchronous=variant.asynchronous,
                max_match=variant.max_match,
                decoder=variant.decoder,
                watch=self._seen.append,
            )
        return self._made[label]


def _figures(record: KnnRecord, tokens: int) -> dict[str, float]:
    timing = record.timing
    figures = {
        "retrieval_ms": 1e3 * timing.retrieval,
        "generation_ms": 1e3 * timing.generation,
        "discarded_ms": 1e3 * timing.discarded,
        "overlapped_ms": 1e3 * timing.overlapped,
        "step_ms": 1e3 * timing.decode / max(sum(span.activity == "decode" for span in record.timeline), 1),
        "chunks": float(tokens),
        "tokens_per_pass": tokens / sum(span.activity == "decode" for span in record.timeline),
    }
    searches: dict[int, list[float]] = defaultdict(list)
    if record.rounds:
        figures["step_ms"] = 1e3 * fmean(round.speculation_seconds for round in record.rounds)
        figures["matched"] = float(sum(round.matched for round in record.rounds))
        wrong = sum(round.matched < round.stride for round in record.rounds)
        figures["looked_up"] = figures["matched"] + wrong
        figures["stride"] = fmean(round.stride for round in record.rounds)
        for round in record.rounds:
            # One without guesses does not update the cache, and so is not what a search of one guess takes.
            if not 0 < round.stride <= MAX_STRIDE:
                continue
            searches[round.stride].append(round.verification_seconds)
    else:
        searches[1] = [span.seconds for span in record.timeline if span.activity == "search"]
    figures.update({search_figure(queries): 1e3 * median(found) for queries, found in searches.items()})
    return figures
