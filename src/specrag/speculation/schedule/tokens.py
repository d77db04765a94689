"""Cost-aware draft trees: guess only as much as raises the expected tokens per second.

A node of a draft tree is worth its place if the chance that it is kept, divided by the cost of its row, beats
the tokens per second of the round without it. Nodes sorted by the chance of their whole path, best first,
are therefore cut where the expected rate is largest; that may be nowhere, everywhere, or in between, so
source, width, depth and whether to guess at all are one decision.

Requests that share a pass wait for each other's rows. The rate is therefore that of the whole pass: the tokens of the
other requests, which are assumed to gain as many per round as this one has lately, over the seconds of all rows. The
more requests there are, the likelier a guess must be.

Prompts that others read in the same pass are excluded: they have to be read anyway, and a second that is saved is
worth what a pass without them yields. Beside a long prompt any guess would look cheap.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from weakref import WeakSet

import numpy as np
from numpy.typing import NDArray

from specrag.engine import Others
from specrag.speculation.drafters.recycling import RECYCLED_RATES, RECYCLING
from specrag.speculation.drafters.suffix import COPY_RATES, CORPUS, REFERENCE, SUFFIX
from specrag.speculation.schedule.base import Timed
from specrag.speculation.schedule.cost_model import ALONE, CostModel
from specrag.speculation.tree import EMPTY, ROOT, DraftTree, Round

#: Rates measured elsewhere, by source and grade, and how many observations each is worth.
_PRIORS: Mapping[str, Sequence[float]] = {
    SUFFIX: COPY_RATES,
    REFERENCE: COPY_RATES,
    CORPUS: COPY_RATES,
    RECYCLING: RECYCLED_RATES,
}
_PRIOR_WEIGHT = 10.0
#: The same for an unknown source.
_UNKNOWN = 0.4
_UNKNOWN_WEIGHT = 2.0
#: What all requests saw is worth at most this many observations to a new request.
_SHARED_WEIGHT = 10.0
#: An observation's weight is halved after about 0.7 times this many further ones of its kind.
_SHARED_MEMORY = 2000.0
_OWN_MEMORY = 100.0


class AcceptanceTable:
    """Acceptance rates by source and grade, given that the parent was accepted, estimated by counting.

    Args:
        shared: what other requests saw, used where this one saw little; ``None`` for a table that is itself shared.
    """

    def __init__(self, shared: AcceptanceTable | None = None) -> None:
        self._shared = shared
        self._memory = _SHARED_MEMORY if shared is None else _OWN_MEMORY
        self._tried: dict[tuple[str, int], float] = {}
        self._accepted: dict[tuple[str, int], float] = {}

    def rate(self, source: str, grade: int) -> float:
        """The estimated chance that a guess of this kind is accepted."""
        key = (source, grade)
        rates = _PRIORS.get(source)
        prior, weight = (_UNKNOWN, _UNKNOWN_WEIGHT) if rates is None else (rates[grade], _PRIOR_WEIGHT)
        if self._shared is not None:
            prior = self._shared.rate(source, grade)
            weight = min(weight + self._shared._tried.get(key, 0.0), _SHARED_WEIGHT)
        return (self._accepted.get(key, 0.0) + weight * prior) / (self._tried.get(key, 0.0) + weight)

    def observe(self, tree: DraftTree, children: Mapping[int, list[int]], tokens: tuple[int, ...]) -> None:
        """Compare a proposal with the tokens that came, whether or not it was verified.

        Args:
            tree: the proposal.
            children: its nodes by parent.
            tokens: the tokens that came; what follows them is not known yet.
        """
        node: int | None = ROOT
        for token in tokens:
            assert node is not None
            hit: int | None = None
            for child in children.get(node, ()):
                right = tree.tokens[child] == token
                self._count(tree.sources[child], tree.grades[child], right)
                if right:
                    hit = child
            node = hit
            if node is None:
                break
        if self._shared is not None:
            self._shared.observe(tree, children, tokens)

    def _count(self, source: str, grade: int, accepted: bool) -> None:
        key = (source, grade)
        keep = 1.0 - 1.0 / self._memory
        self._tried[key] = self._tried.get(key, 0.0) * keep + 1.0
        self._accepted[key] = self._accepted.get(key, 0.0) * keep + float(accepted)


#: Nodes requested if they cost no pass: the paper's draft size.
FREE_NODES = 60
#: Longest chain requested from a drafter that runs a pass for each token.
MOST_PRICED = 12
#: After losing rounds the next proposals are skipped, twice as many each time, up to this number.
_LONGEST_PAUSE = 32
#: A loss below this share of a token's cost is not worth a pause, during which a chance might be missed.
_BEARABLE_LOSS = 0.015
_SMOOTHING = 0.2
#: Before any guess was timed, guessing must promise this many times the tokens per second of not guessing.
_UNTIMED_PROMISE = 1.1
#: Tokens' worth of time granted per round, and the most that can accumulate, for guesses that take passes and promise
#: less than none: they tell when that has changed.
_TRYING, _MOST_TRYING = 0.03, 3.0


@dataclass
class SharedCosts:
    """Costs and acceptance that all requests of a method learn together; they change no output."""

    passes: CostModel = field(default_factory=CostModel)
    acceptance: AcceptanceTable = field(default_factory=AcceptanceTable)
    others: Others = ALONE
    """What was decoding beside a request's rows in the last pass."""
    requests: WeakSet[CostAware] = field(default_factory=WeakSet)
    """The schedules in use."""
    depth_rate: float = 0.6
    """Acceptance of a guess that takes a pass, given the one before it, as the last request left it."""
    draft_seconds: float = 0.0
    """Seconds of such a guess, or of a tree's level; 0 before the first."""
    level_nodes: float = 1.0
    """Nodes of a level."""
    credit: float = 0.0
    """Tokens' worth of time that may be spent on guesses from which no gain is expected."""


@dataclass
class _Ledger:
    """Whether proposals of one kind have paid lately."""

    gain: float = 0.0
    pause: int = 0
    left_out: int = 0

    def resting(self) -> bool:
        if self.left_out < self.pause:
            self.left_out += 1
            return True
        return False

    def record(self, gain: float) -> None:
        """Note what a round's proposal gained, in the cost of a token without one; negative for a loss."""
        self.left_out = 0
        self.gain += _SMOOTHING * (gain - self.gain)
        if self.gain >= -_BEARABLE_LOSS or gain > 0:
            self.pause = 0
        else:
            self.pause = min(max(2 * self.pause, 1), _LONGEST_PAUSE)


class CostAware:
    """A schedule that weighs every guess of one request by its cost.

    Args:
        shared: what the method has learned from all requests.
        most_nodes: the largest tree.
        own_context: if the target's own weights make the guesses, the tokens in front of their session: gives the
            expected price of a guess before any was timed. ``None``: it is taken as free.
    """

    def __init__(
        self, shared: SharedCosts, most_nodes: int = FREE_NODES, own_context: int | None = None
    ) -> None:
        self._shared = shared
        self._costs = shared.passes
        self._acceptance = AcceptanceTable(shared.acceptance)
        self._most_nodes = most_nodes
        self._own_context = own_context
        self._trying = False  # whether guesses are requested from which no gain is expected
        self._ledgers = {False: _Ledger(), True: _Ledger()}
        self._rates_known: dict[tuple[str, int], float] = {}  # until something is learned
        self._priced = False
        self._both = False  # whether a drafter that runs passes was ever asked
        self._asked = False
        self._overhead = 0.0  # seconds of a round outside proposal and pass
        self._depth_rate = shared.depth_rate
        self._draft_seconds = shared.draft_seconds
        self._level_nodes = shared.level_nodes
        self._drafted: DraftTree | None = None  # set if others' guesses stand beside those that took passes
        self._context = 0
        self._others: Others | None = None
        shared.requests.add(self)
        self._gained = 1.0  # tokens per round, lately

    def budget(self, *, runs_passes: bool) -> int:
        self._priced, self._asked, self._trying = runs_passes, False, False
        self._rates_known.clear()  # others may have learned since
        self._both = self._both or runs_passes
        # Compared with a drafter that runs passes, a free proposal takes no time.
        if (runs_passes or not self._both) and self._ledgers[runs_passes].resting():
            return 0
        if not runs_passes:
            self._asked = True
            return self._most_nodes
        rates = self._priced_rates()
        levels = int(np.argmax(rates))
        if rates[levels] < rates[0] * (1.0 if self._draft_seconds else _UNTIMED_PROMISE):
            levels = 0
        if not levels:
            tokens = 1.0 + self._elsewhere + self._depth_rate + self._depth_rate**2
            if tokens * (rates[0] / rates[2] - 1.0) > self._shared.credit:
                return 0
            self._trying = True
        self._asked = True
        return max(round(levels * self._level_nodes), 2)

    def rate(self, source: str, grade: int) -> float:
        kind = (source, grade)
        if kind not in self._rates_known:
            self._rates_known[kind] = self._acceptance.rate(*kind)
        return self._rates_known[kind]

    def least_chance(self) -> float:
        """What a row costs, in tokens of a pass without guesses."""
        single, two = self._costs.seconds(np.array([1, 2]), self._context, self._beside).tolist()
        return float((two - single) * (1 + self._elsewhere) / (single + self._overhead))

    def prefers(self, tree: DraftTree) -> bool:
        return bool(self._rates(tree, self._context)[1].max() >= self._priced_rates()[2:].max())

    def note_drafted(self, guessed: DraftTree) -> None:
        self._drafted = guessed

    def _priced_rates(self) -> NDArray[np.float64]:
        """Expected tokens per second for 0, 1, 2, … levels of guesses that take a pass each."""
        levels = np.arange(MOST_PRICED + 1)
        tokens = self._elsewhere + np.cumsum(self._depth_rate**levels)
        each = self._draft_seconds
        if not each and self._own_context is not None:
            each = float(self._costs.seconds(1, self._own_context))
        seconds = levels * each + self._overhead
        rows = 1 + np.rint(levels * self._level_nodes).astype(np.int64)
        seconds = seconds + self._costs.seconds(rows, self._context, self._beside)
        return np.asarray(tokens / seconds)

    def _rates(self, tree: DraftTree, context: int) -> tuple[NDArray[np.int64], NDArray[np.float64]]:
        """The nodes by chance, likeliest first, and the expected tokens per second of the first 0, 1, 2, … of them."""
        chances = np.empty(len(tree.tokens))
        for node, parent in enumerate(tree.parents):
            rate = self.rate(tree.sources[node], tree.grades[node])
            chances[node] = rate * (1.0 if parent == ROOT else chances[parent])
        # A stable sort: a parent, which is at least as likely and comes first, is never separated from its child.
        order = np.argsort(-chances, kind="stable")
        tokens = self._elsewhere + np.concatenate(([1.0], 1.0 + np.cumsum(chances[order])))
        seconds = self._costs.seconds(np.arange(1, len(tokens) + 1), context, self._beside) + self._overhead
        return order, tokens / seconds

    @property
    def _elsewhere(self) -> float:
        """Tokens that the other requests in a pass gain from it."""
        return self._beside.segments * self._gained

    @property
    def _beside(self) -> Others:
        """What else will be in a pass: what was in the last one, or, before the first, what is known of the others.

        Requests that begin together have not shared a pass yet, and each would guess as if it were alone.
        """
        if self._others is not None:
            return self._others
        waiting = len(self._shared.requests) - 1
        if self._shared.others.segments >= waiting:
            return self._shared.others
        context = waiting * self._context
        return Others(waiting, waiting, context, context)

    def choose(self, tree: DraftTree, context: int) -> DraftTree:
        self._context = context
        if not tree.tokens:
            return tree
        order, rates = self._rates(tree, context)
        count = int(np.argmax(rates))
        return tree.kept(sorted(order[:count].tolist())) if count else EMPTY

    def observe(self, round: Round, timed: Timed) -> None:
        rows = 1 + len(round.tree.tokens)
        self._costs.observe(rows, timed.context, timed.computing, timed.others, mixed=timed.mixed)
        others = self._others = self._shared.others = timed.writing
        self._gained += _SMOOTHING * (1 + len(round.verdict.path) - self._gained)
        overhead = max(timed.total - timed.verifying - timed.proposing, 0.0)
        self._overhead += _SMOOTHING * (min(overhead, timed.computing) - self._overhead)
        self._rates_known.clear()
        self._acceptance.observe(round.proposed, children_of(round.proposed), round.tokens)
        self._shared.credit = min(self._shared.credit + _TRYING, _MOST_TRYING)
        if not self._asked:
            return
        single = float(self._costs.seconds(1, timed.context, others))
        extra = float(self._costs.seconds(rows, timed.context, others)) - single
        # What a token costs without a guess: a share of a pass that also yields others' tokens. All of them wait for
        # this request's rows and proposals, so its gain or loss is weighed against that share.
        share = (single + self._overhead) / (1 + self._elsewhere)
        won = len(round.verdict.path) * share
        gain = (won - extra - timed.proposing) / share
        self._ledgers[self._priced].record(gain)
        if self._trying:
            # A pause of the machine in the middle of a try must not rule out all further tries.
            self._shared.credit += max(gain, -_MOST_TRYING)
        guessed = round.proposed if self._drafted is None else self._drafted
        self._drafted = None
        if self._priced and guessed.tokens:
            self._learn_price(guessed, timed.proposing, round.tokens)

    def _learn_price(self, guessed: DraftTree, seconds: float, tokens: tuple[int, ...]) -> None:
        """Learn what guesses that take passes cost, and how often they come true, verified or not."""
        children, depths = children_of(guessed), [0] * len(guessed.tokens)
        for node, parent in enumerate(guessed.parents):
            depths[node] = 1 if parent == ROOT else depths[parent] + 1
        levels = max(depths)
        step = _SMOOTHING if self._draft_seconds else 1.0
        self._draft_seconds += step * (seconds / levels - self._draft_seconds)
        self._level_nodes += step * (len(depths) / levels - self._level_nodes)
        node, accepted, tried = ROOT, 0, 0
        for token in tokens:
            if node not in children:
                break
            tried += 1
            found = guessed.child(node, token)
            if found is None:
                break
            node, accepted = found, accepted + 1
        if tried:
            step = 1.0 - (1.0 - _SMOOTHING / 2) ** tried
            self._depth_rate += step * (accepted / tried - self._depth_rate)
        shared = self._shared
        shared.draft_seconds, shared.level_nodes = self._draft_seconds, self._level_nodes
        shared.depth_rate = self._depth_rate


def children_of(tree: DraftTree) -> dict[int, list[int]]:
    """A tree's nodes by their parent."""
    children: dict[int, list[int]] = {}
    for node, parent in enumerate(tree.parents):
        children.setdefault(parent, []).append(node)
    return children
