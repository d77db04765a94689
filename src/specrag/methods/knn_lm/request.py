"""Reads the states that kNN-LM searches for: one per pass, or several if a drafter guesses the tokens between them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from specrag.engine import (
    Coroutine,
    Emit,
    FinishReason,
    Logits,
    Outputs,
    Row,
    Search,
    Session,
    State,
    StopChecker,
    build_processors,
    choose,
)
from specrag.methods.knn_lm.mixture import Mixture, mix, neighbour_tokens, normaliser
from specrag.methods.knn_lm.store.build import vector
from specrag.methods.knn_lm.store.cache import FollowerCache
from specrag.methods.knn_lm.store.datastore import Datastore
from specrag.methods.knn_lm.store.index import KeyIndex, Neighbours
from specrag.methods.knn_lm.store.manifest import HIDDEN
from specrag.methods.speculative_search import search_beside
from specrag.methods.timeline import Clocked, Timeline
from specrag.retrieval.index import Floats
from specrag.speculation import (
    EMPTY,
    ROOT,
    TARGET,
    Alternative,
    DecodedToken,
    DraftTree,
    Round,
    Settings,
    Speculation,
    Step,
    TextSink,
    Verdict,
)
from specrag.speculation.schedule import StrideRound, StrideSchedule, Timed

_OUTPUTS = Outputs(logits=True, hidden=(HIDDEN,))


@dataclass(frozen=True, slots=True)
class PassGuesses:
    """The tokens that a drafter guessed for a pass.

    Attributes:
        proposed: the source of each guessed token.
        followed: the sources of the guesses that came true.
    """

    proposed: tuple[str, ...] = ()
    followed: tuple[str, ...] = ()


class Reader:
    """Feeds a session's newest token, together with a tree of tokens that may follow.

    The tokens that it is told to follow need not be final: kNN-LM guesses them too, and may take them back.

    Args:
        session: holds the prompt.
        speculation: whose drafter and schedule guess; ``None`` feeds one token per pass.
        clock: seconds.

    Attributes:
        reading: seconds in which the drafter read the prompt.
    """

    def __init__(self, session: Session, speculation: Speculation | None, clock: Callable[[], float]) -> None:
        self.reading = 0.0
        self._session = session
        self._speculation = speculation
        self._clock = clock
        self._outputs = _OUTPUTS if speculation is None else _OUTPUTS.union(speculation.drafter.outputs)
        self._tree: DraftTree = EMPTY
        self._proposed: DraftTree = EMPTY
        self._rows: Sequence[Row] = ()
        self._path: list[int] = []
        self._timed: Timed | None = None

    def start(self, prompt_rows: Sequence[Row]) -> Coroutine[None]:
        """Let the drafter read the prompt; ``prompt_rows`` are the answers to its method's needs."""
        if self._speculation is not None:
            began = self._clock()
            yield from self._speculation.drafter.start(self._session, prompt_rows)
            self.reading = self._clock() - began

    def read(self, most: int) -> Coroutine[Row]:
        """The row after the newest token.

        Args:
            most: maximum number of guesses after it.
        """
        began = self._clock()
        self._proposed = self._tree = EMPTY
        if self._speculation is not None:
            yield from self._propose(self._speculation, most)
        asked = self._clock()
        self._rows = yield from self._session.score(self._tree, self._outputs)
        ended = self._clock()
        self._path = []
        self._timed = Timed(
            len(self._session), asked - began, ended - asked, ended - began, self._session.report
        )
        return self._rows[0]

    def follow(self, token: int) -> Row | None:
        """The row after a token that follows the last row returned, if it was read too."""
        node = self._tree.child(self._path[-1] if self._path else ROOT, token)
        if node is None:
            return None
        self._path.append(node)
        return self._rows[node + 1]

    def commit(self, token: int) -> PassGuesses:
        """Add the tokens that were followed, and a token after them that is still to be read."""
        guesses = PassGuesses(self._tree.sources, tuple(self._tree.sources[node] for node in self._path))
        self._session.commit(self._path, token)
        if self._speculation is not None:
            assert self._timed is not None
            tokens = (*(self._tree.tokens[node] for node in self._path), token)
            verdict = Verdict(tuple(self._path), token)
            round = Round(self._tree, self._rows, verdict, tokens, self._proposed)
            self._speculation.drafter.observe(round)
            self._speculation.schedule.observe(round, self._timed)
        self._tree, self._rows, self._path = EMPTY, (), []
        return guesses

    def take_back(self, length: int, token: int) -> None:
        """Keep ``length`` tokens, the last of which becomes ``token`` and is still to be read."""
        self._session.truncate(length)
        self._session.tokens[-1] = token  # the cache holds only what is in front of it
        if self._speculation is not None:
            self._speculation.drafter.truncate(length - 1)

    def close(self) -> None:
        """Release what the drafter holds."""
        if self._speculation is not None:
            self._speculation.drafter.close()

    def _propose(self, speculation: Speculation, most: int) -> Coroutine[None]:
        drafter, schedule = speculation.drafter, speculation.schedule
        budget = schedule.budget(runs_passes=drafter.runs_passes)
        if budget and most > 0:
            self._proposed = yield from drafter.propose(self._session, budget, most)
        self._tree = schedule.choose(self._proposed, len(self._session))


@dataclass(frozen=True, slots=True)
class Searching:
    """What a request searches with.

    Args:
        datastore: holds the neighbours' next tokens.
        index: finds neighbours.
        mixture: how much they count.
        prefetch: neighbours whose followers a search brings into the cache; 0 for no cache.
        cache: of this request; ``None`` guesses nothing.
        asynchronous: feed the last guess while the search runs.
    """

    datastore: Datastore
    index: KeyIndex
    mixture: Mixture
    prefetch: int = 0
    cache: FollowerCache | None = None
    asynchronous: bool = False

    def mixed(self, logits: Logits, log_sum: float, found: Neighbours) -> Logits:
        """Logits of the mixture, float32 [vocab_size]; the model's own without neighbours.

        Args:
            logits: the model's.
            log_sum: their normaliser.
            found: the neighbours of the hidden state.
        """
        values = self.datastore.values(found.ids)
        neighbours = neighbour_tokens(values, found.distances, self.mixture.temperature)
        weights = self.mixture.weights_at(found.distances[:1])
        return mix(logits, log_sum, neighbours, float(weights.sum()))


@dataclass(slots=True, eq=False)
class Head:
    """A position that a token is drawn for.

    Attributes:
        logits: the model's.
        log_sum: their normaliser.
        query: the hidden state, float32 [dimension].
        state: of the logits processors.
        position: of the draw.
        span: number of the span that timed the pass.
        seconds: of the pass.
    """

    logits: Logits
    log_sum: float
    query: Floats
    state: State
    position: int
    span: int
    seconds: float


@dataclass(slots=True)
class Drafts:
    """A round so far.

    Attributes:
        length: tokens of the session before it.
        heads: one per query.
        guesses: one per query; none in a round in which each token is searched for in turn.
        looking: seconds of each look-up.
        ahead: the head after the last guess, if it was fed during the search.
        found: what was searched for one after the other, in a round without guesses.
        read_by: what the last pass read after its newest token.
    """

    length: int
    heads: list[Head] = field(default_factory=list)
    guesses: list[int] = field(default_factory=list)
    looking: list[float] = field(default_factory=list)
    ahead: Head | None = None
    found: Verified | None = None
    read_by: PassGuesses = field(default_factory=PassGuesses)

    @property
    def step_seconds(self) -> float:
        """Seconds of one speculation step: the time of passes and look-ups per token."""
        return sum(head.seconds for head in self.heads) / len(self.heads) + self.look_up_seconds

    @property
    def look_up_seconds(self) -> float:
        """Mean seconds of a look-up; 0 if there was none."""
        return sum(self.looking) / len(self.looking) if self.looking else 0.0


@dataclass(frozen=True, slots=True, eq=False)
class Verified:
    """What one search, or several, have decided.

    Attributes:
        tokens: the true ones, up to the first that differs from its guess.
        matched: guesses before it.
        mixed: the logits that each token was drawn from, before processors.
        seconds: of the search, the draws and the cache's update.
        times: of the search alone.
    """

    tokens: tuple[int, ...]
    matched: int
    mixed: tuple[Logits, ...]
    seconds: float
    times: tuple[Clocked, ...]

    def then(self, later: Verified) -> Verified:
        """Both results, one after the other."""
        return Verified(
            self.tokens + later.tokens,
            self.matched + later.matched,
            self.mixed + later.mixed,
            self.seconds + later.seconds,
            self.times + later.times,
        )


@dataclass(frozen=True, slots=True)
class Guess:
    """A token, and when it was looked up."""

    token: int
    start: float
    end: float

    @property
    def seconds(self) -> float:
        """How long the look-up took."""
        return self.end - self.start


#: The source of a token that was guessed from the cache.
SOURCE = "knn-cache"


class KnnRequest:
    """Decodes after a session's tokens.

    Args:
        session: holds the prompt.
        settings: what the caller asks for.
        text: turns tokens into characters.
        searching: where neighbours come from.
        schedule: chooses strides.
        timeline: records what ran when, and provides the clock.
        reader: reads the session.

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
        reader: Reader,
    ) -> None:
        self.rounds: list[StrideRound] = []
        self._session = session
        self._settings = settings
        self._text = text
        self._searching = searching
        self._schedule = schedule
        self._timeline = timeline
        self._reader = reader
        self._clock: Callable[[], float] = timeline.clock
        self._chain = build_processors(settings.sampling, settings.processors)
        self._state = self._chain.start(session.tokens)
        self._checker = StopChecker(settings.stop)
        self._left = settings.stop.max_tokens
        self._ready: Head | None = None  # after the newest token, if it was read during a search
        self._last = timeline.began
        self._told_reading = False

    def run(self) -> Coroutine[FinishReason]:
        """Decode until a stop condition holds; emits one :class:`~specrag.speculation.decode.Step` per round."""
        while True:
            began = self._clock()
            drafts = yield from self._speculate(self._schedule.next())
            drafted = self._clock()
            verified = yield from self._verify(drafts)
            searched = self._clock()
            self._settle(drafts, verified)
            alone = 0.0 if drafts.found is None else drafts.found.seconds
            step = self._step(drafts, verified, drafted - began - alone, searched - drafted + alone)
            self._observe(drafts, verified)
            yield Emit(step)
            if step.finish_reason is not None:
                return step.finish_reason

    # -- a round --------------------------------------------------------------------------------------------

    def _speculate(self, wanted: int) -> Coroutine[Drafts]:
        """Read hidden states after the newest token and after guesses; ends sooner where the text may end.

        Args:
            wanted: the schedule's stride; with 0 every token is searched for at once instead of guessed.
        """
        drafts = Drafts(len(self._session))
        room = self._session.model.context_length - drafts.length
        most = min(self._left, room + 1)
        state = self._state
        while True:
            head = self._ready
            if head is None:
                head = yield from self._read(state, most - len(drafts.heads) - 1)
            self._ready = None
            drafts.heads.append(head)
            cache = self._searching.cache
            if cache is None or wanted == 0:
                token = yield from self._search_alone(drafts)
            else:
                token = yield from self._guess(cache, drafts)
            state = self._chain.advance(state, token)
            ends = len(drafts.heads) >= most or token in self._settings.stop.stop_tokens
            row = None if ends else self._reader.follow(token)
            if row is not None:  # it was read together with the token before, so it costs no pass
                self._ready = _head(row, state, head.position + 1, head.span, 0.0)
                continue
            drafts.read_by = self._reader.commit(token)
            if ends or len(drafts.heads) >= wanted:
                return drafts

    def _read(self, state: State, most: int) -> Coroutine[Head]:
        """Feed the newest token and at most ``most`` guesses; returns the head after the newest token."""
        position = len(self._session)
        with self._timeline.measure("decode", position) as measured:
            row = yield from self._reader.read(most)
            head = _head(row, state, position, -1, 0.0)
        span = measured.number
        return replace(head, span=span, seconds=self._timeline.seconds([span]))

    def _guess(self, cache: FollowerCache, drafts: Drafts) -> Coroutine[int]:
        """The token that the cache's neighbours give; the model's own if the cache holds none."""
        head = drafts.heads[-1]

        def look_up() -> Guess:
            began = self._clock()
            found = cache.nearest(head.query, self._searching.mixture.k)
            token = self._draw(head, self._mixed(head, found))
            return Guess(token, began, self._clock())

        guess: Guess = yield Search(look_up)
        self._timeline.add([Clocked("look-up", guess.start, guess.end)], head.position)
        drafts.looking.append(guess.seconds)
        drafts.guesses.append(guess.token)
        return guess.token

    def _search_alone(self, drafts: Drafts) -> Coroutine[int]:
        """The true token after the newest head."""
        found = yield from self._search(Drafts(drafts.heads[-1].position, [drafts.heads[-1]]))
        drafts.found = found if drafts.found is None else drafts.found.then(found)
        return found.tokens[-1]

    def _verify(self, drafts: Drafts) -> Coroutine[Verified]:
        """One search for all queries of the round; the last guess is read meanwhile if that was requested."""
        if drafts.found is not None:
            return drafts.found
        searching = self._search(drafts)
        last = drafts.guesses[-1] if drafts.guesses else None
        room = self._session.model.context_length - len(self._session)
        may_go_on = len(drafts.heads) < self._left and room >= 0
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
        state = self._chain.advance(drafts.heads[-1].state, drafts.guesses[-1])
        room = self._session.model.context_length - len(self._session)
        drafts.ahead = yield from self._read(state, min(self._left - len(drafts.heads) - 1, room))

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
        return self._searching.mixed(head.logits, head.log_sum, found)

    def _draw(self, head: Head, mixed: Logits) -> int:
        processed = self._chain.apply(mixed, head.state) if self._chain.processors else mixed
        return choose(processed, self._settings.sampling, head.position)

    def _settle(self, drafts: Drafts, verified: Verified) -> None:
        """Make the session hold the true tokens, with the newest of them pending."""
        tokens = verified.tokens
        if verified.matched == len(drafts.guesses):
            self._ready = drafts.ahead
        else:
            self._reader.take_back(drafts.length + len(tokens), tokens[-1])
        for token in tokens:
            self._state = self._chain.advance(self._state, token)
        self._left -= len(tokens)

    def _step(self, drafts: Drafts, verified: Verified, drafting: float, verifying: float) -> Step:
        """The verified tokens as the caller sees them, cut where the text ends."""
        fed = len(drafts.heads) - 1 + (drafts.ahead is not None)
        drafted = {SOURCE: fed} if fed else {}
        accepted = min(verified.matched, fed)
        if drafts.found is not None:  # the guesses are those of the pass, followed or not
            drafted, accepted = dict(Counter(drafts.read_by.proposed)), len(drafts.read_by.followed)
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
        reading = 0.0 if self._told_reading else self._reader.reading
        self._told_reading = True
        kept = min(accepted, count)
        return Step(
            tuple(self._told(drafts, verified, place, place < kept) for place in range(count)),
            shown,
            drafted,
            kept,
            seconds,
            drafting,
            verifying,
            reason,
            reading,
        )

    def _told(self, drafts: Drafts, verified: Verified, place: int, guessed: bool) -> DecodedToken:
        """A token with the information the caller asked for: log-probabilities are the mixture's."""
        token, source = verified.tokens[place], TARGET
        if guessed:
            source = SOURCE if drafts.found is None else drafts.read_by.followed[place]
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
            alone=len(verified.tokens) if drafts.found is not None else 1,
        )
        self._schedule.observe(round)
        self.rounds.append(round)


def _head(row: Row, state: State, position: int, span: int, seconds: float) -> Head:
    logits = row.logits
    assert logits is not None
    return Head(logits, normaliser(logits), vector(row.hidden[HIDDEN]), state, position, span, seconds)


def _first(found: Neighbours, k: int) -> Neighbours:
    return found if len(found) <= k else Neighbours(found.ids[:k], found.distances[:k])
