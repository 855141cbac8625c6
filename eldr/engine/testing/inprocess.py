"""A vLLM engine inside this process: no EngineCore and no worker process, 25 CPU-seconds."""

from __future__ import annotations

import os
from typing import Any

_ENVIRONMENT = {
    "OMP_NUM_THREADS": "1",
    "HF_HUB_OFFLINE": "1",
    "TRANSFORMERS_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_CPU_NUM_OF_RESERVED_CPU": "0",
}
_DEFAULTS: dict[str, Any] = {
    "dtype": "bfloat16",
    "max_model_len": 1024,
    "max_num_seqs": 8,
    "block_size": 32,
    "seed": 0,
    "enforce_eager": True,
    "distributed_executor_backend": "uni",
}
RUNNERS = ("v1", "v2")


def prepare(runner: str) -> None:
    """Sets this process up for `start`; call before anything imports Triton or vLLM.

    Args:
        runner: vLLM's model runner, `v1` or `v2`; without a GPU, v2 runs through Triton's
            interpreter.
    """
    if runner not in RUNNERS:
        raise ValueError(f"runner must be one of {', '.join(RUNNERS)}, got {runner!r}")
    for name, value in _ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    os.environ["VLLM_USE_V2_MODEL_RUNNER"] = "1" if runner == "v2" else "0"
    import torch

    # The variable comes too late where torch is loaded already; and on a busy machine a second
    # thread makes every parallel region wait until it is scheduled.
    torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
    if runner == "v2" and not torch.cuda.is_available():
        from eldr.engine.testing import interpreter

        interpreter.install()


def start(model: str, runner: str = "v1", **arguments: Any) -> Any:
    """A `vllm.LLM` in this process; at most one per process.

    Args:
        model: directory of a checkpoint.
        runner: as for `prepare`, which this calls.
        **arguments: of `vllm.LLM`, over the defaults for a tiny model.
    """
    prepare(runner)
    from vllm import LLM

    return LLM(model=model, **{**_DEFAULTS, **arguments})


def worker(llm: Any) -> Any:
    """The only worker of an engine made by `start`."""
    return llm.llm_engine.engine_core.engine_core.model_executor.driver_worker.worker


def scheduler(llm: Any) -> Any:
    """The scheduler of an engine made by `start`."""
    return llm.llm_engine.engine_core.engine_core.scheduler
