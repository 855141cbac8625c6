"""Decode workers with continuous batching: what a pool is told, and what it tells.

A worker runs steps back to back. Before a step it admits waiting requests in order of readiness,
while the batch and the KV memory allow. A step reads one token of every running request, lasts as
long as the step cost says, and every request that has produced its last token leaves at its end.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

from eldr.geometry import Geometry
from eldr.routing.cost import StepCost
from eldr.simulation import placement
from eldr.simulation.replay import Replay

UNLIMITED = 1 << 60


@dataclass(frozen=True, slots=True)
class PoolConfig:
    """How the workers of a pool behave.

    Attributes:
        cost: the step cost; its D are the trace's cells (layers x experts), with expert
            parallelism those of the slowest rank of each layer.
        max_batch: most requests in a step.
        kv_tokens: KV memory of a worker; a request reserves prompt + output on admission.
        expert_ranks: expert-parallel ranks of a worker; 1 = every GPU reads a share of each expert.
        owners: which rank holds which expert, see `placement`; None = contiguous blocks.
        seed: of the draws past a request's recorded decode.
        expected: expected-value mode: expected distinct experts instead of counted ones.
        track_use: keep how often each expert was read.
    """

    cost: StepCost
    max_batch: int = 256
    kv_tokens: int = UNLIMITED
    expert_ranks: int = 1
    owners: placement.Owners | None = field(default=None, compare=False)
    seed: int = 0
    expected: bool = False
    track_use: bool = False

    def __post_init__(self) -> None:
        if self.max_batch < 1 or self.kv_tokens < 1:
            raise ValueError("pool: max_batch and kv_tokens must be positive")
        if not 1 <= self.expert_ranks <= 255:
            raise ValueError(f"pool: expert_ranks must be in [1, 255], got {self.expert_ranks}")

    def placed(self, geometry: Geometry) -> placement.Owners:
        """The placement, uint8 [P, L, E].

        Raises:
            ValueError: more ranks than experts, or a placement that does not fit.
        """
        if self.expert_ranks > geometry.experts:
            raise ValueError(
                f"expert parallelism: {self.expert_ranks} ranks cannot share {geometry.experts}"
            )
        if self.owners is None:
            return placement.linear(geometry, self.expert_ranks)
        placement.check(self.owners, geometry, self.expert_ranks)
        return np.ascontiguousarray(self.owners)


class Completion(NamedTuple):
    """A request that ended: when, where, which."""

    time: float
    worker: int
    request: int


@dataclass(slots=True)
class Totals:
    """Sums over the steps that a worker has finished, and what it holds now.

    `distinct` [L] and `use` [L * E] are sums over steps (`use` is empty unless tracked); `kv` sums
    the KV tokens of every step; `slowest` the D of the step cost.
    """

    seconds: float
    steps: int
    tokens: int
    kv: float
    slowest: float
    running: int
    waiting: int
    reserved: int
    distinct: npt.NDArray[np.float64]
    use: npt.NDArray[np.float64] = field(default_factory=lambda: np.empty(0))


class Pool(Protocol):
    """W decode workers, driven by deliveries and by time that never runs back."""

    def add_worker(self, now: float) -> int:
        """Starts an empty worker at `now`; returns its index."""

    def submit(
        self, worker: int, request: int, row: int, steps: int, context: int, ready: float
    ) -> None:
        """Hands a request over; its KV is there at `ready`, and `steps` tokens are to be made.

        Raises:
            ValueError: unknown or failed worker, `ready` in the past, a request that can never fit.
        """

    def advance(self, until: float) -> list[Completion]:
        """Ends every step that ends by `until`, starts those before it; completions in order."""

    def fail(self, worker: int) -> tuple[list[int], list[int]]:
        """The worker is gone: the requests that ran on it, and those that waited for it."""

    def totals(self, worker: int) -> Totals:
        """What the worker has done so far."""


def make_pool(replay: Replay, config: PoolConfig) -> Pool:
    """The compiled pool, or the plain-Python one where the native library was not built."""
    try:
        from eldr.simulation.native import NativePool
    except ImportError:
        import sys

        from eldr.simulation.reference import ReferencePool

        print("eldr: no native library, simulating in plain Python (slow)", file=sys.stderr)
        return ReferencePool(replay, config)
    return NativePool(replay, config)
