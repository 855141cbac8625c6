"""Fits the step cost to what decode workers measured, while they serve.

A sample is one worker's sums over an interval. The four coefficients are expressed as multiples of
a prior, all scaled by the median of measured over predicted time, since a choice depends on ratios
alone. Huber-weighted least squares with a ridge towards the scaled prior moves the multiples, and
bounds keep them in [0, 16]; so one slow interval, or samples that are all alike, change little.
"""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass, fields

import numpy as np
import numpy.typing as npt

from eldr.routing.cost import StepCost

_MOST = 16.0  # largest multiple of the scaled prior
_RIDGE = 4.0  # strength of the prior, in samples
_HUBER = 1.5  # residuals beyond this many scales count linearly


@dataclass(frozen=True, slots=True)
class StepSample:
    """Sums over the decode-only steps of one worker in one interval.

    Attributes:
        steps: number of steps.
        seconds: their total time.
        requests: sum of batch sizes.
        distinct: sum of distinct experts, over layers too.
        kv_tokens: sum of KV tokens read, 0 = unknown.
    """

    steps: int
    seconds: float
    requests: float
    distinct: float
    kv_tokens: float = 0.0

    @property
    def usable(self) -> bool:
        """Whether a fit can learn from it: steps happened, and all sums are finite and sane."""
        values = (self.seconds, self.requests, self.distinct, self.kv_tokens)
        return (
            self.steps > 0
            and all(math.isfinite(v) and v >= 0 for v in values)
            and self.seconds > 0
            and self.requests > 0
        )


def prior(cells: int) -> StepCost:
    """Where to start without measurements: expert reads are about two thirds of a busy step.

    Assumed, after the step-cost table of the design: a step that reads 60 % of the experts takes
    three times an empty one, 30 requests add 5 % and their KV 10 % of an empty step.

    Args:
        cells: L*E.
    """
    base = 3e-3
    return StepCost(base, 2.0 * base / (0.6 * cells), 0.1 * base / 30_000, 0.05 * base / 30)


class StepFit:
    """A step cost that follows the samples; `cost` is always usable."""

    def __init__(self, start: StepCost, *, window: int = 256, every: int = 8) -> None:
        if window < 16 or every < 1:
            raise ValueError(f"step fit: needs window >= 16 and every >= 1, got {window}, {every}")
        self.start = start
        self.cost = start
        self.refused = 0
        self._every, self._new = every, 0
        self._samples: deque[tuple[float, float, float, float]] = deque(maxlen=window)

    def add(self, sample: StepSample) -> bool:
        """Takes a sample; False (and counted in `refused`) if it cannot be used."""
        if not sample.usable:
            self.refused += 1
            return False
        n = sample.steps
        self._samples.append(
            (sample.seconds / n, sample.distinct / n, sample.kv_tokens / n, sample.requests / n)
        )
        self._new += 1
        if self._new >= self._every and len(self._samples) >= 16:
            self._new = 0
            self.cost = _fit(np.array(self._samples), self.start)
        return True


def _fit(rows: npt.NDArray[np.float64], start: StepCost) -> StepCost:
    seconds, parts = rows[:, 0], np.ones((len(rows), 4))
    parts[:, 1:] = rows[:, 1:]
    parts *= [start.base, start.expert, start.kv, start.request]
    scale = float(np.median(seconds / np.maximum(parts.sum(axis=1), 1e-12)))
    # Rows relative to their own time, so that a busy worker does not outweigh the others.
    x = parts * scale / seconds[:, None]
    weight = np.ones(len(rows))
    for _ in range(5):
        multiple = _bounded(x, weight)
        residual = np.abs(1.0 - x @ multiple)
        unit = max(1.4826 * float(np.median(residual)), 1e-4)
        weight = np.minimum(1.0, _HUBER * unit / np.maximum(residual, 1e-12))
    values = multiple * scale * [start.base, start.expert, start.kv, start.request]
    return StepCost(**dict(zip([f.name for f in fields(StepCost)], values.tolist(), strict=True)))


def _bounded(
    x: npt.NDArray[np.float64], weight: npt.NDArray[np.float64]
) -> npt.NDArray[np.float64]:
    """Ridge least squares x @ m = 1 with m in [0, _MOST].

    Distinct experts, KV and batch size rise together, so descent would crawl: the best of the 15
    sets of positive multiples is solved for directly instead.
    """
    size = np.maximum((x**2).mean(axis=0), 1e-12)
    gram = (x * weight[:, None]).T @ x + np.diag(_RIDGE * size)
    right = (x * weight[:, None]).sum(axis=0) + _RIDGE * size
    best, least = np.ones(4), np.inf
    for subset in range(1, 16):
        free = [j for j in range(4) if subset >> j & 1]
        m = np.zeros(4)
        m[free] = np.linalg.solve(gram[np.ix_(free, free)], right[free])
        value = float(m @ gram @ m / 2 - right @ m)
        if (m >= 0).all() and value < least:
            best, least = m, value
    return np.minimum(best, _MOST)
