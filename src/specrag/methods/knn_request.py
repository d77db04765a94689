"""One request of kNN-LM: guess tokens from the cache, verify them in one search, keep what is right.

The protocol is RaLMSpec's (section 5.3). A round of stride s reads s hidden states: that behind the newest token, and
those behind s - 1 tokens that were guessed; one search for all s then gives the true distributions, and each true token
is drawn by the same keyed draw as its guess. Up to the first difference the tokens stand, and the true token in its
place is the next one. A stride of 0, or no cache, is kNN-LM one search after the other: nothing is looked up or kept.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from specrag.engine.outputs import Outputs, Row
from specrag.engine.passes import Coroutine, Emit, Search
from specrag.engine.processors import Logits, State, build_processors
from specrag.engine.sampling import choose
from specrag.engine.session import Session
from specrag.engine.stopping import FinishReason, StopChecker
from specrag.methods.knn_mixture import mix, neighbour_tokens, normaliser
from specrag.methods.knn_round import Drafts, Guess, Head, Searching, Verified
from specrag.methods.ralm_timeline import Clocked, Timeline
from specrag.methods.speculative_search import search_beside
from specrag.retrieval.knn_build import vector
from specrag.retrieval.knn_cache import FollowerCache
from specrag.retrieval.knn_index import Neighbours
from specrag.retrieval.knn_manifest import HIDDEN
from specrag.scheduling.stride import StrideRound, StrideSchedule
from specrag.speculation.decode import TARGET, DecodedToken, Settings, Step, TextSink
from specrag.speculation.target import Alternative
from specrag.speculation.tree import EMPTY

#: The source of a token that was guessed from the cache.
SOURCE = "knn-cache"

_OUTPUTS = Outputs(logits=True, hidden=(HIDDEN,))


class KnnRequest:
    """Decodes behind a session's tokens.

    Args:
        session: holds the prompt.
        settings: what the caller asks.
        text: turns tokens into characters.
        searching: where neighbours come from.
        schedule: chooses strides.
        timeline: is told when what ran, and tells the time.

    Attributes:
        rounds: of speculation, so far.
    """

    def __init__(
        self,
        session: Session,
        settings: Settings,
        text: TextSink,
        searching: Searching,
        schedule: StrideSchedule,
        timeline: Timeline,
    ) -> None:
        self.rounds: list[StrideRound] = []
        self._session = session
        self._settings = settings
        self._text = text
        self._searching = searching
        self._schedule = schedule
        self._timeline = timeline
        self._clock: Callable[[], float] = timeline.clock
        self._chain = build_processors(settings.sampling, settings.processors)
        self._state = self._chain.start(session.tokens)
        self._checker = StopChecker(settings.stop)
        self._left = settings.stop.max_tokens
        self._ready: Head | None = None  # behind the newest token, if it was read during a search
        self._last = timeline.began

    def run(self) -> Coroutine[FinishReason]:
        """Decode until a stop condition holds; emits a :class:`~specrag.speculation.decode.Step` a round."""
        while True:
            began = self._clock()
            drafts = yield from self._speculate(self._schedule.next())
            drafted = self._clock()
            verified = yield from self._verify(drafts)
            searched = self._clock()
            self._settle(drafts, verified)
            step = self._step(drafts, verified, drafted - began, searched - drafted)
            self._observe(drafts, verified)
            yield Emit(step)
            if step.finish_reason is not None:
                return step.finish_reason

    # -- a round --------------------------------------------------------------------------------------------

    def _speculate(self, wanted: int) -> Coroutine[Drafts]:
        """Read hidden states behind the newest token and behind guesses; ends sooner where the text may.

        Args:
            wanted: the schedule's stride; 0 reads one and guesses nothing.
        """
        drafts = Drafts(len(self._session))
        room = self._session.model.context_length - drafts.length
        stride = min(wanted, self._left, room + 1)
        state = self._state
        while True:
            head = self._ready
            if head is None:
                head = yield from self._read(state)
            self._ready = None
            drafts.heads.append(head)
            cache = self._searching.cache
            if cache is None or wanted == 0:
                return drafts
            guess = yield from self._guess(cache, head)
            drafts.looking.append(guess.seconds)
            drafts.guesses.append(guess.token)
            if len(drafts.guesses) >= stride or guess.token in self._settings.stop.stop_tokens:
                return drafts
            self._session.commit([], guess.token)
            state = self._chain.advance(state, guess.token)

    def _read(self, state: State) -> Coroutine[Head]:
        """Feed the newest token: the head behind it."""
        position = len(self._session)
        with self._timeline.measure("decode", position) as measured:
            rows: list[Row] = yield from self._session.score(EMPTY, _OUTPUTS)
            logits = rows[0].logits
            assert logits is not None
            log_sum, query = normaliser(logits), vector(rows[0].hidden[HIDDEN])
        span = measured.number
        return Head(logits, log_sum, query, state, position, span, self._timeline.seconds([span]))

    def _guess(self, cache: FollowerCache, head: Head) -> Coroutine[Guess]:
        """The token that the cache's neighbours give; the model's own where it holds none."""

        def look_up() -> Guess:
            began = self._clock()
            found = cache.nearest(head.query, self._searching.mixture.k)
            token = self._draw(head, self._mixed(head, found))
            return Guess(token, began, self._clock())

        guess: Guess = yield Search(look_up)
        self._timeline.add([Clocked("look-up", guess.start, guess.end)], head.position)
        return guess

    def _verify(self, drafts: Drafts) -> Coroutine[Verified]:
        """One search for all queries of the round; the last guess is read meanwhile, if that was asked for."""
        searching = self._search(drafts)
        last = drafts.guesses[-1] if drafts.guesses else None
        room = self._session.model.context_length - len(self._session)
        may_go_on = len(drafts.heads) < self._left and room > 0
        ends = last is None or last in self._settings.stop.stop_tokens
        if not self._searching.asynchronous or ends or not may_go_on:
            return (yield from searching)
        beside = yield from search_beside(
            searching,
            self._read_ahead(drafts),
            lambda verified: verified.matched == len(drafts.guesses),
        )
        return beside.found

    def _search(self, drafts: Drafts) -> Coroutine[Verified]:
        verified: Verified = yield Search(lambda: self._find(drafts))
        self._timeline.add(verified.times, drafts.length)
        return verified

    def _read_ahead(self, drafts: Drafts) -> Coroutine[None]:
        token = drafts.guesses[-1]
        state = self._chain.advance(drafts.heads[-1].state, token)
        self._session.commit([], token)
        drafts.ahead = yield from self._read(state)

    def _find(self, drafts: Drafts) -> Verified:
        """Search, draw the true tokens, and bring what follows their neighbours into the cache. Runs in a thread."""
        searching = self._searching
        began = self._clock()
        queries = np.stack([head.query for head in drafts.heads])
        k, prefetch = searching.mixture.k, searching.prefetch
        found = searching.index.search(queries, k, max(k, prefetch))
        ended = self._clock()
        tokens: list[int] = []
        mixed: list[Logits] = []
        matched = 0
        for place, (head, neighbours) in enumerate(zip(drafts.heads, found, strict=True)):
            logits = self._mixed(head, _first(neighbours, k))
            mixed.append(logits)
            tokens.append(self._draw(head, logits))
            if not drafts.guesses or tokens[-1] != drafts.guesses[place]:
                break
            matched += 1
        if searching.cache is not None and drafts.guesses:
            searching.cache.add([_first(neighbours, prefetch) for neighbours in found[: len(tokens)]])
        times = (Clocked("search", began, ended),)
        return Verified(tuple(tokens), matched, tuple(mixed), self._clock() - began, times)

    def _mixed(self, head: Head, found: Neighbours) -> Logits:
        searching = self._searching
        values = searching.datastore.values(found.ids)
        neighbours = neighbour_tokens(values, found.distances, searching.mixture.temperature)
        weights = searching.mixture.weights_at(found.distances[:1])
        return mix(head.logits, head.log_sum, neighbours, float(weights.sum()))  # none without neighbours

    def _draw(self, head: Head, mixed: Logits) -> int:
        processed = self._chain.apply(mixed, head.state) if self._chain.processors else mixed
        return choose(processed, self._settings.sampling, head.position)

    def _settle(self, drafts: Drafts, verified: Verified) -> None:
        """Make the session hold the true tokens, the newest of them pending."""
        session, tokens = self._session, verified.tokens
        fed = len(session) - drafts.length  # guesses in the session
        if fed < len(tokens):
            session.commit([], tokens[-1])
        elif verified.matched == len(drafts.guesses):
            self._ready = drafts.ahead
        else:
            session.truncate(drafts.length + len(tokens))
            session.tokens[-1] = tokens[-1]  # it is pending: the cache holds what is in front of it only
        for token in tokens:
            self._state = self._chain.advance(self._state, token)
        self._left -= len(tokens)

    def _step(self, drafts: Drafts, verified: Verified, drafting: float, verifying: float) -> Step:
        """The verified tokens as the caller sees them, cut where the text ends."""
        fed = len(drafts.heads) - 1 + (drafts.ahead is not None)
        accepted = min(verified.matched, fed)
        shown, reason, count = "", None, 0
        for count, token in enumerate(verified.tokens, start=1):
            is_stop = token in self._settings.stop.stop_tokens
            piece = self._checker.push(token, "" if is_stop else self._text.push(token))
            shown, reason = shown + piece.text, piece.finish_reason
            length = drafts.length + count
            until = self._settings.until
            if until is not None and until(self._session.tokens[:length]):
                reason = reason or "stop"
            if reason is None and length > self._session.model.context_length:
                reason = "length"
            if reason is not None:
                break
        if reason is not None:
            end = self._checker.finish(self._text.finish())
            shown, reason = shown + end.text, end.finish_reason or reason
            self._session.truncate(drafts.length + count)
        now = self._clock()
        seconds, self._last = now - self._last, now
        kept = min(accepted, count)
        return Step(
            tuple(self._told(drafts, verified, place, place < kept) for place in range(count)),
            shown,
            {SOURCE: fed} if fed else {},
            kept,
            seconds,
            drafting,
            verifying,
            reason,
        )

    def _told(self, drafts: Drafts, verified: Verified, place: int, guessed: bool) -> DecodedToken:
        """A token with what the caller asked to know of it: log-probabilities are the mixture's."""
        token, source = verified.tokens[place], SOURCE if guessed else TARGET
        asked = self._settings.log_probs
        if asked is None:
            return DecodedToken(token, source)
        mixed = verified.mixed[place].astype(np.float64) - drafts.heads[place].log_sum
        best = np.lexsort((np.arange(len(mixed)), -mixed))[:asked]
        others = tuple(Alternative(int(other), float(mixed[other])) for other in best)
        return DecodedToken(token, source, float(mixed[token]), others)

    def _observe(self, drafts: Drafts, verified: Verified) -> None:
        read = [*drafts.heads[: len(verified.tokens)], *([self._ready] if self._ready else [])]
        self._timeline.keep([head.span for head in read])
        if self._searching.cache is None:
            return
        round = StrideRound(
            len(drafts.guesses),
            verified.matched,
            drafts.step_seconds,
            verified.seconds,
            look_up_seconds=drafts.look_up_seconds,
        )
        self._schedule.observe(round)
        self.rounds.append(round)


def _first(found: Neighbours, k: int) -> Neighbours:
    return found if len(found) <= k else Neighbours(found.ids[:k], found.distances[:k])
