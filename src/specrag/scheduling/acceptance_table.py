"""How often guesses are accepted, by source and grade."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from specrag.speculation.drafters.copied import COPY_RATES
from specrag.speculation.drafters.recycling import RECYCLED_RATES, RECYCLING
from specrag.speculation.drafters.suffix import CORPUS, REFERENCE, SUFFIX
from specrag.speculation.tree import ROOT, DraftTree

#: What was measured elsewhere, by source and grade, and how many observations it is worth.
_PRIORS: Mapping[str, Sequence[float]] = {
    SUFFIX: COPY_RATES,
    REFERENCE: COPY_RATES,
    CORPUS: COPY_RATES,
    RECYCLING: RECYCLED_RATES,
}
_PRIOR_WEIGHT = 10.0
#: The same for a source that nothing is known of.
_UNKNOWN = 0.4
_UNKNOWN_WEIGHT = 2.0
#: What all requests saw is worth at most this many observations to a new one.
_SHARED_WEIGHT = 10.0
#: An observation's weight is halved after about 0.7 times as many more of its kind.
_SHARED_MEMORY = 2000.0
_OWN_MEMORY = 100.0


class AcceptanceTable:
    """Acceptance given that the parent was accepted, estimated by counting.

    Args:
        shared: what other requests saw, for where this one saw little; none for a table that is itself shared.
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
        """Compare a proposal with what came, whether or not it was verified.

        Args:
            tree: the proposal.
            children: its nodes by parent.
            tokens: the tokens that came; behind them nothing is known yet.
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
