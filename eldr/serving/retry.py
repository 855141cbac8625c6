"""When a failed try may be repeated: a budget that bounds retries, and jittered pauses."""

from __future__ import annotations

import random
from dataclasses import dataclass

LEAST_RESERVE = 100.0


@dataclass(frozen=True, slots=True)
class RetryRules:
    """Bounds on repeated tries.

    Attributes:
        attempts: tries per leg.
        budget: retries that each request earns for all requests.
        reserve: retries that are there without any request.
        base: seconds, upper end of the first pause.
        growth: by which each next pause's upper end is multiplied.
        longest: seconds, upper end of any pause.
    """

    attempts: int = 5
    budget: float = 0.5
    reserve: float = LEAST_RESERVE
    base: float = 0.02
    growth: float = 2.0
    longest: float = 2.0


class Tries:
    """The tries of a leg after its first; free ones do not count until every worker was tried."""

    __slots__ = ("_left", "free", "retries")

    def __init__(self, attempts: int, workers: int) -> None:
        self._left = attempts - 1
        self.free = workers
        self.retries = 0

    def next(self, *, free: bool) -> bool:
        """Whether another try may be made."""
        self.retries += 1
        if free and self.free > 0:
            self.free -= 1
            return True
        self._left -= 1
        return self._left >= 0


class RetryBudget:
    """A bucket of retries: when everything fails, retries must not multiply the load."""

    def __init__(self, rules: RetryRules, seed: int = 0) -> None:
        self.rules = rules
        self._left = rules.reserve
        self._random = random.Random(seed)

    def earn(self) -> None:
        """A new request came."""
        self._left = min(self.rules.reserve, self._left + self.rules.budget)

    def spend(self) -> bool:
        """Takes one retry; False if none is left."""
        if self._left < 1.0:
            return False
        self._left -= 1.0
        return True

    def pause(self, retry: int) -> float:
        """Seconds before retry number `retry` (0, 1, ...): uniform up to a growing bound."""
        rules = self.rules
        return self._random.uniform(
            0.0, min(rules.longest, rules.base * rules.growth ** min(retry, 16))
        )
