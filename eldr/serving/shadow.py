"""Shadow policies: what another rule would have done with the same stream of requests.

Each has a fleet of its own, in which the same requests begin and end at the same moments, placed by
its own choices; so its loads, and the distinct experts expected of them, are those of a world in
which it decides. They never touch the live decision.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

from eldr.geometry import Geometry
from eldr.routing.fleet import Fleet, NoWorkerError
from eldr.routing.policies.base import Policy
from eldr.routing.request import RouteRequest
from eldr.routing.worker import Worker


class Shadow:
    """One shadow policy with its fleet.

    Attributes:
        agreed: decisions by whether they were the live one's.
    """

    def __init__(
        self, policy: Policy, geometry: Geometry | None, *, min_coverage: float, seed: int
    ) -> None:
        self.fleet = Fleet(policy, geometry=geometry, min_coverage=min_coverage, seed=seed)
        self.agreed: Counter[bool] = Counter()

    @property
    def name(self) -> str:
        """The policy's name."""
        return self.fleet.policy.name

    def decide(self, request: RouteRequest, live: str, members: Sequence[Worker]) -> str | None:
        """Places a request among the members; returns the worker, None if there is none."""
        self._sync(members)
        try:
            chosen = self.fleet.reserve(request).worker.name
        except NoWorkerError:
            return None
        self.agreed[chosen == live] += 1
        return chosen

    def release(self, request_id: str) -> None:
        """The request has ended."""
        self.fleet.release(request_id)

    def _sync(self, members: Sequence[Worker]) -> None:
        wanted = {worker.name for worker in members}
        present = set(self.fleet.names)
        if wanted == present:
            return
        for name in present - wanted:
            self.fleet.leave(name)
        for worker in members:
            if worker.name not in present:
                self.fleet.join(worker)


def distinct_per_request(fleet: Fleet) -> float | None:
    """Expected distinct experts, over all layers, of the step that a running request is in.

    The mean over running requests: sum over workers of n * D, divided by the sum of n. None without
    expert load or running requests.
    """
    rows: list[dict[str, Any]] = fleet.status()
    running = sum(row["requests"] for row in rows)
    if not running or any(row["experts"] is None for row in rows):
        return None
    return float(sum(row["requests"] * row["experts"] for row in rows) / running)
