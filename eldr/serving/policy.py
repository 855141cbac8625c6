"""From configuration to a decode policy; a partition is checked against model and fleet."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from eldr.geometry import Geometry
from eldr.routing.partition import Partition, PartitionError, load_partition
from eldr.routing.policies import POLICIES, make_policy
from eldr.routing.policies.base import Policy
from eldr.serving.config import RouterConfig
from eldr.serving.errors import StartError

# The domain oracle needs labels that real requests do not have.
SERVING_POLICIES = tuple(name for name in POLICIES if name != "domain")
_BY_CENTROID = frozenset({"locality_band", "nearest", "nearest_two", "bounded_load"})
_BY_SIGNATURE = _BY_CENTROID | {"marginal_cost"}


def needs_signatures(policy: str) -> bool:
    """Whether a policy decides on signatures."""
    return policy in _BY_SIGNATURE


def build_policy(config: RouterConfig, geometry: Geometry | None, names: Sequence[str]) -> Policy:
    """The configured policy.

    Args:
        config: names the policy and its partition.
        geometry: of the served model, None if no worker is patched.
        names: of the decode workers, in the order given.

    Raises:
        StartError: no such policy, no partition where one is needed, or one that does not fit.
    """
    if config.policy not in SERVING_POLICIES:
        raise StartError(
            f"unknown policy {config.policy!r}; there are {', '.join(SERVING_POLICIES)}"
        )
    options: dict[str, Any] = {}
    if config.policy in _BY_CENTROID:
        if not config.partition:
            raise StartError(
                f"policy {config.policy} needs --partition FILE; fit one with `eldr record` and "
                "`eldr fit`"
            )
        options["partition"] = read_partition(config.partition, geometry, names)
        if config.policy == "locality_band":
            options["tau"] = config.tau
    elif config.partition:
        raise StartError(f"policy {config.policy} uses no partition; leave --partition out")
    return make_policy(config.policy, **options)


def read_partition(path: str, geometry: Geometry | None, names: Sequence[str]) -> Partition:
    """Loads a partition and binds its centroids to the decode workers.

    Centroids go by worker name where the names match, else by position.

    Raises:
        StartError: unreadable, fitted for another geometry or another number of workers.
    """
    try:
        return load_partition(path, geometry=geometry, workers=names)
    except PartitionError as error:
        text = str(error)
        raise StartError(text if path in text else f"{path}: {text}") from error
