"""Where a fleet stands: arrival rate, running batch and capacity, before anything is simulated."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from eldr.simulation.placement import expected_slowest
from eldr.simulation.pool import PoolConfig
from eldr.simulation.replay import LOG_UNIT, Replay
from eldr.simulation.traffic import Traffic


@dataclass(frozen=True, slots=True)
class Point:
    """A balanced fleet under traffic of one kind.

    Attributes:
        rate: requests per second.
        load: that as a share of capacity.
        batch: mean running requests per worker.
        slowest: the slowest rank's share of a step's expert reads; 1 without expert parallelism.
    """

    rate: float
    load: float
    batch: float
    slowest: float


def operating_point(
    replay: Replay,
    drawn: Traffic,
    workers: int,
    pool: PoolConfig,
    *,
    rate: float | None = None,
    load: float | None = None,
    batch: float | None = None,
) -> Point:
    """The point that one of `rate`, `load` and `batch` sets.

    Capacity is where every worker's batch or KV memory is full.
    """
    made, geometry = drawn.arrivals, replay.geometry
    steps = float((made.output_tokens - 1).mean())
    context = float((made.input_tokens + 0.5 * made.output_tokens).mean())
    held = float((made.input_tokens + made.output_tokens).mean())
    # The mean request's chance to use each expert, over the traffic as it is drawn.
    rows, count = np.unique(drawn.rows, return_counts=True)
    mean = count @ chances(replay, rows) / count.sum()
    idle = np.log1p(-np.minimum(mean, 1 - 1e-12)).reshape(geometry.layers, geometry.experts)
    owner = pool.placed(geometry)[0]

    def cells(running: float) -> tuple[float, float]:
        """Distinct experts of a step, and those of the slowest rank."""
        read = -np.expm1(running * idle)
        total = float(read.sum())
        if pool.expert_ranks == 1:
            return total, total
        return total, expected_slowest(read, owner, pool.expert_ranks)

    def at(running: float) -> float:
        """Requests per second when every worker runs so many."""
        seconds = pool.cost.seconds(cells(running)[1], running * context, running)
        return workers * running / (steps * seconds)

    most = max(1.0, min(float(pool.max_batch), pool.kv_tokens / held))
    full = at(most)
    if batch is not None:
        rate = at(batch)
    elif load is not None:
        rate = load * full
    assert rate is not None  # one of the three is given
    running = batch if batch is not None else _inverse(at, rate, most)
    total, slowest = cells(running)
    return Point(rate, rate / full, running, slowest / total if total else 1.0)


def chances(replay: Replay, rows: npt.NDArray[np.int64]) -> npt.NDArray[np.float64]:
    """Chance that one decode token of each request uses each expert, float64 [N, L * E]."""
    return -np.expm1(-LOG_UNIT * replay.logs[rows].astype(np.float64))


def _inverse(at: Callable[[float], float], rate: float, most: float) -> float:
    """Batch in (0, most] at which `at`, which rises, gives the rate."""
    low, high = 0.0, most
    if at(most) <= rate:
        return most
    for _ in range(40):
        middle = 0.5 * (low + high)
        if at(middle) < rate:
            low = middle
        else:
            high = middle
    return high
