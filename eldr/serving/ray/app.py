"""Builds the Serve application: proxy in front, prefill and decode pools behind it."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from eldr import __version__
from eldr.serving.ray.config import PoolOptions, RayConfig, read_config

PREFILL, DECODE, PROXY = "EldrPrefill", "EldrDecode", "EldrProxy"
_ROUTER = "eldr.serving.ray.request_router:EldrRequestRouter"
_KV_ROLES = {"prefill": "kv_producer", "decode": "kv_consumer"}


def build_eldr_pd_app(config: Mapping[str, Any] | RayConfig) -> Any:
    """The application, for `serve.run` or as `import_path` of a Serve config file.

    Args:
        config: a `RayConfig`, or its values as plain data (`args` of a config file).

    Raises:
        ConfigError: a configuration that cannot be used.
    """
    from ray import serve
    from ray.serve.config import RequestRouterConfig

    from eldr.serving.ray.proxy import PDProxy
    from eldr.serving.ray.replica import EngineReplica

    settings = config if isinstance(config, RayConfig) else read_config(config)
    stats = {"request_routing_stats_period_s": settings.measure_interval}
    engine = serve.deployment(EngineReplica)
    prefill_starts = ("prefill", settings.application, engine_options(settings, "prefill"))
    decode_starts = ("decode", settings.application, engine_options(settings, "decode"))
    prefill = engine.options(name=PREFILL, **_options(settings.prefill), **_version(prefill_starts))
    decode = engine.options(
        name=DECODE,
        request_router_config=RequestRouterConfig(
            request_router_class=_ROUTER, request_router_kwargs=asdict(settings.routing), **stats
        ),
        **_options(settings.decode),
        **_version(decode_starts),
    )
    decides = [asdict(settings.requests), asdict(settings.routing), settings.operator]
    proxy = serve.deployment(serve.ingress()(PDProxy)).options(
        name=PROXY, **_options(settings.proxy), **_version([*decides, _content(settings)])
    )
    return proxy.bind(settings, prefill.bind(*prefill_starts), decode.bind(*decode_starts))


def _version(starts: Any) -> dict[str, Any]:
    """Options by which `serve.run` restarts replicas only if what they are started with changed.

    Without them it replaces every replica whatever changed, engines included. Serve keeps versions
    of deployments to itself since 2.0 and compares actor options and configuration on its own.

    Args:
        starts: all that a replica is started with, as JSON values.
    """
    text = json.dumps([__version__, starts], sort_keys=True)
    return {"version": hashlib.sha256(text.encode()).hexdigest()[:16], "_internal": True}


def _content(settings: RayConfig) -> str:
    """Digest of the partition file: a new one under the old name is a change, too."""
    path = settings.routing.partition
    return hashlib.sha256(Path(path).read_bytes()).hexdigest() if path else ""


def engine_options(config: RayConfig, role: str) -> dict[str, Any]:
    """The engine options of a pool: NIXL in pull mode and ELDR's role unless they are given."""
    pool: PoolOptions = getattr(config, role)
    transfer = {"kv_connector": "NixlConnector", "kv_role": _KV_ROLES[role]}
    given = {**config.engine, **pool.engine}
    options = {name.replace("_", "-"): value for name, value in given.items()}
    options["kv-transfer-config"] = {**transfer, **options.get("kv-transfer-config", {})}
    extra = dict(options.get("additional-config", {}))
    extra["eldr"] = {"role": role, **extra.get("eldr", {})}
    options["additional-config"] = extra
    return options


def _options(pool: PoolOptions) -> dict[str, Any]:
    actor = dict(pool.actor)
    if pool.env:
        environment = dict(actor.get("runtime_env", {}))
        environment["env_vars"] = {**environment.get("env_vars", {}), **pool.env}
        actor["runtime_env"] = environment
    size: dict[str, Any] = {"num_replicas": pool.replicas}
    if pool.autoscaling:
        size = {"autoscaling_config": dict(pool.autoscaling)}
    out = {"ray_actor_options": actor, "max_ongoing_requests": pool.max_ongoing, **size}
    return {**out, **pool.deployment}
