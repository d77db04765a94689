"""When a replica is left out, and when it comes back: a circuit breaker that only a probe closes again."""

from __future__ import annotations

from collections.abc import Callable

#: Longest rest of a replica that stays sick, in seconds.
LONGEST_REST = 30.0


class Breaker:
    """State of one replica: well, busy for a while, or out until a probe succeeds.

    Args:
        clock: seconds.
        failures: in a row that take the replica out.
        rest: seconds before a probe of one that is out; doubled with each probe that fails.

    Attributes:
        reason: why the replica is out; empty while it is in.
    """

    def __init__(self, clock: Callable[[], float], failures: int = 3, rest: float = 1.0) -> None:
        self._clock = clock
        self._most = failures
        self._first_rest = rest
        self._rest = rest
        self._failed = 0
        self._probe_at = 0.0
        self._busy_until = 0.0
        self.reason = ""

    @property
    def is_open(self) -> bool:
        """Whether the replica is out."""
        return bool(self.reason)

    @property
    def is_ready(self) -> bool:
        """Whether it may be given work now."""
        return not self.is_open and self.busy_seconds <= 0

    @property
    def busy_seconds(self) -> float:
        """Seconds for which the replica has asked to be spared; 0 for none."""
        return max(self._busy_until - self._clock(), 0.0)

    @property
    def rest_seconds(self) -> float:
        """Seconds until a probe of a replica that is out; 0 where it is due."""
        return max(self._probe_at - self._clock(), 0.0)

    @property
    def probe_due(self) -> bool:
        """Whether the replica is out and may be asked whether it is well again."""
        return self.is_open and self.rest_seconds <= 0

    def succeed(self) -> None:
        """A call went well. One that is out stays out: the call began before."""
        self._failed = 0

    def fail(self, reason: str, *, at_once: bool = False) -> None:
        """A call failed.

        Args:
            reason: for people; names no address and no key.
            at_once: the replica is out, however few calls have failed.
        """
        self._failed += 1
        if not self.is_open and (at_once or self._failed >= self._most):
            self._open(reason)

    def probe_succeeded(self) -> None:
        """A probe went well: the replica is in."""
        self._failed, self._rest, self.reason = 0, self._first_rest, ""

    def probe_failed(self, reason: str) -> None:
        """A probe failed: the replica is out, for twice as long as before."""
        if self.is_open:
            self._rest = min(2 * self._rest, LONGEST_REST)
        self._open(reason)

    def _open(self, reason: str) -> None:
        self._probe_at = self._clock() + self._rest
        self.reason = reason

    def spare(self, seconds: float) -> None:
        """The replica is well and has asked for a pause, as by ``Retry-After``."""
        self._busy_until = max(self._busy_until, self._clock() + seconds)
