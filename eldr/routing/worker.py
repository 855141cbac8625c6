"""Decode workers and the per-slot table of what runs on them."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from eldr.routing.expert_load import ExpertLoad
from eldr.routing.lengths import Lengths


@dataclass(frozen=True, slots=True)
class Worker:
    """One engine that takes decode requests.

    Attributes:
        name: unique in the fleet; the partition refers to it.
        url: base URL; empty in simulations.
        rank: data-parallel rank behind the URL, None = the URL has one engine.
        weight: relative capacity, > 0.
    """

    name: str
    url: str = ""
    rank: int | None = None
    weight: float = 1.0

    def __post_init__(self) -> None:
        if not self.name:
            raise ValueError("worker: the name is empty")
        if self.rank is not None and self.rank < 0:
            raise ValueError(f"worker {self.name}: rank must be >= 0, got {self.rank}")
        if not (math.isfinite(self.weight) and self.weight > 0):
            raise ValueError(f"worker {self.name}: weight must be > 0, got {self.weight}")


class WorkerTable:
    """Per-slot state as arrays; a slot without a worker is never a candidate.

    Attributes:
        workers: the worker of every slot, None = free.
        names: their names, "" = free.
        requests: int64 [S], running requests.
        others: float64 [S], measured running requests that are not ours (other routers').
        kv_tokens: int64 [S], KV tokens at the start of the running requests.
        turns: float64 [S], round robin's clock: weighted count of requests given, moved up for a
            worker that was away.
        weight: float64 [S].
        open: bool [S], takes new requests.
        experts: expert load, or None when it is not tracked.
        lengths: mean predicted decode length of the requests placed.
        epoch: changes whenever a worker joins or leaves.
    """

    def __init__(self, experts: ExpertLoad | None) -> None:
        self.workers: list[Worker | None] = []
        self.names: tuple[str, ...] = ()
        self.requests: npt.NDArray[np.int64] = np.zeros(0, np.int64)
        self.others: npt.NDArray[np.float64] = np.zeros(0, np.float64)
        self.kv_tokens: npt.NDArray[np.int64] = np.zeros(0, np.int64)
        self.turns: npt.NDArray[np.float64] = np.zeros(0, np.float64)
        self.weight: npt.NDArray[np.float64] = np.ones(0, np.float64)
        self.open: npt.NDArray[np.bool_] = np.zeros(0, np.bool_)
        self.experts = experts
        self.lengths = Lengths()
        self.epoch = 0
        self._latest = self._longest = 0.0  # of `turns` that were taken, and of one turn

    def put(self, worker: Worker) -> int:
        """Places a worker in a free or new slot and returns the slot."""
        slot = next((i for i, w in enumerate(self.workers) if w is None), len(self.workers))
        if slot == len(self.workers):
            self._grow()
        # A newcomer's clock starts level with the others, or round robin would flood it.
        others = self.turns[self.open]
        self.workers[slot] = worker
        self.weight[slot] = worker.weight
        self._longest = max(self._longest, 1.0 / worker.weight)
        self.turns[slot] = others.min() if len(others) else 0.0
        self.open[slot] = True
        self._renamed()
        return slot

    def take_turn(self, slot: int) -> None:
        """Moves a worker's clock on by its turn.

        Workers that take part are never more than the longest turn behind the last one taken. One
        that is was away, and does not catch up: round robin would send it everything until then.
        """
        behind = self._latest - self._longest
        now = max(float(self.turns[slot]), behind) + 1.0 / float(self.weight[slot])
        self.turns[slot] = now
        self._latest = max(self._latest, now)

    def drop(self, slot: int) -> None:
        """Frees a slot and forgets its load."""
        self.workers[slot] = None
        self.requests[slot] = self.kv_tokens[slot] = 0
        self.others[slot] = 0.0
        self.open[slot] = False
        if self.experts is not None:
            self.experts.clear(slot)
        self._renamed()

    def _grow(self) -> None:
        self.workers.append(None)
        slots = len(self.workers)
        for name in ("requests", "others", "kv_tokens", "turns", "weight", "open"):
            old = getattr(self, name)
            new = np.zeros(slots, old.dtype)
            new[: len(old)] = old
            setattr(self, name, new)
        if self.experts is not None:
            self.experts.resize(slots)

    def _renamed(self) -> None:
        self.names = tuple("" if w is None else w.name for w in self.workers)
        self.epoch += 1
