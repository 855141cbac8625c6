"""Capacity-constrained assignment of N points to W workers at least total cost."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from eldr.routing import fixed

# Above this many workers the exact method starts from ascended prices; above this many cells of the
# cost matrix its heaps (16 bytes a cell) take too much memory, and a greedy repair ends the work.
EXACT_WORKERS = 64
EXACT_CELLS = 1 << 25


@dataclass(frozen=True, slots=True, eq=False)
class Assignment:
    """Which worker each point goes to.

    Attributes:
        home: int32 [N].
        objective: sum of the costs, float64.
        gap: certified: (objective - lower bound) / |lower bound|, by weak duality; 0 up to rounding
            when the method is exact.
        prices: float64 [W], bin prices to start a similar problem from.
    """

    home: npt.NDArray[np.int32]
    objective: float
    gap: float
    prices: npt.NDArray[np.float64]


def capacities(points: int, weights: Sequence[float]) -> npt.NDArray[np.int64]:
    """Splits N points among workers in proportion to their weights (largest remainder).

    Raises:
        ValueError: no workers, a weight that is not positive, or fewer points than workers.
    """
    share = np.asarray(weights, np.float64)
    if share.ndim != 1 or len(share) == 0 or not (np.isfinite(share).all() and (share > 0).all()):
        raise ValueError(f"capacities: weights must be positive numbers, got {list(weights)}")
    if points < len(share):
        raise ValueError(f"{points} samples cannot give each of {len(share)} workers one")
    exact = points * share / share.sum()
    given: npt.NDArray[np.int64] = np.floor(exact).astype(np.int64)
    order = np.argsort(-(exact - given), kind="stable")
    given[order[: points - given.sum()]] += 1
    return given


def assign(
    cost: npt.NDArray[np.float32],
    capacity: npt.NDArray[np.int64],
    *,
    method: str = "auto",
    prices: npt.NDArray[np.float64] | None = None,
) -> Assignment:
    """Assigns every point so that worker w gets exactly capacity[w] of them.

    Args:
        cost: float32 [N, W], finite.
        capacity: int64 [W], sums to N.
        method: "exact" (successive shortest paths), "approximate" (dual ascent, greedy repair) or
            "auto": exact while the cost matrix has at most EXACT_CELLS cells.
        prices: a former Assignment's, to start from.

    Raises:
        ValueError: shapes, capacities or costs that cannot be used.
    """
    if cost.ndim != 2 or cost.shape[1] != len(capacity):
        raise ValueError(f"assign: cost {cost.shape} does not fit {len(capacity)} capacities")
    if not np.isfinite(cost).all():
        raise ValueError("assign: a cost is not finite")
    if (capacity < 0).any() or capacity.sum() != len(cost):
        raise ValueError(f"assign: capacities sum to {capacity.sum()} for {len(cost)} points")
    if method not in ("auto", "exact", "approximate"):
        raise ValueError(f"assign: unknown method {method!r}")
    cost = np.ascontiguousarray(cost, np.float32)
    capacity = np.ascontiguousarray(capacity, np.int64)
    start = np.zeros(len(capacity)) if prices is None else np.array(prices, np.float64)
    exact = method == "exact" or (method == "auto" and cost.size <= EXACT_CELLS)
    if not exact or (prices is None and len(capacity) > EXACT_WORKERS):
        _ascend(cost, capacity, start)
    home = _exact(cost, capacity, start) if exact else _repair(cost, capacity, start)
    objective = float(cost[np.arange(len(cost)), home].sum(dtype=np.float64))
    return Assignment(home, objective, _gap(cost, capacity, start, objective), start)


def _exact(
    cost: npt.NDArray[np.float32], capacity: npt.NDArray[np.int64], prices: npt.NDArray[np.float64]
) -> npt.NDArray[np.int32]:
    """The optimum; `prices` become optimal too (without native code they stay as they were)."""
    home = np.empty(len(cost), np.int32)
    if fixed.native is not None:
        fixed.native.assign_exact(cost, capacity, prices, home)
        return home
    from scipy.optimize import linear_sum_assignment

    columns = np.repeat(np.arange(len(capacity)), capacity)
    rows, chosen = linear_sum_assignment(cost[:, columns])
    home[rows] = columns[chosen]
    return home


def _gap(
    cost: npt.NDArray[np.float32],
    capacity: npt.NDArray[np.int64],
    prices: npt.NDArray[np.float64],
    objective: float,
) -> float:
    """No assignment costs less than sum min(cost + price) - sum price * capacity, at any prices."""
    bound = -float(prices @ capacity)
    for start in range(0, len(cost), 8192):
        bound += float((cost[start : start + 8192] + prices).min(axis=1).sum())
    # A bound of about nothing is what rounding left of larger sums: no measure for a gap.
    least = 1e-9 * float(np.abs(prices) @ capacity) + 1e-12
    return max(0.0, objective - bound) / max(abs(bound), least)


def _ascend(
    cost: npt.NDArray[np.float32], capacity: npt.NDArray[np.int64], prices: npt.NDArray[np.float64]
) -> None:
    step, rounds = float(cost.std()) or 1.0, 200
    if fixed.native is not None:
        fixed.native.assign_prices(cost, capacity, prices, rounds, step)
        return
    best, least, trial = prices.copy(), np.inf, prices.copy()
    for _ in range(rounds):
        nearest = np.argmin(cost + trial.astype(np.float32), axis=1)
        excess = np.bincount(nearest, minlength=len(capacity)) - capacity
        over = int(np.maximum(excess, 0).sum())
        if over < least:
            best, least = trial.copy(), over
        if over == 0:
            break
        trial += step * excess / np.maximum(capacity, 1)
        step *= 0.99
    prices[:] = best


def _repair(
    cost: npt.NDArray[np.float32], capacity: npt.NDArray[np.int64], prices: npt.NDArray[np.float64]
) -> npt.NDArray[np.int32]:
    """Takes the priced optimum, evicts the cheapest-to-move surplus, and places it greedily."""
    priced = cost + prices.astype(np.float32)
    home: npt.NDArray[np.int32] = np.argmin(priced, axis=1).astype(np.int32)
    count = np.bincount(home, minlength=len(capacity))
    loose = []
    for w in np.flatnonzero(count > capacity):
        members = np.flatnonzero(home == w)
        others = priced[members]
        others[:, w] = np.inf
        regret = others.min(axis=1) - priced[members, w]
        loose.append(members[np.argsort(regret, kind="stable")[: count[w] - capacity[w]]])
    room = capacity - np.minimum(count, capacity)
    for i in np.concatenate(loose) if loose else ():
        open_bins = np.flatnonzero(room > 0)
        w = int(open_bins[np.argmin(priced[i, open_bins])])
        home[i] = w
        room[w] -= 1
    return home
