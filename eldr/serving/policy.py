"""From configuration to a decode policy; a partition is checked against model and fleet."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from eldr.geometry import Geometry
from eldr.routing.partition import Partition, PartitionError, load_partition
from eldr.routing.policies import POLICIES, make_policy
from eldr.routing.policies.base import Policy
from eldr.routing.refit import remap
from eldr.serving.config import RouterConfig
from eldr.serving.errors import StartError

# The domain oracle needs labels that real requests do not have.
SERVING_POLICIES = tuple(name for name in POLICIES if name != "domain")
AUTO = "auto"
_BY_CENTROID = frozenset({"locality_band", "nearest", "nearest_two", "bounded_load"})
BY_SIGNATURE = _BY_CENTROID | {"marginal_cost"}


def live_policies(config: RouterConfig) -> tuple[str, ...]:
    """The policies that decide: the arms of an experiment, or the one configured."""
    return config.ab or (config.policy,)


def check_names(config: RouterConfig) -> tuple[str, ...]:
    """All configured policies; known without asking any worker, so asked first.

    Raises:
        StartError: no such policy.
    """
    named = (*live_policies(config), *config.shadow)
    for name in named:
        if name not in SERVING_POLICIES and not (name == AUTO and not config.ab):
            known = ", ".join((AUTO, *SERVING_POLICIES))
            raise StartError(f"unknown policy {name!r}; there are {known}")
    return named


def decided(config: RouterConfig, geometry: Geometry | None) -> RouterConfig:
    """The configuration with a policy in place of `auto`: what the workers allow."""
    if config.policy != AUTO or config.ab:
        return config
    return replace(config, policy="least_requests" if geometry is None else "marginal_cost")


def signature_policy(config: RouterConfig) -> str | None:
    """A configured policy that decides on signatures, None if there is none."""
    named = (*live_policies(config), *config.shadow)
    return next((name for name in named if name in BY_SIGNATURE), None)


class PolicyMaker:
    """Builds the configured policies; a partition is read once, whoever uses it."""

    def __init__(
        self, config: RouterConfig, geometry: Geometry | None, names: Sequence[str]
    ) -> None:
        """What the policies are built for.

        Args:
            config: names the policies and the partition.
            geometry: of the served model, None if no worker is patched.
            names: of the decode workers, in the order given.

        Raises:
            StartError: no such policy, a partition that nobody uses, none where one is needed, or
                one that does not fit.
        """
        self._config = config
        named = check_names(config)
        centroid = next((name for name in named if name in _BY_CENTROID), None)
        if centroid is not None and not config.partition and not config.refit_every:
            raise StartError(
                f"policy {centroid} needs --partition FILE; fit one with `eldr record` and "
                "`eldr fit`, or let the router do it with --refit-every"
            )
        if config.refit_every and centroid is None:
            raise StartError(f"policy {named[0]} uses no partition; leave --refit-every out")
        if config.refit_every and config.refit_window < len(names):
            raise StartError(
                f"refit_window: {config.refit_window} signatures cannot be fitted to {len(names)} "
                "workers"
            )
        if config.partition and centroid is None:
            raise StartError(f"policy {named[0]} uses no partition; leave --partition out")
        self._partition = (
            read_partition(config.partition, geometry, names, vacant=bool(config.k8s_decode))
            if config.partition
            else None
        )

    def make(self, name: str) -> Policy:
        """A new policy of that name."""
        options: dict[str, Any] = {}
        if name in _BY_CENTROID:
            options["partition"] = self._partition
        if name == "locality_band":
            options["tau"] = self._config.tau
        return make_policy(name, **options)


def read_partition(
    path: str, geometry: Geometry | None, names: Sequence[str], *, vacant: bool
) -> Partition:
    """Loads a partition and binds its centroids to the decode workers.

    Centroids go by worker name where the names match, else by position.

    Args:
        path: of the file.
        geometry: of the served model.
        names: of the decode workers.
        vacant: whether the number of workers may be another than that of centroids. Who is not
            ready now may come under any name, and takes a centroid that is left; workers beyond
            share others' centroids.

    Raises:
        StartError: unreadable, fitted for another geometry or another number of workers.
    """
    try:
        partition = load_partition(path, geometry=geometry)
        if vacant and len(names) < partition.workers:
            free = [name for name in partition.names if name not in names]
            return seated(partition, names, free)[0]
        if vacant and len(names) > partition.workers:
            return remap(partition, names)
        return partition.bind(names)
    except PartitionError as error:
        text = str(error)
        raise StartError(text if path in text else f"{path}: {text}") from error


def seated(
    partition: Partition, names: Sequence[str], vacant: Sequence[str]
) -> tuple[Partition, list[str]]:
    """Gives centroids without a worker to workers without a centroid, in order.

    Args:
        partition: whose names may be of workers that are not there.
        names: of the workers that are there.
        vacant: names in the partition that no worker has or had.

    Returns:
        The partition with the new names, and the vacant names that are left.
    """
    homeless = [name for name in names if name not in partition.names]
    given = dict(zip(vacant, homeless, strict=False))
    renamed = tuple(given.get(name, name) for name in partition.names)
    return replace(partition, names=renamed), list(vacant[len(given) :])
