"""The policies by name."""

from __future__ import annotations

import inspect
from typing import Any

from eldr.routing.policies.affinity import DomainOracle, SessionAffinity
from eldr.routing.policies.balance import LeastKv, LeastRequests, PowerOfTwo, Random, RoundRobin
from eldr.routing.policies.base import Policy
from eldr.routing.policies.locality import BoundedLoad, LocalityBand, Nearest, NearestTwo
from eldr.routing.policies.marginal import MarginalCost

__all__ = ["POLICIES", "Policy", "make_policy"]

POLICIES: dict[str, type[Policy]] = {
    policy.name: policy
    for policy in (
        Random,
        RoundRobin,
        LeastRequests,
        PowerOfTwo,
        LeastKv,
        SessionAffinity,
        DomainOracle,
        LocalityBand,
        Nearest,
        NearestTwo,
        BoundedLoad,
        MarginalCost,
    )
}


def make_policy(name: str, **options: Any) -> Policy:
    """Builds a policy by name.

    Args:
        name: a key of POLICIES.
        options: the policy's own, e.g. `partition` and `tau` of locality_band.

    Raises:
        ValueError: unknown name, unknown option, or a value out of range.
    """
    policy = POLICIES.get(name)
    if policy is None:
        raise ValueError(f"unknown policy {name!r}; there are {', '.join(POLICIES)}")
    known = [p for p in inspect.signature(policy).parameters if p not in ("args", "kwargs")]
    unknown = sorted(set(options) - set(known))
    if unknown:
        raise ValueError(f"policy {name}: unknown option {unknown[0]!r}; it takes {known}")
    return policy(**options)
