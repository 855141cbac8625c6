"""A/B between decode policies on live traffic: per-arm TTFT and TPOT with confidence intervals.

Two designs. `switchback` gives the whole fleet to one arm for a period, then to a random next one:
batches are never mixed, so the effect on TPOT is the one that a full roll-out would have; the unit
of the statistics is the period. `request` assigns each request by itself: quicker, but both arms'
requests share batches, which hides part of the difference; the unit is the request.
"""

from __future__ import annotations

import math
import random
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

Design = Literal["switchback", "request"]

# Two-sided 95 % quantiles of Student's t by degrees of freedom; beyond them the normal's.
_T95 = (
    *(12.71, 4.30, 3.18, 2.78, 2.57, 2.45, 2.36, 2.31, 2.26, 2.23, 2.20, 2.18, 2.16, 2.14, 2.13),
    *(2.12, 2.11, 2.10, 2.09, 2.09, 2.08, 2.07, 2.07, 2.06, 2.06, 2.06, 2.05, 2.05, 2.05, 2.04),
)
_RECENT = 4096


class Mean:
    """Running mean and variance (Welford)."""

    __slots__ = ("_square", "mean", "n")

    def __init__(self) -> None:
        self.n = 0
        self.mean = 0.0
        self._square = 0.0

    def add(self, value: float) -> None:
        """Takes in a value."""
        self.n += 1
        delta = value - self.mean
        self.mean += delta / self.n
        self._square += delta * (value - self.mean)

    @property
    def error(self) -> float:
        """Standard error of the mean; infinite below two values."""
        return math.sqrt(self._square / (self.n - 1) / self.n) if self.n > 1 else math.inf


def half_width(error: float, freedom: float) -> float:
    """Half of a 95 % interval around an estimate with this standard error."""
    if not math.isfinite(error) or freedom < 1:
        return math.inf
    return error * (_T95[int(freedom) - 1] if freedom <= len(_T95) else 1.96)


@dataclass(slots=True)
class Series:
    """One quantity of one arm: its units for the interval, recent requests for quantiles."""

    units: Mean = field(default_factory=Mean)
    period: Mean = field(default_factory=Mean)
    recent: deque[float] = field(default_factory=lambda: deque(maxlen=_RECENT))
    requests: int = 0

    def add(self, value: float, design: Design) -> None:
        """Takes in one request's value."""
        self.requests += 1
        self.recent.append(value)
        (self.units if design == "request" else self.period).add(value)

    def close_period(self) -> None:
        """The period's mean becomes one unit."""
        if self.period.n:
            self.units.add(self.period.mean)
        self.period = Mean()

    def describe(self) -> dict[str, Any]:
        """Mean with interval over the units, quantiles over recent requests; JSON values."""
        values = sorted(self.recent)
        width = half_width(self.units.error, self.units.n - 1)
        known = math.isfinite(width)
        mean = self.units.mean
        return {
            "requests": self.requests,
            "units": self.units.n,
            "mean": mean if self.units.n else None,
            "ci95": [mean - width, mean + width] if known else None,
            "p50": _quantile(values, 0.5),
            "p99": _quantile(values, 0.99),
        }


@dataclass(slots=True)
class Arm:
    """One policy under test.

    Attributes:
        unsettled: requests left out since they began before the fleet had settled into a period.
        straddled: those left out since they ended in another period; many of them mislead, since
            slow requests are more often among them.
    """

    name: str
    ttft: Series = field(default_factory=Series)
    tpot: Series = field(default_factory=Series)
    unsettled: int = 0
    straddled: int = 0

    def describe(self) -> dict[str, Any]:
        """Its series and what is not in them; JSON values."""
        return {
            "ttft_s": self.ttft.describe(),
            "tpot_s": self.tpot.describe(),
            "left_out": {"unsettled": self.unsettled, "straddled": self.straddled},
        }


@dataclass(frozen=True, slots=True)
class Slot:
    """Which arm a request belongs to, and in which period it was decided (0: no periods)."""

    arm: Arm
    period: int


class Experiment:
    """Assigns requests to arms and collects what they experienced."""

    def __init__(self, arms: Sequence[str], design: Design, period: float, seed: int = 0) -> None:
        if len(set(arms)) != len(arms) or len(arms) < 2:
            raise ValueError(f"an experiment needs two or more different policies, got {arms}")
        self.arms = [Arm(name) for name in arms]
        self.design = design
        self._period = period
        self._random = random.Random(seed)
        self._current = self._random.choice(self.arms)
        self._number = 1
        self._until: float | None = None
        self._settled = 0.0

    def assign(self, now: float) -> Slot:
        """The arm of a request that is decided now."""
        if self.design == "request":
            return Slot(self._random.choice(self.arms), 0)
        if self._until is None:
            self._begin(now)
        elif now >= self._until:
            self._end()
            self._begin(now)
        return Slot(self._current, self._number)

    def observe(self, slot: Slot, started: float, ttft: float | None, tpot: float | None) -> None:
        """Takes in a request that ended well.

        Requests that straddle periods, or began before the fleet had settled into one, belong to
        no arm and are left out.
        """
        if self.design == "switchback":
            if slot.period != self._number:
                slot.arm.straddled += 1
                return
            if started < self._settled:
                slot.arm.unsettled += 1
                return
        for series, value in ((slot.arm.ttft, ttft), (slot.arm.tpot, tpot)):
            if value is not None:
                series.add(value, self.design)

    def _begin(self, now: float) -> None:
        self._until = now + self._period
        # Requests of the last period still run for a while: the first fifth is not counted.
        self._settled = now + self._period / 5

    def _end(self) -> None:
        for arm in self.arms:
            arm.ttft.close_period()
            arm.tpot.close_period()
        self._number += 1
        self._current = self._random.choice(self.arms)

    def describe(self) -> dict[str, Any]:
        """Arms, and differences to the first one with their intervals; JSON values."""
        base, *others = self.arms
        return {
            "v": 1,
            "design": self.design,
            "period_seconds": self._period if self.design == "switchback" else None,
            "arms": {arm.name: arm.describe() for arm in self.arms},
            "differences": {
                other.name: {
                    "against": base.name,
                    "ttft_s": difference(base.ttft.units, other.ttft.units),
                    "tpot_s": difference(base.tpot.units, other.tpot.units),
                }
                for other in others
            },
        }


def difference(base: Mean, other: Mean) -> dict[str, Any]:
    """Other minus base: estimate, 95 % interval (Welch), relative change, verdict."""
    if base.n < 2 or other.n < 2:
        return {"estimate": None, "ci95": None, "relative": None, "verdict": "needs more data"}
    a, b = base.error**2, other.error**2
    spread = a * a / (base.n - 1) + b * b / (other.n - 1)
    freedom = (a + b) ** 2 / spread if spread > 0 else math.inf
    estimate = other.mean - base.mean
    width = half_width(math.sqrt(a + b), min(freedom, 1e9))
    low, high = estimate - width, estimate + width
    verdict = "faster" if high < 0 else "slower" if low > 0 else "no difference shown"
    relative = estimate / base.mean if base.mean else None
    return {"estimate": estimate, "ci95": [low, high], "relative": relative, "verdict": verdict}


def _quantile(ordered: Sequence[float], q: float) -> float | None:
    return ordered[min(len(ordered) - 1, int(q * len(ordered)))] if ordered else None
