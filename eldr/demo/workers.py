"""Command lines and environment of the demo's processes: vLLM workers on a CPU and the router."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path

from eldr.demo.config import MAX_MODEL_LEN, MODEL_NAME

# A small machine: no downloads, one thread and a small KV pool per worker, no telemetry.
ENGINE_ENV = {
    "HF_HUB_OFFLINE": "1",
    "TRANSFORMERS_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "DO_NOT_TRACK": "1",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_CPU_NUM_OF_RESERVED_CPU": "0",
    "OMP_NUM_THREADS": "1",
    # With this vLLM keeps the executor named below: without it, a CPU engine talks to its worker
    # through shared memory that both sides poll, and four such pairs leave two cores no time.
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_HOST_IP": "127.0.0.1",
    "VLLM_NIXL_SIDE_CHANNEL_HOST": "127.0.0.1",
    # Serves POST /reset_prefix_cache, so that every policy starts with cold prefix caches.
    "VLLM_SERVER_DEV_MODE": "1",
}
_LOG_SECONDS = 2.0
_BLOCK_SIZE = 32
_KV_BLOCKS = 1024
_STEP_TOKENS = 2048
_KV_ROLES = {"prefill": "kv_producer", "decode": "kv_consumer"}


def worker_command(role: str, port: int, model: Path) -> list[str]:
    """One worker, vLLM's API server; `role` is `prefill` or `decode`."""
    transfer = {
        "kv_connector": "NixlConnector",
        "kv_role": _KV_ROLES[role],
        "kv_buffer_device": "cpu",
    }
    return [
        *(sys.executable, "-m", "eldr.demo.vllm_worker"),
        *("--model", str(model), "--served-model-name", MODEL_NAME),
        *("--host", "127.0.0.1", "--port", str(port)),
        *("--dtype", "bfloat16", "--seed", "0", "--enforce-eager"),
        *("--distributed-executor-backend", "uni"),
        *("--max-model-len", str(MAX_MODEL_LEN), "--max-num-seqs", "64"),
        *("--block-size", str(_BLOCK_SIZE), "--num-gpu-blocks-override", str(_KV_BLOCKS)),
        # vLLM 0.32 on a CPU dies on a seeded request whose prefill is split over two steps
        # ("CPU Generator does not use offset"), and the replay's requests are seeded.
        *("--no-enable-chunked-prefill", "--max-num-batched-tokens", str(_STEP_TOKENS)),
        "--enable-prompt-tokens-details",
        *("--kv-transfer-config", json.dumps(transfer)),
        *("--additional-config", json.dumps({"eldr": {"role": role}})),
    ]


def worker_env(side_channel_port: int) -> dict[str, str]:
    """Environment of one worker; each needs a NIXL side-channel port of its own."""
    return {**ENGINE_ENV, "VLLM_NIXL_SIDE_CHANNEL_PORT": str(side_channel_port)}


def router_command(
    port: int,
    prefill: str,
    decode: Sequence[str],
    policy: str,
    partition: Path | None = None,
    tau: float | None = None,
    log: Path | None = None,
) -> list[str]:
    """`eldr serve` in front of the workers.

    Args:
        port: to listen on.
        prefill: URL of the prefill worker.
        decode: URLs of the decode workers.
        policy: that decides.
        partition: file, for policies that need one.
        tau: width of the locality band.
        log: decision log, for the operator page of the run; with it, a load balancer is watched in
            the shadow.
    """
    command = [*(sys.executable, "-m", "eldr", "serve"), "--prefill", prefill]
    for url in decode:
        command += ["--decode", url]
    command += ["--policy", policy, "--host", "127.0.0.1", "--port", str(port)]
    # A handful of engines share two cores here: a slow health answer is no sign of death.
    command += ["--health-timeout", "60"]
    if partition is not None:
        command += ["--partition", str(partition)]
    if tau is not None:
        command += ["--tau", str(tau)]
    if log is not None:
        shadow = "round_robin" if policy == "least_requests" else "least_requests"
        command += ["--shadow", shadow, "--decision-log", str(log)]
        command += ["--decision-log-counters", str(_LOG_SECONDS)]
    return command
