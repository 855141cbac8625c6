"""The prefill pool and the way to decode: when a request's first token is out, and its KV is there.

Prefill does not depend on decoding, so all of it is computed before decoding starts.
"""

from __future__ import annotations

import heapq
import math
from dataclasses import dataclass, fields

import numpy as np
import numpy.typing as npt

from eldr.workload.arrivals import Arrivals

Seconds = npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class PrefillConfig:
    """Prefill workers and the KV transfer; the defaults take no time at all.

    Attributes:
        workers: prefill workers; each runs one prompt at a time, in order of arrival.
        fixed: seconds of a prefill step without tokens.
        token: seconds per prompt token.
        cached: share of every prompt that prefix caching spares, in [0, 1).
        transfer_fixed: seconds to start a KV transfer.
        transfer_token: seconds per prompt token of the KV transfer.
    """

    workers: int = 1
    fixed: float = 0.0
    token: float = 0.0
    cached: float = 0.0
    transfer_fixed: float = 0.0
    transfer_token: float = 0.0

    def __post_init__(self) -> None:
        if self.workers < 1:
            raise ValueError(f"prefill: workers must be positive, got {self.workers}")
        for field in fields(self)[1:]:
            value = getattr(self, field.name)
            if not (math.isfinite(value) and value >= 0):
                raise ValueError(f"prefill: {field.name} must be finite and >= 0, got {value}")
        if self.cached >= 1:
            raise ValueError(f"prefill: cached must be below 1, got {self.cached}")

    def seconds(self, tokens: npt.NDArray[np.int64]) -> Seconds:
        """Prefill time of prompts; at least one token is always computed."""
        computed = np.maximum(1.0, tokens - np.floor(tokens * self.cached))
        return np.asarray(self.fixed + self.token * computed, np.float64)

    def transfer(self, tokens: npt.NDArray[np.int64]) -> Seconds:
        """Time from the routing decision until the decode worker holds the KV."""
        return np.asarray(self.transfer_fixed + self.transfer_token * tokens, np.float64)


def first_tokens(arrivals: Arrivals, config: PrefillConfig) -> Seconds:
    """When each request's first token is out, seconds [N]; the first idle worker takes the next."""
    busy = config.seconds(arrivals.input_tokens)
    if not busy.any():
        return arrivals.times.copy()
    free = [0.0] * config.workers
    out = np.empty(len(arrivals))
    for i, (time, work) in enumerate(zip(arrivals.times.tolist(), busy.tolist(), strict=True)):
        done = max(time, free[0]) + work
        heapq.heapreplace(free, done)
        out[i] = done
    return out
