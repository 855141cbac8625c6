"""Configuration of the Ray Serve application; unknown keys and wrong types are errors."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from eldr.serving.config import ConfigError
from eldr.serving.pd.options import RequestOptions, RoutingOptions, build

_ENGINE = "eldr.engine.inprocess:open_application"


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
        requests: how requests are treated.
        measure_interval: pause between measurements of a decode replica.
        operator: serve `/eldr/...`: decisions, replicas, and prefill replicas for `eldr record`.
        application: `module:function` that opens an ASGI application from engine options; another
            one than vLLM's is for tests.
    """

    engine: dict[str, Any] = field(default_factory=dict)
    prefill: PoolOptions = field(default_factory=PoolOptions)
    decode: PoolOptions = field(default_factory=PoolOptions)
    proxy: PoolOptions = field(default_factory=PoolOptions)
    routing: RoutingOptions = field(default_factory=RoutingOptions)
    requests: RequestOptions = field(default_factory=RequestOptions)
    measure_interval: float = 0.25
    operator: bool = False
    application: str = _ENGINE

    def __post_init__(self) -> None:
        if not self.measure_interval > 0:
            raise ConfigError(f"measure_interval: must be positive, got {self.measure_interval}")
        if self.proxy.engine:
            raise ConfigError(f"proxy.engine: the proxy runs no engine, got {self.proxy.engine}")
        if self.application == _ENGINE and "model" not in self.engine:
            raise ConfigError("engine.model is missing: name the model that both pools serve")
        self.routing.check_files()


def read_config(values: Mapping[str, Any]) -> RayConfig:
    """A configuration from plain values, such as `args` of a Serve config file.

    Raises:
        ConfigError: unknown key (with the nearest known one), wrong type, out of range.
    """
    kinds: dict[str, type[Any]] = {
        **dict.fromkeys(("prefill", "decode", "proxy"), PoolOptions),
        "routing": RoutingOptions,
        "requests": RequestOptions,
    }
    read: dict[str, Any] = dict(values)
    for name, kind in kinds.items():
        if name in read:
            read[name] = build(kind, read[name], f"{name}.")
    return build(RayConfig, read)
