"""What a round of kNN-LM holds: places that tokens are drawn for, guesses, and what the search has decided."""

from __future__ import annotations

from dataclasses import dataclass, field

from specrag.engine.processors import Logits, State
from specrag.methods.knn_mixture import Mixture, mix, neighbour_tokens
from specrag.methods.knn_reader import Beside
from specrag.methods.ralm_timeline import Clocked
from specrag.retrieval.knn_cache import FollowerCache
from specrag.retrieval.knn_datastore import Datastore
from specrag.retrieval.knn_index import KeyIndex, Neighbours
from specrag.retrieval.scoring import Floats


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
    """A place that a token is drawn for.

    Attributes:
        logits: the model's.
        log_sum: their normaliser.
        query: the hidden state, float32 [dimension].
        state: of the logits processors.
        position: of the draw.
        span: number of the pass's time.
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
        heads: one a query.
        guesses: one a query; none in a round in which each token is searched for in turn.
        looking: seconds of each look-up.
        ahead: the head behind the last guess, if it was fed during the search.
        found: what was searched for one after the other, in a round without guesses.
        read_by: what the last pass read beside its newest token.
    """

    length: int
    heads: list[Head] = field(default_factory=list)
    guesses: list[int] = field(default_factory=list)
    looking: list[float] = field(default_factory=list)
    ahead: Head | None = None
    found: Verified | None = None
    read_by: Beside = field(default_factory=Beside)

    @property
    def step_seconds(self) -> float:
        """Of one speculation step: what passes and look-ups took, by token."""
        return sum(head.seconds for head in self.heads) / len(self.heads) + self.look_up_seconds

    @property
    def look_up_seconds(self) -> float:
        """Mean of a look-up; 0 if there was none."""
        return sum(self.looking) / len(self.looking) if self.looking else 0.0


@dataclass(frozen=True, slots=True, eq=False)
class Verified:
    """What one search has decided, or several.

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
        """Both, one behind the other."""
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
        """How long that took."""
        return self.end - self.start
