"""vLLM's API server for a machine with fewer cores than workers.

Two habits of a machine with cores to spare are changed. NIXL 1.5 polls its sockets without a pause
in a thread of every worker, at the price of a whole core each. Here the thread waits in the poll:
data still wakes it at once, and it looks after a millisecond at the latest. And vLLM's NIXL
connector moves the engine's main thread to the last core, which it believes to be reserved for
transfers: every worker of the machine then computes on that core while the others idle. Here the
scheduler places the threads. vLLM has no option for either; the processes that it spawns import
this module again, so both changes reach the one that runs the engine.

And one thing is added: Linux lets a process use a CPU's AMX tiles only if it asked, and vLLM 0.32
uses them without, so that its first bfloat16 attention on such a CPU is an illegal instruction.
"""

from __future__ import annotations

import ctypes
import os
import platform
import runpy
from collections.abc import Iterable
from typing import Any

# vLLM sets this before it imports NIXL, which happens here first.
os.environ.setdefault("UCX_RCACHE_MAX_UNRELEASED", "1024")

from nixl import _api

_PAUSE_US = 1000
_ARCH_PRCTL, _ARCH_REQ_XCOMP_PERM, _XTILEDATA = 158, 0x1023, 18
_make_agent = _api.nixlBind.nixlAgent


def _agent_that_sleeps(name: str, config: Any) -> Any:
    config.pthrDelay = _PAUSE_US
    return _make_agent(name, config)


def _stay_movable(pid: int, cores: Iterable[int]) -> None:
    """Takes the place of os.sched_setaffinity: nothing here may pin a thread."""


def _ask_for_amx() -> None:
    """Fails without harm on a CPU that has none."""
    if platform.system() == "Linux" and platform.machine() == "x86_64":
        ctypes.CDLL(None).syscall(_ARCH_PRCTL, _ARCH_REQ_XCOMP_PERM, _XTILEDATA)


_ask_for_amx()
_api.nixlBind.nixlAgent = _agent_that_sleeps
os.sched_setaffinity = _stay_movable

if __name__ == "__main__":
    # This module stays __main__: what vLLM spawns must import it, not the server.
    runpy.run_module("vllm.entrypoints.openai.api_server", run_name="__main__", alter_sys=False)
