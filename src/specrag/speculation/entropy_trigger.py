"""When to look up a continuation: ReSpec's entropy trigger (section 3.2.1, Algorithm 1 lines 3-14)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from specrag.errors import InputError


@dataclass(frozen=True, slots=True)
class EntropyTrigger:
    """Chooses the suffix to look up, and whether to.

    A suffix of k tokens has the confidence ``C_k = H_k + length_weight / k`` (lower is better), where ``H_k``
    is the mean entropy of the distributions that its tokens were drawn from. The best suffix is looked up if
    its ``H_k`` is at most the threshold.

    Args:
        max_key: the longest suffix (the paper's l).
        threshold: of the mean entropy, nats (θ_entropy).
        length_weight: what a short suffix is charged, nats (λ_e).
    """

    max_key: int = 3
    threshold: float = 1.5
    length_weight: float = 0.3

    def __post_init__(self) -> None:
        if self.max_key < 1:
            raise InputError("max_key", self.max_key, "give the longest suffix to look up, at least 1")
        if not self.threshold >= 0:
            raise InputError("entropy_threshold", self.threshold, "give nats, 0 or more")
        if not self.length_weight >= 0:
            raise InputError("length_weight", self.length_weight, "give nats, 0 or more")

    def key_length(self, entropies: Sequence[float]) -> int:
        """The length of the suffix to look up, 0 for none.

        Args:
            entropies: nats, of the distributions that the newest tokens were drawn from, the newest last; as
                many as are known.
        """
        best, best_entropy, best_length = float("inf"), float("inf"), 0
        total = 0.0
        for length in range(1, min(self.max_key, len(entropies)) + 1):
            total += entropies[-length]
            entropy = total / length
            confidence = entropy + self.length_weight / length
            if confidence < best:
                best, best_entropy, best_length = confidence, entropy, length
        return best_length if best_entropy <= self.threshold else 0
