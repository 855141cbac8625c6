"""Times callables side by side: interleaved rounds, medians, and a budget that is kept."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Protocol

Call = Callable[[], object]


@dataclass(frozen=True, slots=True)
class Sample:
    """Microseconds per call over the rounds; `how` says what was timed (graph or eager)."""

    median: float
    low: float
    high: float
    rounds: int
    how: str

    def as_dict(self) -> dict[str, object]:
        """Plain data for JSON."""
        return asdict(self)


@dataclass(frozen=True, slots=True)
class Prepared:
    """A warmed-up measurement: `once()` runs all calls and returns microseconds per call."""

    once: Callable[[], float]
    how: str


class Timer(Protocol):
    """Turns calls on different inputs into something that can be timed again and again."""

    def prepare(self, calls: Sequence[Call]) -> Prepared:
        """Warms up; a device timer captures the calls in a graph where they allow it."""


class HostTimer:
    """Wall time on the CPU; for tests and for peers that run there."""

    def prepare(self, calls: Sequence[Call]) -> Prepared:
        """Calls each once."""
        for call in calls:
            call()

        def once() -> float:
            start = time.perf_counter_ns()
            for call in calls:
                call()
            return (time.perf_counter_ns() - start) / 1000 / len(calls)

        return Prepared(once, "host")


def interleave(prepared: Mapping[str, Prepared], rounds: int) -> dict[str, Sample]:
    """Times all in turn, `rounds` times, starting with another one each round."""
    names = list(prepared)
    seen: dict[str, list[float]] = {name: [] for name in names}
    for turn in range(rounds):
        for i in range(len(names)):
            name = names[(i + turn) % len(names)]
            seen[name].append(prepared[name].once())
    return {
        name: Sample(statistics.median(us), min(us), max(us), rounds, prepared[name].how)
        for name, us in seen.items()
    }


class Budget:
    """The time a check may take. What does not fit any more is left out, and listed."""

    def __init__(self, seconds: float, now: Callable[[], float] = time.monotonic) -> None:
        self._now, self._end = now, now() + seconds
        self.left_out: list[str] = []

    def left(self) -> float:
        """Seconds left."""
        return self._end - self._now()

    def allows(self, what: str, seconds: float) -> bool:
        """True if `what`, which takes about `seconds`, still fits; else it is listed."""
        if self.left() >= seconds:
            return True
        self.left_out.append(what)
        return False
