"""What decode workers report to the routers while they serve, as `GET /eldr/decode` does."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from eldr.routing.step_fit import StepSample
from eldr.simulation.pool import Pool, Totals
from eldr.simulation.routers import Routers


class Telemetry:
    """Gives every router the difference of its workers' counters since the last call."""

    def __init__(self) -> None:
        self._last: dict[int, Totals] = {}

    def __call__(self, pool: Pool, routers: Routers) -> None:
        """Reads all workers' counters once."""
        for name, index in routers.index.items():
            now, before = pool.totals(index), self._last.get(index)
            self._last[index] = now
            sample, use = difference(now, before)
            if sample.steps:
                routers.observe(name, sample, use)


def difference(
    now: Totals, before: Totals | None
) -> tuple[StepSample, npt.NDArray[np.float64] | None]:
    """The steps between two readings, and the share of them that read each expert [L * E].

    `before` = None is the start. The shares are None when the pool does not track use.
    """
    steps = now.steps - (before.steps if before else 0)
    sample = StepSample(
        steps=steps,
        seconds=now.seconds - (before.seconds if before else 0.0),
        requests=float(now.tokens - (before.tokens if before else 0)),
        distinct=float(now.distinct.sum() - (before.distinct.sum() if before else 0.0)),
        kv_tokens=now.kv - (before.kv if before else 0.0),
    )
    if not (now.use.size and steps):
        return sample, None
    share = (now.use - (before.use if before else 0.0)) / steps
    return sample, np.clip(share, 0.0, 1.0)  # sums of floats may pass 1 by a rounding
