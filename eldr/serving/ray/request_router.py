"""Serve's side of the decision: a request router that asks ELDR which decode replica to take.

Names of the replicas are their unique ids. Where a request comes without a `Route` (an operator's
call, for example), the replica with the fewest requests takes it.

Serve ships this class by value: whatever its methods share with other modules they must import.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ray.serve.request_router import PendingRequest, ReplicaID, RequestRouter, RunningReplica

from eldr.serving.pd.decider import Decider, Replica, register
from eldr.serving.pd.options import RoutingOptions
from eldr.serving.pd.route import Route
from eldr.serving.ray.metrics import ProxyMetrics
from eldr.serving.ray.replica import geometry_of


class EldrRequestRouter(RequestRouter):  # type: ignore[misc]
    """Routes calls whose first argument is a `Route` by `eldr.routing`.

    `request_router_kwargs` are `RoutingOptions`.
    """

    def initialize_state(self, **options: Any) -> None:
        """Called by Serve, with the configured options, before any replica is known."""
        self._metrics = ProxyMetrics()
        self.decider = Decider(RoutingOptions(**options), self._metrics.decided)
        register(self._deployment_id.name, self.decider)

    def update_replicas(self, replicas: list[RunningReplica]) -> None:
        """Replicas came, went, changed their rank or measured something."""
        super().update_replicas(replicas)
        self._tell()

    def on_replica_actor_died(self, replica_id: ReplicaID) -> None:
        """Nothing more goes there, before the controller says so."""
        super().on_replica_actor_died(replica_id)
        self._tell()

    def _tell(self) -> None:
        self.decider.members([_facts(replica) for replica in self.curr_replicas.values()])

    async def choose_replicas(
        self,
        candidate_replicas: list[RunningReplica],
        pending_request: PendingRequest | None = None,
    ) -> Sequence[list[RunningReplica]]:
        """The one replica that ELDR chose; asked again, another one if there is one."""
        arguments = pending_request.args if pending_request is not None else []
        if pending_request is not None:
            pending_request.routing_context.should_backoff = True  # when all replicas are full
        if not arguments or not isinstance(arguments[0], Route):
            return [candidate_replicas]
        by_name = {replica.replica_id.unique_id: replica for replica in candidate_replicas}
        chosen = self.decider.reserve(arguments[0], by_name.keys())
        return [] if chosen is None else [[by_name[chosen]]]


def _facts(replica: RunningReplica) -> Replica:
    stats, metadata = replica.routing_stats or {}, replica.replica_metadata
    return Replica(
        name=replica.replica_id.unique_id,
        rank=int(stats.get("rank", metadata.get("rank", 0))),
        geometry=geometry_of(metadata),
        sample=stats.get("sample"),
    )
