"""When a replica is left out and when it comes back: a circuit breaker that only a successful probe closes again."""

from __future__ import annotations

from collections.abc import Callable

#: Longest rest of a replica that keeps failing, in seconds.
LONGEST_REST = 30.0


class Breaker:
    """State of one replica: healthy, busy for a while, or out until a probe succeeds.

    Args:
        clock: returns seconds.
        failures: failures in a row that take the replica out.
        rest: seconds before a replica that is out is probed; doubled with each failed probe.

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
        """Seconds for which the replica still asks to be spared; 0 for none."""
        return max(self._busy_until - self._clock(), 0.0)

    @property
    def rest_seconds(self) -> float:
        """Seconds until a replica that is out is probed; 0 if the probe is due."""
        return max(self._probe_at - self._clock(), 0.0)

    @property
    def probe_due(self) -> bool:
        """Whether the replica is out and it is time to check whether it has recovered."""
        return self.is_open and self.rest_seconds <= 0

    def succeed(self) -> None:
        """A call succeeded. A replica that is out stays out, since the call began before."""
        self._failed = 0

    def fail(self, reason: str, *, at_once: bool = False) -> None:
        """A call failed.

        Args:
            reason: for people; reveals no address and no key.
            at_once: take the replica out, however few calls have failed.
        """
        self._failed += 1
        if not self.is_open and (at_once or self._failed >= self._most):
            self._open(reason)

    def probe_succeeded(self) -> None:
        """A probe succeeded: the replica is in."""
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
        """The replica is healthy but has asked for a pause, for example by ``Retry-After``."""
        self._busy_until = max(self._busy_until, self._clock() + seconds)
