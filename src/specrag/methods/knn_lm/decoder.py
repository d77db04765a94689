"""kNN-LM (Khandelwal et al., 2020): a search of a datastore for every token, alone or speculated on (RaLMSpec)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Literal, TypeAlias

from specrag.engine.outputs import Row
from specrag.engine.passes import Coroutine
from specrag.engine.session import Session
from specrag.engine.stopping import FinishReason
from specrag.errors import InputError
from specrag.methods.base import Decoder, PromptNeeds, SpeculativeDecoder
from specrag.methods.decoding import make_decoder
from specrag.methods.knn_lm.mixture import Mixture
from specrag.methods.knn_lm.request import KnnRequest, Reader, Searching
from specrag.methods.knn_lm.store.cache import CAPACITY, FOLLOWERS, FollowerCache
from specrag.methods.knn_lm.store.datastore import Datastore, model_record
from specrag.methods.knn_lm.store.index import KeyIndex, check_k
from specrag.methods.resources import Resources
from specrag.methods.speculative_search import COST_AWARE, MAX_MATCH, make_schedule
from specrag.methods.speculative_search import Stride as CountedStride
from specrag.methods.timeline import IterativeTiming, Span, Timeline
from specrag.speculation.decode import Settings, TextSink
from specrag.speculation.schedule.strides import (
    CostAwareStride,
    FixedStride,
    SharedStrides,
    SharedStrideStats,
    StrideRound,
    StrideSchedule,
)

if TYPE_CHECKING:
    from specrag.models.loading import LoadedModel

#: The number of guesses in a round.
Stride: TypeAlias = CountedStride | Literal["cost-aware"]

#: Neighbours whose followers are kept by default.
PREFETCH = 32


@dataclass(frozen=True, slots=True)
class KnnRecord:
    """What a request cost.

    Attributes:
        rounds: of a method that may speculate; empty otherwise.
        timing: where the time went; ``decode`` is the model's time, ``searching`` the datastore's.
        timeline: what ran when; an activity's place is the position in the sequence.
    """

    rounds: tuple[StrideRound, ...]
    timing: IterativeTiming
    timeline: tuple[Span, ...]


class KnnDecoder:
    """A :class:`~specrag.methods.base.Decoder` that searches a datastore for every token.

    The next token's distribution is ``weight * p_kNN + (1 - weight) * p_LM``; every sampling option applies to it as
    it does to the model's own in plain decoding, and log-probabilities are the mixture's.

    There are two kinds of guesses. Guessing tokens from the cache saves searches: a stride of them is verified in one
    search (RaLMSpec). Reading several tokens at once saves passes of the model, where the drafter of another method
    predicts what the cache gives. Both give the same tokens as one search after the other, with the same seed and the
    same index; with a ``decoder`` this requires a model loaded with ``batch_invariant``, as for every method that
    reads several guesses in a pass.

    Args:
        datastore: open; remains its owner's.
        mixture: how much the neighbours count; by default 1,024 of them, or all if there are fewer.
        index: of the datastore: ``flat``, ``hnsw`` or ``pq``; or another one over the same keys.
        stride: tokens of a round, verified in one search: a number, ``os3``, or a function that makes a schedule for a
            request; ``cost-aware`` guesses nothing where no stride pays
            (:class:`~specrag.speculation.schedule.strides.CostAwareStride`). Tokens that cost no pass come on top of
            it. ``None`` searches one token after the other and guesses nothing.
        decoder: a method's name or a decoder, whose drafter guesses what is read in a pass; ``plain`` or ``None`` reads
            one token per pass, as in the paper. Not used with a stride of ``None``.
        prefetch: neighbours whose followers a search brings into the cache; by default k, but at most 32: the followers
            of more distant ones are not worth the time that storing them takes.
        asynchronous: read the last guess while the search runs.
        max_match: OS3's cap on the match rate that it assumes; ``None`` uses a confidence bound instead of a cap.
        followers: entries after each neighbour that the cache keeps (n).
        capacity: maximum number of entries in a request's cache.
        watch: receives what each request cost, when it has ended.

    Raises:
        InputError: a value cannot be used, or the datastore has fewer than k entries or no such index.
    """

    name = "knn-lm"

    def __init__(  # noqa: PLR0913 - settings, each with a name of its own; methods give them as options
        self,
        datastore: Datastore,
        mixture: Mixture | None = None,
        *,
        index: str | KeyIndex = "flat",
        stride: Stride | None = COST_AWARE,
        decoder: str | SpeculativeDecoder | None = "adaptive",
        prefetch: int | None = None,
        asynchronous: bool = False,
        max_match: float | None = MAX_MATCH,
        followers: int = FOLLOWERS,
        capacity: int = CAPACITY,
        watch: Callable[[KnnRecord], None] | None = None,
    ) -> None:
        if not isinstance(datastore, Datastore):
            raise InputError("datastore", datastore, "open its folder first: Datastore.open(folder)")
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
        self.decoder: SpeculativeDecoder | None = None
        if stride is not None and decoder is not None and decoder != "plain":
            self.decoder = speculative(decoder)
        self._shared = SharedStrides()
        self._worth = SharedStrideStats()
        self._checked: LoadedModel | None = None
        # Report errors in the schedule or the cache now, not in the middle of a request.
        self._schedule()
        FollowerCache(datastore, followers, capacity)

    @property
    def prompt_needs(self) -> PromptNeeds:
        """The decoder's needs, if there is one."""
        return PromptNeeds() if self.decoder is None else self.decoder.prompt_needs

    def check(self, loaded: LoadedModel) -> None:
        """Make sure that the datastore was made with this model.

        Raises:
            DatastoreError: it was made with another one, or in another dtype.
        """
        if loaded is not self._checked:
            self.datastore.check_model(model_record(loaded))
            if self.decoder is not None:
                self.decoder.check(loaded)
            self._checked = loaded

    def decode(
        self,
        session: Session,
        settings: Settings,
        text: TextSink,
        clock: Callable[[], float],
        prompt_rows: Sequence[Row] = (),
    ) -> Coroutine[FinishReason]:
        """See :class:`~specrag.methods.base.Decoder`."""
        timeline = Timeline(clock)
        searching = Searching(self.datastore, self.index, self.mixture)
        if self.stride is not None:
            searching = self._guessing(searching)
        speculation = None if self.decoder is None else self.decoder.speculation(session, settings)
        reader = Reader(session, speculation, clock)
        try:
            yield from reader.start(prompt_rows)
            request = KnnRequest(session, settings, text, searching, self._schedule(), timeline, reader)
            reason = yield from request.run()
        finally:
            reader.close()
        if self.watch is not None:
            total = clock() - timeline.began
            timing = IterativeTiming.of(timeline.spans, total)
            self.watch(KnnRecord(tuple(request.rounds), timing, timeline.spans))
        return reason

    def _guessing(self, searching: Searching) -> Searching:
        """Add a cache for one request."""
        return replace(
            searching,
            prefetch=min(self.mixture.k, PREFETCH) if self.prefetch is None else self.prefetch,
            cache=FollowerCache(self.datastore, self.followers, self.capacity),
            asynchronous=self.asynchronous,
        )

    def _schedule(self) -> StrideSchedule:
        if self.stride is None:
            return FixedStride(1)
        if self.stride == COST_AWARE:
            return CostAwareStride(self.asynchronous, self._worth, joined=self.decoder is not None)
        return make_schedule(
            self.stride, self.asynchronous, self.max_match, self._shared, names=(COST_AWARE, "os3")
        )


def speculative(decoder: str | Decoder) -> SpeculativeDecoder:
    """A decoder whose guesses this method can read.

    Raises:
        InputError: it offers none, or there is no method of this name.
    """
    made = make_decoder(decoder, Resources()) if isinstance(decoder, str) else decoder
    if not isinstance(made, SpeculativeDecoder):
        raise InputError("decoder", made.name, "take one whose guesses another method can use, or plain")
    return made
