"""One or several routers in front of one fleet of simulated workers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

import numpy as np
import numpy.typing as npt

from eldr.geometry import Geometry
from eldr.routing.fleet import Fleet
from eldr.routing.policies.base import Policy
from eldr.routing.request import RouteRequest
from eldr.routing.step_fit import StepSample
from eldr.routing.worker import Worker


class _Config(Protocol):
    @property
    def workers(self) -> int: ...
    @property
    def routers(self) -> int: ...
    @property
    def shared(self) -> bool: ...
    @property
    def seed(self) -> int: ...
    @property
    def trust(self) -> float: ...


class Routers:
    """`eldr.routing` fleets, and which of them holds each request.

    Shared: every fleet has every worker and sees only the requests that it placed itself. Otherwise
    worker j belongs to router j mod R alone.
    """

    def __init__(
        self, config: _Config, geometry: Geometry, policy: Callable[[Sequence[str]], Policy]
    ) -> None:
        names = [f"w{i}" for i in range(config.workers)]
        self._shared = config.shared
        self.fleets = [
            Fleet(
                policy(names if config.shared else names[r :: config.routers]),
                geometry=geometry,
                seed=config.seed * config.routers + r,
                trust=config.trust,
            )
            for r in range(config.routers)
        ]
        self.index: dict[str, int] = {}  # place in the pool of every worker that ever joined
        self._owner: dict[str, list[Fleet]] = {}
        self._placed: dict[int, Fleet] = {}

    @property
    def created(self) -> int:
        """Workers that ever joined."""
        return len(self.index)

    @property
    def running(self) -> int:
        """Reservations held now."""
        return sum(fleet.running for fleet in self.fleets)

    def join(self, worker: Worker, index: int) -> None:
        """A worker appears; `index` is its place in the pool."""
        owners = self.fleets if self._shared else [self.fleets[index % len(self.fleets)]]
        for fleet in owners:
            fleet.join(worker)
        self.index[worker.name] = index
        self._owner[worker.name] = owners

    def drain(self, name: str) -> None:
        """The worker takes nothing new."""
        for fleet in self._owner[name]:
            fleet.drain(name)

    def leave(self, name: str) -> int:
        """The worker is gone, with its reservations; returns its place in the pool."""
        for fleet in self._owner[name]:
            for request in fleet.leave(name):
                del self._placed[int(request)]
        self._owner[name] = []
        return self.index[name]

    def observe(self, name: str, sample: StepSample, use: npt.NDArray[np.float64] | None) -> None:
        """Tells every router of a worker what the worker measured."""
        for fleet in self._owner[name]:
            fleet.observe(name, sample, use)

    def reserve(self, i: int, request: RouteRequest) -> tuple[int, str | None]:
        """Request `i` asks router i mod R; its worker, and why it was placed on load alone."""
        fleet = self.fleets[i % len(self.fleets)]
        decision = fleet.reserve(request)
        self._placed[i] = fleet
        reason = None if decision.reason is None else str(decision.reason)
        return self.index[decision.worker.name], reason

    def release(self, i: int) -> None:
        """Request `i` has ended."""
        self._placed.pop(i).release(str(i))

    def check_integrity(self) -> None:
        """Every fleet recomputes its counters.

        Raises:
            AssertionError: a counter differs.
        """
        for fleet in self.fleets:
            fleet.check_integrity()
