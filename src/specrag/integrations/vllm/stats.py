"""What the drafter has done since the server started."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field


@dataclass(slots=True)
class Stats:
    """Counts since the start.

    Attributes:
        calls: by vLLM, one for each of its steps.
        rows: in those calls.
        drafted: guesses given to vLLM.
        accepted: those of them that came true. A guess that vLLM cut off counts as accepted if it was right.
        sources: guesses given to vLLM, by where they were copied from.
        reasons: calls, by what decided how much to guess.
        seconds: spent proposing.
    """

    calls: int = 0
    rows: int = 0
    drafted: int = 0
    accepted: int = 0
    sources: Counter[str] = field(default_factory=Counter)
    reasons: Counter[str] = field(default_factory=Counter)
    seconds: float = 0.0

    def line(self) -> str:
        """One line for a log."""
        share = self.accepted / self.drafted if self.drafted else 0.0
        each = 1e6 * self.seconds / self.rows if self.rows else 0.0
        told = [
            f"{self.calls} steps",
            f"{self.drafted} guesses, {share:.0%} accepted",
            f"{each:.0f} us a row",
            "from " + (_listed(self.sources) or "nowhere"),
            "because " + (_listed(self.reasons) or "of nothing yet"),
        ]
        return "; ".join(told)


def _listed(counts: Counter[str]) -> str:
    return ", ".join(f"{name} {count}" for name, count in counts.most_common())
