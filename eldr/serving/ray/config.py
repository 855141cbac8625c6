"""Configuration of the Ray Serve application; unknown keys and wrong types are errors."""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any, Literal

import msgspec

from eldr.routing.partition import PartitionError, load_partition
from eldr.routing.policies import POLICIES, make_policy
from eldr.routing.policies.locality import LocalityBand
from eldr.serving.config import ConfigError
from eldr.serving.ray.decider import RoutingOptions

_ENGINE = "eldr.engine.inprocess:open_application"
_NOT_NEGATIVE = ("retry_budget",)
_POSITIVE = (
    "attempts",
    "request_timeout",
    "first_byte_timeout",
    "idle_timeout",
    "max_body",
    "measure_interval",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolOptions:
    """One pool of replicas.

    Attributes:
        engine: options of vLLM's command line, added to the application's `engine`.
        env: environment variables of the replicas.
        replicas: their number, if `autoscaling` does not decide.
        autoscaling: Serve's `autoscaling_config`, or empty.
        actor: Serve's `ray_actor_options`, such as `{"num_gpus": 1}`.
        max_ongoing: requests that Serve lets one replica have; engines queue on their own.
        deployment: further options of `serve.deployment`.
    """

    engine: dict[str, Any] = field(default_factory=dict)
    env: dict[str, str] = field(default_factory=dict)
    replicas: int = 1
    autoscaling: dict[str, Any] = field(default_factory=dict)
    actor: dict[str, Any] = field(default_factory=dict)
    max_ongoing: int = 1024
    deployment: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for name in ("replicas", "max_ongoing"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name}: must be at least 1, got {getattr(self, name)}")


@dataclass(frozen=True, slots=True, kw_only=True)
class RayConfig:
    """The whole application; durations are seconds, sizes bytes.

    Attributes:
        engine: options of vLLM's command line for both pools, with `model`; connector, roles and
            `additional_config` of ELDR are filled in where they are missing.
        prefill, decode, proxy: the three deployments; the proxy runs no engine.
        routing: how decode replicas are chosen.
        unsplittable: batches of prompts, prompt logprobs, beam search: "whole" on a decode replica
            or "fail".
        several_choices: n or best_of above one: "split", "whole" or "fail".
        attempts: tries per leg.
        retry_budget: retries that each request earns for all.
        request_timeout: longest life of a request.
        first_byte_timeout, idle_timeout: longest wait for a replica's first byte, and for the next.
        max_body: largest request body.
        measure_interval: pause between measurements of a decode replica.
        worker_headers: tell clients which replicas served them.
        operator: serve `/eldr/...`: decisions, replicas, and prefill replicas for `eldr record`.
        application: `module:function` that opens an ASGI application from engine options; another
            one than vLLM's is for tests.
    """

    engine: dict[str, Any] = field(default_factory=dict)
    prefill: PoolOptions = field(default_factory=PoolOptions)
    decode: PoolOptions = field(default_factory=PoolOptions)
    proxy: PoolOptions = field(default_factory=PoolOptions)
    routing: RoutingOptions = field(default_factory=RoutingOptions)
    unsplittable: Literal["whole", "fail"] = "whole"
    several_choices: Literal["split", "whole", "fail"] = "split"
    attempts: int = 5
    retry_budget: float = 0.5
    request_timeout: float = 1800.0
    first_byte_timeout: float = 300.0
    idle_timeout: float = 120.0
    max_body: int = 64 * 2**20
    measure_interval: float = 1.0
    worker_headers: bool = False
    operator: bool = False
    application: str = _ENGINE

    def __post_init__(self) -> None:
        for name in _POSITIVE:
            if not getattr(self, name) > 0:
                raise ConfigError(f"{name}: must be positive, got {getattr(self, name)!r}")
        for name in _NOT_NEGATIVE:
            if getattr(self, name) < 0:
                raise ConfigError(f"{name}: must not be negative, got {getattr(self, name)!r}")
        if self.proxy.engine:
            raise ConfigError(f"proxy.engine: the proxy runs no engine, got {self.proxy.engine}")
        if self.application == _ENGINE and "model" not in self.engine:
            raise ConfigError("engine.model is missing: name the model that both pools serve")
        self._check_routing()

    def _check_routing(self) -> None:
        routing = self.routing
        if routing.policy not in POLICIES or routing.policy == "domain":
            known = ", ".join(name for name in POLICIES if name != "domain")
            raise ConfigError(f"routing.policy: no policy {routing.policy!r}; there are {known}")
        for name in ("tau", "min_coverage", "trust"):
            if not 0.0 <= getattr(routing, name) <= 1.0:
                raise ConfigError(
                    f"routing.{name}: must be in [0, 1], got {getattr(routing, name)}"
                )
        by_centroid = isinstance(make_policy(routing.policy), LocalityBand)
        if by_centroid != bool(routing.partition):
            verb = "needs a partition file" if by_centroid else "uses no partition"
            raise ConfigError(f"routing: policy {routing.policy} {verb}, got {routing.partition!r}")
        if routing.partition:
            try:
                load_partition(routing.partition)
            except PartitionError as error:
                raise ConfigError(f"routing.partition: {error}") from error


def read_config(values: Mapping[str, Any]) -> RayConfig:
    """A configuration from plain values, such as `args` of a Serve config file.

    Raises:
        ConfigError: unknown key (with the nearest known one), wrong type, out of range.
    """
    nested = {"prefill": PoolOptions, "decode": PoolOptions, "proxy": PoolOptions}
    kinds: dict[str, type[Any]] = {**nested, "routing": RoutingOptions}
    read: dict[str, Any] = dict(values)
    for name, kind in kinds.items():
        if name in read:
            read[name] = _read(kind, read[name], f"{name}.")
    config: RayConfig = _build(RayConfig, read, "")
    return config


def _read(kind: type[Any], values: Any, where: str) -> Any:
    if isinstance(values, kind):
        return values
    if not isinstance(values, Mapping):
        raise ConfigError(f"{where[:-1]}: expected a table of options, got {values!r}")
    return _build(kind, dict(values), where)


def _build(kind: type[Any], values: dict[str, Any], where: str) -> Any:
    known = [f.name for f in fields(kind)]
    for name in values:
        if name not in known:
            close = difflib.get_close_matches(name, known, n=1)
            hint = f"; did you mean {where}{close[0]}?" if close else f"; there are {known}"
            raise ConfigError(f"{where}{name}: no such option{hint}")
    try:
        return msgspec.convert(values, kind)
    except msgspec.ValidationError as error:
        raise ConfigError(f"{where or 'application'}: {error}") from error
