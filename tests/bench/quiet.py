"""What a bench shows and watches, left out: no progress, no load of other processes."""

from __future__ import annotations


class Silent:
    """Shows nothing."""

    def begin(self, label: str, total: int) -> None:
        pass

    def advance(self, label: str) -> None:
        pass


class Unwatched:
    """A monitor without figures."""

    def other_share(self) -> float | None:
        return None
