"""The compiled decode pool (csrc/native/simulate.cpp) behind the interface of `pool`."""

from __future__ import annotations

from importlib import import_module
from typing import cast

import numpy as np

from eldr.simulation.pool import Completion, PoolConfig, Totals
from eldr.simulation.replay import Replay

_LIBRARY = import_module("eldr._native")
if not hasattr(_LIBRARY, "simulate_new"):
    raise ImportError("eldr._native was built without the simulator; build it again")


class NativePool:
    """See `eldr.simulation.pool.Pool`."""

    def __init__(self, replay: Replay, config: PoolConfig) -> None:
        cost, geometry = config.cost, replay.geometry
        logs = replay.logs if config.expected else np.empty(0, np.int32)
        self._layers = geometry.layers
        self._cells = geometry.cells if config.track_use else 0
        self._pool = _LIBRARY.simulate_new(
            np.ascontiguousarray(replay.bits),
            np.ascontiguousarray(replay.first),
            np.ascontiguousarray(replay.length),
            np.ascontiguousarray(logs),
            config.placed(geometry),
            geometry.layers,
            geometry.experts,
            config.expert_ranks,
            cost.base,
            cost.expert,
            cost.kv,
            cost.request,
            config.max_batch,
            config.kv_tokens,
            config.seed,
            config.expected,
            config.track_use,
        )

    def add_worker(self, now: float) -> int:
        """Starts an empty worker at `now`; returns its index."""
        return int(_LIBRARY.simulate_add(self._pool, now))

    def submit(
        self, worker: int, request: int, row: int, steps: int, context: int, ready: float
    ) -> None:
        """Hands a request over, as `Pool.submit`."""
        _LIBRARY.simulate_submit(self._pool, worker, request, row, steps, context, ready)

    def advance(self, until: float) -> list[Completion]:
        """Runs to `until`, as `Pool.advance`."""
        return [Completion(*c) for c in _LIBRARY.simulate_advance(self._pool, until)]

    def fail(self, worker: int) -> tuple[list[int], list[int]]:
        """Takes the worker away, as `Pool.fail`."""
        return cast(tuple[list[int], list[int]], _LIBRARY.simulate_fail(self._pool, worker))

    def totals(self, worker: int) -> Totals:
        """What the worker has done so far."""
        scalar, distinct = np.empty(8), np.empty(self._layers)
        use = np.empty(self._cells)
        _LIBRARY.simulate_totals(self._pool, worker, scalar, distinct, use)
        seconds, steps, tokens, kv, slowest, running, waiting, reserved = scalar.tolist()
        return Totals(
            seconds,
            int(steps),
            int(tokens),
            kv,
            slowest,
            int(running),
            int(waiting),
            int(reserved),
            distinct,
            use,
        )
