"""The changes of `vllm_worker` for engines that Ray starts, where the main module is Ray's.

vLLM imports a worker extension (`--worker-extension-cls`) in the engine's own process, before the
KV connector starts.
"""

from __future__ import annotations

import eldr.demo.vllm_worker  # noqa: F401  importing it makes the changes


class Movable:
    """Adds nothing to the worker: importing its module was the point."""
