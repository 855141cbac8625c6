"""The changes of `vllm_worker` for engines that Ray starts, where no module of ours is the main one.

vLLM imports a worker extension (`--worker-extension-cls`) in the engine's own process, before the
KV connector starts.
"""

from __future__ import annotations

from eldr.demo import vllm_worker

CHANGES = (vllm_worker._agent_that_sleeps, vllm_worker._stay_movable)


class Movable:
    """Adds nothing to the worker: importing its module was the point."""
