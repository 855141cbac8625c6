"""The decode pool in plain Python: every step of every worker, every token, one by one.

It says what a pool means, and the compiled pool must give bit-identical times in discrete mode. In
expected-value mode it takes single steps where the compiled pool takes runs of them.
"""

from __future__ import annotations

import heapq
import math
from dataclasses import dataclass, field, replace

import numpy as np
import numpy.typing as npt

from eldr.simulation.placement import counted_slowest, expected_slowest
from eldr.simulation.pool import Completion, PoolConfig, Totals
from eldr.simulation.replay import LOG_UNIT, Replay

_MASK = (1 << 64) - 1
_Use = npt.NDArray[np.float64]


def draw(seed: int, request: int, token: int) -> int:
    """64 random bits that depend on nothing but these three (splitmix64's finaliser, nested)."""
    return _mix(_mix(seed ^ _mix(request)) + token)


def _mix(x: int) -> int:
    x = (x + 0x9E3779B97F4A7C15) & _MASK
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & _MASK
    return x ^ (x >> 31)


@dataclass(slots=True)
class _Request:
    request: int
    row: int
    steps: int
    context: int
    done: int = 0

    @property
    def need(self) -> int:
        return self.context + self.steps


@dataclass(slots=True)
class _Worker:
    now: float
    totals: Totals
    end: float = math.inf  # of the running step
    step: tuple[int, float, _Use] = (0, 0.0, np.empty((0, 0)))  # its KV tokens, D, experts read
    alive: bool = True
    active: list[_Request] = field(default_factory=list)
    waiting: list[tuple[float, int, _Request]] = field(default_factory=list)

    def next_start(self) -> float:
        if self.active:
            return self.now
        return max(self.now, self.waiting[0][0]) if self.waiting else math.inf


class ReferencePool:
    """See `eldr.simulation.pool.Pool`."""

    def __init__(self, replay: Replay, config: PoolConfig) -> None:
        self._replay, self._config = replay, config
        self._owners = config.placed(replay.geometry)
        self._workers: list[_Worker] = []
        self._clock, self._submitted = 0.0, 0

    def add_worker(self, now: float) -> int:
        """Starts an empty worker at `now`; returns its index."""
        cells = self._replay.geometry.cells if self._config.track_use else 0
        distinct = np.zeros(self._replay.geometry.layers)
        totals = Totals(0.0, 0, 0, 0.0, 0.0, 0, 0, 0, distinct, np.zeros(cells))
        self._workers.append(_Worker(now, totals))
        return len(self._workers) - 1

    def submit(
        self, worker: int, request: int, row: int, steps: int, context: int, ready: float
    ) -> None:
        """Hands a request over, as `Pool.submit`."""
        w = self._workers[worker]
        if not w.alive or not ready >= self._clock:
            raise ValueError("submit: the worker has failed, or `ready` is in the past")
        if steps < 1 or context + steps > self._config.kv_tokens:
            raise ValueError(f"submit: {context + steps} tokens, steps {steps}: can never run")
        heapq.heappush(w.waiting, (ready, self._submitted, _Request(request, row, steps, context)))
        self._submitted += 1

    def advance(self, until: float) -> list[Completion]:
        """Runs to `until`, as `Pool.advance`."""
        if not until >= self._clock:
            raise ValueError("advance: time must not run back")
        done: list[Completion] = []
        for index, w in enumerate(self._workers):
            while True:
                if w.end < math.inf:
                    if w.end > until:
                        break
                    done += self._finish(index, w)
                elif (start := w.next_start()) < until:
                    w.now = start
                    self._begin(index, w)
                else:
                    break
        self._clock = until
        return sorted(done)

    def fail(self, worker: int) -> tuple[list[int], list[int]]:
        """Takes the worker away, as `Pool.fail`."""
        w = self._workers[worker]
        lost = [r.request for r in w.active], [r.request for _, _, r in sorted(w.waiting)]
        w.active, w.waiting, w.end, w.alive = [], [], math.inf, False
        return lost

    def totals(self, worker: int) -> Totals:
        """What the worker has done so far."""
        w = self._workers[worker]
        w.totals.running, w.totals.waiting = len(w.active), len(w.waiting)
        w.totals.reserved = sum(r.need for r in w.active)
        return replace(w.totals, distinct=w.totals.distinct.copy(), use=w.totals.use.copy())

    def _begin(self, index: int, w: _Worker) -> None:
        while w.waiting and w.waiting[0][0] <= w.now and self._fits(w, w.waiting[0][2]):
            w.active.append(heapq.heappop(w.waiting)[2])
        used = self._expected(w) if self._config.expected else self._counted(w)
        kv = sum(r.context + r.done for r in w.active)
        cells = self._slowest(index, used)
        duration = self._config.cost.seconds(cells, kv, len(w.active))
        w.end = w.now + duration
        w.step = (kv, cells, used)

    def _finish(self, index: int, w: _Worker) -> list[Completion]:
        (kv, cells, used), t = w.step, w.totals
        t.seconds += w.end - w.now
        t.steps += 1
        t.tokens += len(w.active)
        t.kv += kv
        t.slowest += cells
        t.distinct += used.sum(axis=1)
        if t.use.size:
            t.use += used.ravel()
        w.now, w.end = w.end, math.inf
        for r in w.active:
            r.done += 1
        ended = [Completion(w.now, index, r.request) for r in w.active if r.done == r.steps]
        w.active = [r for r in w.active if r.done < r.steps]
        return ended

    def _fits(self, w: _Worker, newcomer: _Request) -> bool:
        reserved = sum(r.need for r in w.active)
        room = len(w.active) < self._config.max_batch
        return room and reserved + newcomer.need <= self._config.kv_tokens

    def _counted(self, w: _Worker) -> _Use:
        """1 where a token of this step uses the expert, [L, E]."""
        geometry = self._replay.geometry
        read = np.zeros((geometry.layers, geometry.experts))
        for r in w.active:
            words = self._replay.bits[self._token(r)]
            for layer in range(geometry.layers):
                for expert in range(geometry.experts):
                    if int(words[layer, expert // 64]) >> (expert % 64) & 1:
                        read[layer, expert] = 1.0
        return read

    def _token(self, r: _Request) -> int:
        first, length = int(self._replay.first[r.row]), int(self._replay.length[r.row])
        if r.done < length:
            return first + r.done
        return first + draw(self._config.seed, r.request, r.done) % length

    def _expected(self, w: _Worker) -> _Use:
        """Chance that a step reads the expert, [L, E]: 1 - product of (1 - p)."""
        geometry = self._replay.geometry
        load = sum(self._replay.logs[r.row].astype(np.int64) for r in w.active)
        return -np.expm1(-LOG_UNIT * np.asarray(load, np.float64)).reshape(
            geometry.layers, geometry.experts
        )

    def _slowest(self, index: int, used: _Use) -> float:
        """D of the step cost: on one rank all that is read, else what the slowest rank reads."""
        ranks = self._config.expert_ranks
        owner = self._owners[index % len(self._owners)]
        if ranks == 1:
            return float(used.sum())
        return (expected_slowest if self._config.expected else counted_slowest)(used, owner, ranks)
