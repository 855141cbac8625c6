"""From outcomes to figures: quantiles, loads, goodput, and gains over the best load balancer."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from eldr.simulation.run import DONE, FAILED, REJECTED, Outcome

LOAD_BALANCERS = ("random", "round_robin", "least_requests", "power_of_two")
QUANTILES = ("p50", "p99")


@dataclass(frozen=True, slots=True)
class Objective:
    """What a request must reach to count as good; seconds.

    Raises:
        ValueError: a bound that is not positive.
    """

    ttft: float = 1.0
    tpot: float = 0.05

    def __post_init__(self) -> None:
        if not (self.ttft > 0 and self.tpot > 0):
            raise ValueError(f"objective: bounds must be positive, got {self.ttft}, {self.tpot}")


def measured(count: int, warm_up: float = 0.1, cool_down: float = 0.1) -> slice:
    """The requests that are looked at: the fleet fills before them and drains after them."""
    return slice(int(count * warm_up), max(int(count * (1 - cool_down)), int(count * warm_up) + 1))


def summarise(outcome: Outcome, layers: int, objective: Objective | None = None) -> dict[str, Any]:
    """The figures of one run as plain JSON values; times in milliseconds."""
    window = measured(len(outcome.traffic))
    times = outcome.traffic.arrivals.times[window]
    tpot, ttft = outcome.tpot[window], outcome.ttft[window]
    done = outcome.status[window] == DONE
    wanted = objective or Objective()
    good = done & (ttft <= wanted.ttft) & ~(tpot > wanted.tpot)
    span = float(times[-1] - times[0])
    steps = sum(t.steps for t in outcome.totals)
    return {
        "tpot_ms": milliseconds(tpot),
        "ttft_ms": milliseconds(ttft[done]),
        "distinct_per_layer": _ratio(sum(t.distinct.sum() for t in outcome.totals), steps * layers),
        "max_over_mean_load": load_skew(outcome),
        "goodput": _ratio(float(good.sum()), span),
        "good_share": float(good.mean()),
        "batch": _ratio(sum(t.tokens for t in outcome.totals), steps),
        "step_ms": _ratio(1e3 * sum(t.seconds for t in outcome.totals), steps),
        "requests": {
            "done": int((outcome.status == DONE).sum()),
            "failed": int((outcome.status == FAILED).sum()),
            "rejected": int((outcome.status == REJECTED).sum()),
        },
        "fallbacks": outcome.fallbacks,
    }


def milliseconds(seconds: npt.NDArray[np.float64]) -> dict[str, float]:
    """p50, p99 and mean in ms of the finite values; nan when there are none."""
    finite = seconds[np.isfinite(seconds)] * 1e3
    if not len(finite):
        return {"p50": float("nan"), "p99": float("nan"), "mean": float("nan")}
    p50, p99 = np.percentile(finite, (50, 99))
    return {"p50": float(p50), "p99": float(p99), "mean": float(finite.mean())}


def load_skew(outcome: Outcome) -> float:
    """Largest over mean of the workers' requests, each averaged over time; 1 = even."""
    done = outcome.status == DONE
    time = np.bincount(
        outcome.worker[done & (outcome.worker >= 0)],
        (outcome.end - outcome.first_token)[done & (outcome.worker >= 0)],
        len(outcome.totals),
    )
    return _ratio(float(time.max()), float(time.mean()))


def best_load_balancer(cells: Mapping[str, Mapping[str, Any]]) -> dict[str, str]:
    """Per quantile, the load balancer of lowest TPOT among policy -> figures of one cell.

    Raises:
        ValueError: none of the four was run.
    """
    ran = [p for p in LOAD_BALANCERS if p in cells]
    if not ran:
        raise ValueError(f"gains need at least one of {', '.join(LOAD_BALANCERS)} to compare with")
    return {q: min(ran, key=lambda p: float(cells[p]["tpot_ms"][q])) for q in QUANTILES}


def gains(
    cells: Mapping[str, Mapping[str, Any]], best: Mapping[str, str]
) -> dict[str, dict[str, float]]:
    """TPOT reduction in % of every policy against the given load balancers, per quantile."""
    return {
        policy: {
            q: 100.0 * (1.0 - figures["tpot_ms"][q] / cells[best[q]]["tpot_ms"][q])
            for q in QUANTILES
        }
        for policy, figures in cells.items()
    }


def average(figures: Sequence[Any]) -> Any:
    """Mean over seeds of equally shaped nested dicts; counts are summed."""
    first = figures[0]
    if isinstance(first, Mapping):
        keys = dict.fromkeys(k for f in figures for k in f)
        return {k: average([f[k] for f in figures if k in f]) for k in keys}
    if isinstance(first, int) and not isinstance(first, bool):
        return sum(figures)
    return float(np.mean(figures))


def standard_error(values: Sequence[float]) -> float:
    """Standard error of the mean; nan for fewer than two values."""
    if len(values) < 2:
        return float("nan")
    return float(np.std(values, ddof=1) / np.sqrt(len(values)))


def _ratio(a: float, b: float) -> float:
    return float(a) / float(b) if b else float("nan")
