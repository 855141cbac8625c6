"""NVTX ranges for Nsight Systems: off unless ELDR_NVTX is set and a profiler is attached.

A site costs two attribute checks when off:

    if tracing.ON:
        tracing.push(tracing.ACCUMULATE, num_tokens)
    ...
    if tracing.ON:
        tracing.pop()

Ranges live in the NVTX domain `eldr`; names are constant, numbers travel as integer payloads, and
attributes are built once per name. Push and pop belong to a thread's stack: use them around code
that does not await, and never synchronise the device inside (the canary alone does, on purpose).

ELDR_NVTX: unset, empty or 0 is off; 1 uses the package nvtx (`pip install eldr[profile]`); torch
uses torch.cuda.nvtx, which has neither domains nor payloads: names are then `eldr:<name>`.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any, Protocol

DOMAIN = "eldr"

# The closed set of range names, and each one's NVTX category.
CAPTURE, ACCUMULATE, DECIDE, COPY, MERGE, ROUTE, CANARY = (
    "capture",  # top-k ids of one layer go to the step's buffer
    "accumulate",  # the step's hits go to the block histograms or the decode counters
    "decide",  # gather signatures of the prompts that end, and score them
    "copy",  # enqueue their device-to-host copy
    "merge",  # put results into the answer
    "route",  # the router picks a decode worker
    "canary",  # one deliberate synchronising copy, by which an audit proves that it can see one
)
CATEGORIES = {
    CAPTURE: "signature",
    ACCUMULATE: "signature",
    DECIDE: "kernel",
    COPY: "transfer",
    MERGE: "transfer",
    ROUTE: "router",
    CANARY: "canary",
}
_CANARY_PERIOD = 128


class Push(Protocol):
    """Opens a range of the calling thread."""

    def __call__(self, name: str, payload: int = 0, /) -> None:
        """`name` is one of this module's constants."""


class TracingError(RuntimeError):
    """ELDR_NVTX asks for something that this installation does not have."""


def _ignore(*_: Any) -> None:
    """Stands in for push and pop while tracing is off."""


def _with_domain() -> tuple[bool, Push, Callable[[], Any]]:
    try:
        import nvtx
    except ImportError as error:
        raise TracingError(
            "ELDR_NVTX=1 needs the package nvtx: pip install eldr[profile], or unset ELDR_NVTX"
        ) from error
    domain = nvtx.get_domain(DOMAIN)
    made = {
        name: domain.get_event_attributes(message=name, category=category, payload=0)
        for name, category in CATEGORIES.items()
    }
    if None in made.values():  # nvtx gives none while no profiler is attached
        return False, _ignore, _ignore

    def push(name: str, payload: int = 0) -> None:
        attributes = made[name]
        attributes.payload = payload
        domain.push_range(attributes)

    return True, push, domain.pop_range


def _with_torch() -> tuple[bool, Push, Callable[[], Any]]:
    import torch.cuda

    range_push: Callable[[str], Any] = torch.cuda.nvtx.range_push
    range_pop: Callable[[], Any] = torch.cuda.nvtx.range_pop
    if not torch.cuda.is_available():
        raise TracingError("ELDR_NVTX=torch needs a CUDA build of torch and a device")
    names = {name: f"{DOMAIN}:{name}" for name in CATEGORIES}

    def push(name: str, payload: int = 0) -> None:
        range_push(names[name])

    return True, push, range_pop


def _choose(wish: str) -> tuple[bool, Push, Callable[[], Any]]:
    if wish in ("", "0"):
        return False, _ignore, _ignore
    if wish == "1":
        return _with_domain()
    if wish == "torch":
        return _with_torch()
    raise TracingError(f"ELDR_NVTX={wish!r}, expected 0, 1 or torch")


ON, push, pop = _choose(os.environ.get("ELDR_NVTX", ""))
_steps = 0


def canary(buffer: Any) -> None:
    """Every 128th call reads one element of a device tensor, in a range of its own.

    Call it once per step, where `ON`, outside CUDA graphs.
    """
    global _steps
    _steps += 1
    if _steps % _CANARY_PERIOD == 1:
        push(CANARY, _steps)
        buffer.view(-1)[0].item()
        pop()
