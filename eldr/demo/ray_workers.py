"""The demo's application on Ray Serve: the same engines as `workers`, as options of `RayConfig`."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from eldr.demo.config import MODEL_NAME
from eldr.demo.workers import ENGINE_ENV, worker_command
from eldr.workload.tiny import MODEL_DIR

# Engines compute where the scheduler puts them: Ray's logical CPUs would only keep them waiting.
_NO_CPU = {"num_cpus": 0}


def application(
    decode: int, policy: str = "round_robin", partition: Path | None = None, tau: float = 0.1
) -> dict[str, Any]:
    """The configuration of `eldr.serving.ray` for so many decode replicas, as plain values."""
    routing: dict[str, Any] = {"policy": policy}
    if partition is not None:
        routing |= {"partition": str(partition), "tau": tau}
    # Each replica finds a side channel of its own.
    env = {k: v for k, v in ENGINE_ENV.items() if "SIDE_CHANNEL" not in k}
    pool = {"env": env, "actor": _NO_CPU}
    return {
        "engine": engine(),
        "prefill": pool,
        "decode": {**pool, "replicas": decode},
        "proxy": {"actor": _NO_CPU},
        "routing": routing,
        "operator": True,
    }


def engine() -> dict[str, Any]:
    """The options of `workers.worker_command`, without what a replica does not need or fills in."""
    flags = _options(worker_command("prefill", 0, MODEL_DIR)[3:])
    for name in ("host", "port", "additional-config"):
        del flags[name]
    transfer = json.loads(str(flags["kv-transfer-config"]))
    flags["kv-transfer-config"] = {"kv_buffer_device": transfer["kv_buffer_device"]}
    flags["served-model-name"] = MODEL_NAME
    flags["worker-extension-cls"] = "eldr.demo.ray_extension.Movable"
    return flags


def _options(arguments: Sequence[str]) -> dict[str, Any]:
    """A command line of `--name value` and bare `--name` as a mapping."""
    out: dict[str, Any] = {}
    name = ""
    for argument in arguments:
        if argument.startswith("--"):
            name = argument.removeprefix("--")
            out[name] = True
        else:
            out[name] = argument
    return out


def serve_command(config: Path, port: int, temp: Path) -> list[str]:
    """Ray and the application on this machine."""
    return [
        *(sys.executable, "-m", "eldr.serving.ray", str(config), "--port", str(port)),
        *("--num-cpus", "1", "--object-store-mib", "100", "--temp-dir", str(temp)),
    ]
