"""The methods of the kNN-LM suite, and what one run of them tells."""

from __future__ import annotations

import json
import time
from collections import defaultdict
from collections.abc import Mapping, Sequence
from statistics import fmean, median
from typing import TYPE_CHECKING, Any

from benchmarks.passages.subjects import search_figure
from specrag.bench.interleave import Trial
from specrag.bench.records import Outcome
from specrag.methods.decoding import make_decoder
from specrag.methods.knn_lm import KnnLM
from specrag.methods.resources import Resources
from specrag.methods.speculative_search import COST_AWARE
from specrag.speculation.schedule.strides import MAX_STRIDE

if TYPE_CHECKING:
    from specrag.language_model import LanguageModel
    from specrag.methods.knn_lm.decoder import KnnDecoder, KnnRecord
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


def _variant(stride: Any, **values: Any) -> KnnLM.Options:
    """How it speculates; the paper reads one token a pass."""
    return KnnLM.Options(**{"stride": stride, "decoder": "plain", **values})


VARIANTS: Mapping[str, KnnLM.Options] = {
    SEQUENTIAL: _variant("sequential"),
    FIXED: _variant(3),
    **{f"knn-lm+stride={stride}": _variant(stride) for stride in (2, 4, 8, 16)},
    SCHEDULED: _variant("os3"),
    UNCAPPED: _variant("os3", max_match=None),
    WEIGHED: _variant(COST_AWARE),
    BOTH: _variant(COST_AWARE, decoder="adaptive"),
    "knn-lm+A": _variant(3, asynchronous=True),
    "knn-lm+SA": _variant("os3", asynchronous=True),
    ASYNCHRONOUS: _variant("os3", asynchronous=True, max_match=None),
    "knn-lm+PS+uncapped": _variant("os3", prefetch=PREFETCH, max_match=None),
}


class Subjects:
    """Methods over one datastore, index and mixture; each learns from prompt to prompt, as in use.

    Args:
        llm: the model.
        datastore: that is searched.
        index: finds neighbours.
        mixture: how much they count.
    """

    def __init__(self, llm: LanguageModel, datastore: Datastore, index: KeyIndex, mixture: Mixture) -> None:
        self._llm = llm
        self._datastore = datastore
        self._index = index
        self._mixture = {
            "k": mixture.k,
            "weight": mixture.weight,
            "knn_temperature": mixture.temperature,
            "knn_reach": mixture.reach,
        }
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
        from specrag.methods.knn_lm.decoder import KnnDecoder, speculative

        if label not in self._made:
            options = VARIANTS[label].model_copy(update=self._mixture)
            # With nothing that other methods have learned.
            guesses = (
                None
                if options.decoder == "plain"
                else speculative(make_decoder(options.decoder, Resources()))
            )
            self._made[label] = KnnDecoder(
                self._datastore, options, guesses, index=self._index, watch=self._seen.append
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
