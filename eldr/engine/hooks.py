"""What the patched vLLM calls: one function per hook point, imported only when configured.

The names are part of the patch series (`vllm/eldr_hook.py` looks them up).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from eldr.engine.scheduler import SchedulerHook
    from eldr.engine.worker import WorkerHook


def check(vllm_config: Any) -> None:
    """Refuses unsupported settings while vLLM checks its own."""
    from eldr.engine import config

    config.check(vllm_config)


def scheduler(vllm_config: Any, kv_cache_config: Any) -> SchedulerHook:
    """The scheduler's side, in the engine core process."""
    from eldr.engine.scheduler import SchedulerHook

    return SchedulerHook.create(vllm_config, kv_cache_config)


def worker(vllm_config: Any, kv_cache_config: Any, model: Any, device: Any) -> WorkerHook:
    """The worker's side, in the process that owns the device."""
    from eldr.engine.worker import WorkerHook

    return WorkerHook.create(vllm_config, kv_cache_config, model, device)


def routes(args: Any, app: Any) -> None:
    """Adds the worker routes to vLLM's API server."""
    from eldr.engine import config
    from eldr.engine import routes as worker_routes

    worker_routes.attach(app, config.read(args.additional_config))
