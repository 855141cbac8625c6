"""Pure routing decisions: fleet, policies, partition; NumPy only, neither vLLM nor HTTP.

fleet = Fleet(make_policy("marginal_cost"), [Worker("d0"), Worker("d1")], geometry=geometry)
decision = fleet.reserve(RouteRequest("request-1", decode(payload, geometry)))
...
fleet.release("request-1")
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from eldr.routing.activation import ActivationModel, Shrinkage
from eldr.routing.cost import StepCost
from eldr.routing.decision import Choice, Context, Decision
from eldr.routing.fit import FitError, fit_partition
from eldr.routing.fleet import Fleet, NoWorkerError
from eldr.routing.partition import Partition, PartitionError, load_partition
from eldr.routing.policies import POLICIES, Policy, make_policy
from eldr.routing.recorded import Recorded, RecordedError, load_recorded
from eldr.routing.request import Reason, RouteRequest
from eldr.routing.step_fit import StepSample
from eldr.routing.worker import Worker

if TYPE_CHECKING:
    from eldr.routing.device import DeviceRouter

__all__ = [
    "POLICIES",
    "ActivationModel",
    "Choice",
    "Context",
    "Decision",
    "DeviceRouter",
    "FitError",
    "Fleet",
    "NoWorkerError",
    "Partition",
    "PartitionError",
    "Policy",
    "Reason",
    "Recorded",
    "RecordedError",
    "RouteRequest",
    "Shrinkage",
    "StepCost",
    "StepSample",
    "Worker",
    "fit_partition",
    "load_partition",
    "load_recorded",
    "make_policy",
]


def __getattr__(name: str) -> Any:
    """`DeviceRouter` needs torch, which the router process must not load."""
    if name == "DeviceRouter":
        from eldr.routing.device import DeviceRouter

        return DeviceRouter
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
