"""Configuration of the llm-d coordinator; unknown keys and wrong types are errors."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any
from urllib.parse import urlsplit

from eldr.geometry import Geometry
from eldr.routing.partition import load_partition
from eldr.serving.config import ConfigError
from eldr.serving.pd.options import RequestOptions, RoutingOptions, build


@dataclass(frozen=True, slots=True, kw_only=True)
class CoordinatorConfig:
    """The whole coordinator.

    Attributes:
        gateway: base URL of the Inference Gateway that routes by `EPP-Profile`.
        clusters: groups of decode pods, numbered by the label that the endpoint picker compares
            with the cluster header; 0 takes the partition's number.
        profile_header: names the phase of a call.
        prefill_profile, decode_profile: its values.
        cluster_header: names the group in the decode call.
        geometry: (layers, experts, top_k) of the model's routing; empty takes the partition's.
        host, port: to listen on.
        connections: at once to the gateway, 0 = no bound.
        routing: how groups are chosen; nothing is measured here, so `trust` is 0.
        requests: how requests are treated.
    """

    gateway: str
    clusters: int = 0
    profile_header: str = "EPP-Profile"
    prefill_profile: str = "prefill"
    decode_profile: str = "decode"
    cluster_header: str = "x-eldr-cluster"
    geometry: tuple[int, int, int] | None = None
    host: str = "127.0.0.1"
    port: int = 8080
    connections: int = 0
    routing: RoutingOptions = field(default_factory=RoutingOptions)
    requests: RequestOptions = field(default_factory=RequestOptions)

    def __post_init__(self) -> None:
        parts = urlsplit(self.gateway)
        if parts.scheme not in ("http", "https") or not parts.netloc:
            raise ConfigError(f"gateway: expected an http(s) URL, got {self.gateway!r}")
        if self.clusters < 0 or self.connections < 0:
            raise ConfigError("clusters and connections must not be negative")
        self.routing.check_files()
        if not self.routing.partition and (not self.clusters or self.geometry is None):
            raise ConfigError(
                "without a partition file (routing.partition) the coordinator needs clusters and "
                "geometry: it can ask no worker for them"
            )

    def resolved(self) -> tuple[int, Geometry]:
        """Number of groups and geometry, from the partition where they are not given.

        Raises:
            ConfigError: the partition was fitted for another geometry.
        """
        given = None if self.geometry is None else Geometry(*self.geometry)
        if not self.routing.partition:
            assert given is not None
            return self.clusters, given
        partition = load_partition(self.routing.partition)
        if given not in (None, partition.geometry):
            raise ConfigError(f"geometry: {given}, but the partition has {partition.geometry}")
        return self.clusters or partition.workers, partition.geometry


def read_config(values: Mapping[str, Any]) -> CoordinatorConfig:
    """A configuration from plain values.

    Raises:
        ConfigError: unknown key (with the nearest known one), wrong type, out of range.
    """
    read = dict(values)
    read["routing"] = replace(build(RoutingOptions, read.get("routing", {}), "routing."), trust=0.0)
    if "requests" in read:
        read["requests"] = build(RequestOptions, read["requests"], "requests.")
    return build(CoordinatorConfig, read)
