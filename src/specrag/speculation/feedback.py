"""Which occurrence to copy from: ReSpec's feedback scores (section 3.2.2, Algorithm 1 lines 15-28)."""

from __future__ import annotations

from specrag.errors import InputError

#: Score of an occurrence that was never tried.
FIRST_SCORE = 0.5
#: Positions whose score rose above the first one are looked at even where many newer ones are.
_REMEMBERED = 16


class Feedback:
    """A moving average of the acceptance for each position that was copied from.

    Args:
        rate: weight of the newest observation (the paper's alpha).
        threshold: positions with a lower score are left out (θ_score).
    """

    def __init__(self, rate: float = 0.3, threshold: float = 0.2) -> None:
        if not 0 < rate <= 1:
            raise InputError("feedback_rate", rate, "give a number above 0 and up to 1")
        if not 0 <= threshold < FIRST_SCORE:
            raise InputError(
                "score_threshold", threshold, f"give a number from 0 to below {FIRST_SCORE}, the first score"
            )
        self._rate = rate
        self._threshold = threshold
        self._scores: dict[int, float] = {}

    def score(self, position: int) -> float:
        """Between 0 and 1."""
        return self._scores.get(position, FIRST_SCORE)

    def usable(self, position: int) -> bool:
        """Whether the score is high enough for another try."""
        return self.score(position) >= self._threshold

    def best(self) -> list[int]:
        """The positions with the best scores above the first one, best first; a few."""
        good = [(score, position) for position, score in self._scores.items() if score > FIRST_SCORE]
        good.sort(reverse=True)
        return [position for _, position in good[:_REMEMBERED]]

    def observe(self, position: int, reward: float) -> None:
        """``S <- (1 - rate) S + rate R``.

        Args:
            position: that was copied from.
            reward: accepted over drafted tokens for a winner, 0 for the others (R).
        """
        self._scores[position] = (1 - self._rate) * self.score(position) + self._rate * reward

    def truncate(self, length: int) -> None:
        """Forget positions at or behind ``length``."""
        self._scores = {position: score for position, score in self._scores.items() if position < length}

    def fork(self) -> Feedback:
        """An independent copy."""
        other = Feedback(self._rate, self._threshold)
        other._scores = dict(self._scores)
        return other
