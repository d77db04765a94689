"""kNN-LM (Khandelwal et al., 2020): a search of a datastore for every token, alone or speculated on (RaLMSpec)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from specrag.engine import Coroutine, FinishReason, Row, Session
from specrag.errors import InputError
from specrag.methods.base import Decoder, PromptNeeds, SpeculativeDecoder
from specrag.methods.knn_lm.mixture import MOST_NEIGHBOURS, Mixture
from specrag.methods.knn_lm.request import KnnRequest, Reader, Searching
from specrag.methods.knn_lm.store.cache import CAPACITY, FOLLOWERS, FollowerCache
from specrag.methods.knn_lm.store.datastore import Datastore, model_record
from specrag.methods.knn_lm.store.index import KeyIndex, check_k
from specrag.methods.speculative_search import COST_AWARE, make_schedule
from specrag.methods.timeline import IterativeTiming, Span, Timeline
from specrag.speculation import Settings, TextSink
from specrag.speculation.schedule import (
    CostAwareStride,
    FixedStride,
    SharedStrides,
    SharedStrideStats,
    StrideRound,
    StrideSchedule,
)

if TYPE_CHECKING:
    from specrag.methods.knn_lm import KnnLM
    from specrag.models import LoadedModel

#: Neighbours whose followers are kept by default: those of more distant ones are not worth the time that storing them
#: takes.
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

    With a ``stride`` of ``cost-aware`` nothing is guessed where no stride pays
    (:class:`~specrag.speculation.schedule.strides.CostAwareStride`). Tokens that cost no pass come on top of a stride.

    Args:
        datastore: open; remains its owner's.
        options: of the method, but for the datastore and the decoder.
        decoder: its drafter guesses what is read in a pass; ``None`` reads one token per pass, as in the paper. With a
            stride of ``sequential`` it is not used.
        index: finds neighbours in place of the datastore's index that the options name; over the same keys.
        watch: receives what each request cost, when it has ended.

    Attributes:
        followers: entries after each neighbour that the cache keeps (n).
        capacity: maximum number of entries in a request's cache.

    Raises:
        InputError: it is no datastore, it has fewer than k entries or no such index, or OS3 has no use for its cap.
    """

    name = "knn-lm"
    followers = FOLLOWERS
    capacity = CAPACITY

    def __init__(
        self,
        datastore: Datastore,
        options: KnnLM.Options,
        decoder: SpeculativeDecoder | None = None,
        *,
        index: KeyIndex | None = None,
        watch: Callable[[KnnRecord], None] | None = None,
    ) -> None:
        if not isinstance(datastore, Datastore):
            raise InputError("datastore", datastore, "open its folder first: Datastore.open(folder)")
        k = min(MOST_NEIGHBOURS, len(datastore)) if options.k is None else options.k
        check_k(k, len(datastore))
        self.datastore = datastore
        self.options = options
        self.mixture = Mixture(k, options.weight, options.knn_temperature, options.knn_reach)
        self.index = datastore.index(options.index) if index is None else index
        self.decoder = None if options.stride == "sequential" else decoder
        self.watch = watch
        self._shared = SharedStrides()
        self._worth = SharedStrideStats()
        self._checked: LoadedModel | None = None
        self._schedule()  # OS3 refuses a cap of 1: say so now, not in the middle of a request

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
        timeline = Timeline(clock)
        searching = Searching(self.datastore, self.index, self.mixture)
        if self.options.stride != "sequential":
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
        prefetch = self.options.prefetch
        return replace(
            searching,
            prefetch=min(self.mixture.k, PREFETCH) if prefetch is None else prefetch,
            cache=FollowerCache(self.datastore, self.followers, self.capacity),
            asynchronous=self.options.asynchronous,
        )

    def _schedule(self) -> StrideSchedule:
        stride, asynchronous = self.options.stride, self.options.asynchronous
        if stride == "sequential":
            return FixedStride(1)
        if stride == COST_AWARE:
            return CostAwareStride(asynchronous, self._worth, joined=self.decoder is not None)
        return make_schedule(stride, asynchronous, self.options.max_match, self._shared)


def speculative(decoder: Decoder) -> SpeculativeDecoder:
    """A decoder whose guesses this method can read.

    Raises:
        InputError: it offers none.
    """
    if not isinstance(decoder, SpeculativeDecoder):
        raise InputError("decoder", decoder.name, "take one whose guesses another method can use, or plain")
    return decoder
