"""Whether a worker gets requests: what active checks say, what requests experienced, who drains it.

A breaker opens after consecutive failures, lets one request try after a pause, and closes when it
succeeds; each failed try doubles the pause. Answers by which a worker says no (4xx) count as
successes, and back-pressure (429, 503) as neither: a full worker is healthy.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

# A pause never grows beyond this many times the first.
_LONGEST_PAUSE = 8


class State(StrEnum):
    """What a worker's condition amounts to; a closed set, also a metric label."""

    UP = "up"
    RAMPING = "ramping"
    TRIAL = "trial"
    EJECTED = "ejected"
    DOWN = "down"
    DRAINING = "draining"


@dataclass(frozen=True, slots=True)
class Rules:
    """When a worker is ejected and how it returns.

    Attributes:
        failures: consecutive failed requests that eject it.
        pause: seconds until an ejected worker may be tried.
        ramp: seconds over which a returned worker gets its share back.
        check_failures: consecutive failed health checks that take it down.
    """

    failures: int = 5
    pause: float = 5.0
    ramp: float = 20.0
    check_failures: int = 3


class Condition:
    """One worker's condition; times are the event loop's.

    Attributes:
        draining: an operator or the discovery wants no new requests on it.
        heard: when it last sent a byte.
        busy_until: it asked for a pause (429, 503) until then.
    """

    __slots__ = (
        "_checks_failed",
        "_failed",
        "_open_until",
        "_pause",
        "_returned",
        "_rules",
        "_unreachable",
        "busy_until",
        "down",
        "draining",
        "heard",
    )

    def __init__(self, rules: Rules) -> None:
        self._rules = rules
        self._failed = 0
        self._checks_failed = 0
        self._unreachable = False
        self._open_until: float | None = None
        self._pause = rules.pause
        self._returned: float | None = None
        self.draining = False
        self.down = False
        self.heard = -float("inf")
        self.busy_until = 0.0

    @property
    def doubtful(self) -> bool:
        """Whether its last request failed."""
        return self._failed > 0

    def sound(self, now: float) -> bool:
        """Whether nothing speaks against it: it gets requests, and answered the last one well."""
        fit = self.state(now) in (State.UP, State.RAMPING)
        return fit and not self.doubtful and self.busy_until <= now

    def state(self, now: float) -> State:
        """The state at a time."""
        if self.draining:
            return State.DRAINING
        if self.down:
            return State.DOWN
        if self._open_until is not None:
            return State.EJECTED if now < self._open_until else State.TRIAL
        if self._returned is not None and now < self._returned + self._rules.ramp:
            return State.RAMPING
        return State.UP

    def share(self, now: float) -> float:
        """Share of its fair load that a ramping worker may carry, in (0, 1]."""
        if self._returned is None or self._rules.ramp <= 0:
            return 1.0
        return min(1.0, max(0.0, (now - self._returned) / self._rules.ramp))

    def succeeded(self, now: float) -> bool:
        """A request was answered; True if this brought the worker back."""
        self.heard = now
        self._failed = 0
        if self._open_until is None:
            return False
        self._open_until = None
        self._pause = self._rules.pause
        self._returned = now
        return True

    def restarted(self, now: float) -> None:
        """Another process answers at the same place: nothing is held against it."""
        self._failed = self._checks_failed = 0
        self._open_until, self._pause = None, self._rules.pause
        self._returned = now

    def failed(self, now: float, *, certain: bool = False, unreachable: bool = False) -> bool:
        """A request failed; True if the worker was ejected by it.

        Args:
            now: loop time.
            certain: one such failure is enough.
            unreachable: no connection could be made; the next good health check ends the pause.
        """
        self._failed += 1
        self._unreachable = unreachable
        trial = self._open_until is not None
        if trial and self._open_until is not None and now < self._open_until:
            return False  # a request from before the ejection
        if not trial and self._failed < self._rules.failures and not certain:
            return False
        if trial:
            self._pause = min(self._pause * 2, self._rules.pause * _LONGEST_PAUSE)
        self._open_until = now + self._pause
        return not trial

    def checked(self, now: float, ok: bool, *, since: float) -> bool:
        """The result of an active check; True if the worker went down or came back by it.

        A failed check does not count if a request was answered `since` the check before it.
        """
        if ok or self.heard >= since:
            self._checks_failed = 0
            if not self.down:
                if self._unreachable and self._open_until is not None:
                    self._open_until = min(self._open_until, now)
                return False
            self.down = False
            self._open_until, self._failed = None, 0
            self._returned = now
            return True
        self._checks_failed += 1
        if self.down or self._checks_failed < self._rules.check_failures:
            return False
        self.down = True
        return True
