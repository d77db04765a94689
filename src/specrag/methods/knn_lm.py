"""kNN-LM (Khandelwal et al., 2020): a search of a datastore for every token, alone or speculated on (RaLMSpec)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, TypeAlias

from specrag.engine.outputs import Row
from specrag.engine.passes import Coroutine
from specrag.engine.session import Session
from specrag.engine.stopping import FinishReason
from specrag.errors import InputError
from specrag.methods.base import PromptNeeds
from specrag.methods.knn_mixture import Mixture
from specrag.methods.knn_request import KnnRequest
from specrag.methods.knn_round import Searching
from specrag.methods.ralm_timeline import IterativeTiming, Span, Timeline
from specrag.methods.speculative_search import COST_AWARE, MAX_MATCH, make_schedule
from specrag.methods.speculative_search import Stride as CountedStride
from specrag.retrieval.knn_cache import CAPACITY, FOLLOWERS, FollowerCache
from specrag.retrieval.knn_datastore import Datastore, model_record
from specrag.retrieval.knn_index import KeyIndex, check_k
from specrag.scheduling.cost_aware_stride import CostAwareStride, SharedWorth
from specrag.scheduling.stride import FixedStride, SharedStrides, StrideRound, StrideSchedule
from specrag.speculation.decode import Settings, TextSink

if TYPE_CHECKING:
    from specrag.models.loading import LoadedModel

#: How many guesses a round has.
Stride: TypeAlias = CountedStride | Literal["cost-aware"]

#: Neighbours whose followers are kept, unless the caller knows better.
PREFETCH = 32


@dataclass(frozen=True, slots=True)
class KnnRecord:
    """What a request cost.

    Attributes:
        rounds: of a method that may speculate; none without.
        timing: where the time went; ``decode`` is the model's, ``searching`` the datastore's.
        timeline: when what ran; an activity's place is the position in the sequence.
    """

    rounds: tuple[StrideRound, ...]
    timing: IterativeTiming
    timeline: tuple[Span, ...]


class KnnLM:
    """A :class:`~specrag.methods.base.DecodingMethod` that searches a datastore for every token.

    The next token's distribution is ``weight * p_kNN + (1 - weight) * p_LM``; every option of sampling applies to it as
    it does to the model's own in plain decoding, and log-probabilities are the mixture's. Speculation gives the same
    tokens as one search after the other, with the same seed and the same index.

    Args:
        datastore: open; stays its owner's.
        mixture: how much the neighbours count; by default 1,024 of them, or all if there are fewer.
        index: of the datastore: ``flat``, ``hnsw`` or ``pq``; or another one over the same keys.
        stride: tokens of a round, verified in one search: a number, ``os3``, or a function that makes a schedule for a
            request; ``cost-aware`` guesses nothing where no stride pays
            (:class:`~specrag.scheduling.cost_aware_stride.CostAwareStride`); ``None`` searches one token after the
            other and guesses nothing.
        prefetch: neighbours whose followers a search brings into the cache; by default k, but at most 32: those of
            farther ones are not worth the time that keeping them takes.
        asynchronous: read the last guess while the search runs.
        max_match: OS3's cap of the match rate that it reckons with; ``None`` is no cap but a confidence bound.
        followers: entries behind each neighbour that the cache keeps (n).
        capacity: most entries in a request's cache.
        watch: is told what each request cost, when it has ended.

    Raises:
        InputError: a value cannot be used, or the datastore has fewer than k entries or no such index.
    """

    name = "knn-lm"
    prompt_needs = PromptNeeds()

    def __init__(
        self,
        datastore: Datastore,
        mixture: Mixture | None = None,
        *,
        index: str | KeyIndex = "flat",
        stride: Stride | None = COST_AWARE,
        prefetch: int | None = None,
        asynchronous: bool = False,
        max_match: float | None = MAX_MATCH,
        followers: int = FOLLOWERS,
        capacity: int = CAPACITY,
        watch: Callable[[KnnRecord], None] | None = None,
    ) -> None:
        self.datastore = datastore
        self.mixture = mixture or Mixture(k=min(Mixture().k, len(datastore)))
        check_k(self.mixture.k, len(datastore))
        if prefetch is not None and (isinstance(prefetch, bool) or prefetch < 1):
            raise InputError("prefetch", prefetch, "give a whole number of at least 1")
        self.index = datastore.index(index) if isinstance(index, str) else index
        self.stride = stride
        self.prefetch = prefetch
        self.asynchronous = asynchronous
        self.max_match = max_match
        self.followers = followers
        self.capacity = capacity
        self.watch = watch
        self._shared = SharedStrides()
        self._worth = SharedWorth()
        self._checked: LoadedModel | None = None
        # What is wrong with the schedule or the cache is said now, not in mid-request.
        self._schedule()
        FollowerCache(datastore, followers, capacity)

    def check(self, loaded: LoadedModel) -> None:
        """Make sure that the datastore was made with this model.

        Raises:
            DatastoreError: it was made with another one, or in another dtype.
        """
        if loaded is not self._checked:
            self.datastore.check_model(model_record(loaded))
            self._checked = loaded

    def decode(
        self,
        session: Session,
        settings: Settings,
        text: TextSink,
        clock: Callable[[], float],
        prompt_rows: Sequence[Row] = (),
    ) -> Coroutine[FinishReason]:
        """See :class:`~specrag.methods.base.DecodingMethod`."""
        del prompt_rows
        timeline = Timeline(clock)
        cache, prefetch = None, 0
        if self.stride is not None:
            cache = FollowerCache(self.datastore, self.followers, self.capacity)
            prefetch = min(self.mixture.k, PREFETCH) if self.prefetch is None else self.prefetch
        searching = Searching(
            self.datastore, self.index, self.mixture, prefetch, cache, self.asynchronous and cache is not None
        )
        request = KnnRequest(session, settings, text, searching, self._schedule(), timeline)
        reason = yield from request.run()
        if self.watch is not None:
            total = clock() - timeline.began
            record = KnnRecord(
                tuple(request.rounds), IterativeTiming.of(timeline.spans, total), timeline.spans
            )
            self.watch(record)
        return reason

    def _schedule(self) -> StrideSchedule:
        if self.stride is None:
            return FixedStride(1)
        if self.stride == COST_AWARE:
            return CostAwareStride(self.asynchronous, self._worth)
        return make_schedule(
            self.stride, self.asynchronous, self.max_match, self._shared, names=(COST_AWARE, "os3")
        )
