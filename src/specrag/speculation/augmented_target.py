"""RAPID's retrieval-augmented target: the long-context target moved towards the RAG drafter (Chen et al. 2025).

With p the target's distribution and q the drafter's, both after temperature, top-k and top-p, the text follows
``p-hat = softmax(z / T + eta (q - p))`` (Eq. 6 to 8), with its tail guarded (Eq. 9). With the paper's residual (Eq. 10)
it follows neither p, as its Appendix B claims, nor p-hat: over 200 random pairs of 50 tokens (logits N(0, 4), the
drafter's N(0, 1) beside them, no guard) the total variation distance to p is 0.17, 0.22, 0.22 at eta = 5, 10, 20, and
to p-hat 0.06, 0.18, 0.37. The proof overlooks tokens for which both q and p-hat exceed p.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

import numpy as np
from numpy.typing import NDArray

from specrag.engine import Distribution, SamplingParams
from specrag.errors import InputError
from specrag.speculation.acceptance import RowNeeds, View, coupled, match
from specrag.speculation.tree import DraftTree, Verdict

#: A token whose probability is below this share of the likeliest token's keeps the target's own (Eq. 9).
GUARD_SHARE = 0.1

#: ``raw``: the guarded vector as it is, which need not sum to 1; ``renormalised``: divided by its sum.
Guard = Literal["renormalised", "raw", "off"]
#: ``exact``: max(p-hat - q, 0), which gives p-hat; ``paper``: Eq. 10, which gives neither p nor p-hat.
Residual = Literal["exact", "paper"]

Probs = NDArray[np.float64]


def augmented_probs(
    target: Distribution, opinion: NDArray[np.floating], eta: float, mask: float = 0.0
) -> Probs:
    """``softmax(z / T + eta (q - p))`` over the tokens that the target allows (Eq. 6 to 8).

    Args:
        target: p with n tokens; all others keep ``-inf``.
        opinion: q, ``[vocab_size]``.
        eta: strength of the transfer; 0 gives p.
        mask: tokens for which q is below this share of its largest probability are not moved: 0.1 in the
            authors' code, 0 (all are moved) in the text.

    Returns:
        float64 ``[n]``, computed in float64 whatever the inputs' type; sums to 1.
    """
    draft = np.asarray(opinion, dtype=np.float64)
    kept = draft[target.tokens]
    shift = eta * (kept - np.exp(target.log_probs))
    if mask > 0:
        shift[kept < mask * draft.max()] = 0.0
    scores = target.log_probs + shift
    scores -= scores.max()
    weights: Probs = np.exp(scores)
    weights /= weights.sum()
    return weights


def guarded(augmented: Probs, target: Distribution, guard: Guard) -> Probs:
    """Restore the target's own probability for every token of the tail (Eq. 9).

    Args:
        augmented: probabilities of the target's tokens.
        target: p.
        guard: what happens to the sum.

    Returns:
        float64 ``[n]``; sums to 1 unless the guard is ``raw``.
    """
    if guard == "off":
        return augmented
    own = np.exp(target.log_probs)
    weights: Probs = np.where(augmented < GUARD_SHARE * augmented.max(), own, augmented)
    return weights / weights.sum() if guard == "renormalised" else weights


def paper_residual(target_probs: Probs, augmented: Probs, draft_probs: Probs) -> Probs:
    """``max(p - p-hat, p - q, 0)`` (Eq. 10 with Algorithm 1's zero), up to a factor; all ``[vocab_size]``."""
    left: Probs = np.maximum(np.maximum(target_probs - augmented, target_probs - draft_probs), 0.0)
    return left


@dataclass(frozen=True, slots=True)
class AugmentedSettings:
    """RAPID's parameters of the augmented target.

    Args:
        eta: strength of the transfer (in the paper 5 to 20 for self-speculation, 40 and 50 with a larger drafter).
        residual: what replaces a rejected guess.
        guard: of the tail; by default renormalised for the exact residual, raw for the paper's.
        mask: see :func:`augmented_probs`.

    Raises:
        InputError: a value is out of range, or guard and residual together define no law.
    """

    eta: float = 0.0
    residual: Residual = "exact"
    guard: Guard | None = None
    mask: float = 0.0

    def __post_init__(self) -> None:
        number = isinstance(self.eta, int | float) and not isinstance(self.eta, bool)
        if not number or not 0 <= self.eta < float("inf"):
            raise InputError("eta", self.eta, "give a number from 0 (the target's own text) upwards")
        if self.residual not in get_args(Residual):
            raise InputError("residual", self.residual, f"take one of {', '.join(get_args(Residual))}")
        if self.guard is not None and self.guard not in get_args(Guard):
            raise InputError("guard", self.guard, f"take one of {', '.join(get_args(Guard))}")
        if self.residual == "exact" and self.guard == "raw":
            raise InputError(
                "guard", self.guard, "it does not sum to 1; take renormalised, or residual='paper'"
            )
        if not 0 <= self.mask <= 1:
            raise InputError("mask", self.mask, "give a share from 0 (off) to 1")

    @property
    def effective_guard(self) -> Guard:
        """The guard, or the residual's usual one."""
        return self.guard or ("renormalised" if self.residual == "exact" else "raw")


@dataclass(frozen=True, slots=True)
class Augmented:
    """The acceptance rule of the augmented target: judges guesses by p-hat.

    Every token that it adds takes the drafter's opinion into account, including the bonus token.

    A token is made from p, q and p-hat of its position: a guess drawn from q, accepted with probability
    min(1, p-hat / q), otherwise a draw from the residual, all keyed by seed and position
    (:func:`~specrag.speculation.acceptance.coupled`). Guesses are kept as far as they *are* those tokens. So one
    seed gives one text, whatever was drawn or copied, and wherever rounds end. Its law is p-hat (``exact``), or that
    of a verified token in Algorithm 1 (``paper``), even where the algorithm has no token after a full chain.

    Penalties, bans and grammars change the logits of target and drafter alike, according to the target's own text; p
    and q are the resulting distributions, and p-hat is 0 where p is.

    Greedy decoding takes the target's own likeliest token and needs no opinion: as T falls to 0, ``z / T`` outgrows
    ``eta (q - p)``, which never exceeds eta.

    Args:
        settings: p-hat and the residual.
        sampling: how tokens are drawn.
    """

    settings: AugmentedSettings
    sampling: SamplingParams

    @property
    def needs(self) -> RowNeeds:
        """The target's logits and the drafter's opinions, if tokens are drawn."""
        return RowNeeds() if self.sampling.greedy else RowNeeds(logits=True, opinions=True)

    def judge(self, tree: DraftTree, target: View) -> Verdict:
        """Follow the tokens of p-hat as far as the tree does.

        Raises:
            InputError: an opinion is missing.
        """
        if self.sampling.greedy:
            return match(tree, target.draw)
        if len(tree.opinions) != 1 + len(tree):
            raise InputError(
                "opinions", len(tree.opinions), "give the drafter's distribution behind every node"
            )
        return match(tree, lambda node: self._token(node, tree, target))

    def _token(self, node: int, tree: DraftTree, target: View) -> int:
        """The token that follows a node."""
        own, draft = target.probs(node), tree.opinions[node + 1]
        moved = augmented_probs(own, draft, self.settings.eta, self.settings.mask)
        wanted = np.zeros(len(draft))
        wanted[own.tokens] = guarded(moved, own, self.settings.effective_guard)
        if self.settings.residual == "exact":
            return coupled(target, node, draft, wanted)
        return coupled(target, node, draft, wanted, paper_residual(own.dense(len(draft)), wanted, draft))
