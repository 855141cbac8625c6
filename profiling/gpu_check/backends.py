"""The implementations of the two ops that have several on a device, called directly."""

from __future__ import annotations

import importlib
from collections.abc import Callable

import torch

from eldr.kernels import accumulate_hits_ref, backend, decide_ref

Implementation = Callable[..., object]
OPS = ("accumulate_hits", "decide")
REFERENCE: dict[str, Implementation] = {
    "accumulate_hits": accumulate_hits_ref,
    "decide": decide_ref,
}


def implementations(op: str) -> dict[str, Implementation]:
    """By name, those that this process can load; CuPy too, though a built extension precedes it."""
    found: dict[str, Implementation] = {"torch": REFERENCE[op]}
    if backend.have("triton"):
        found["triton"] = backend.triton_launcher(op)
    if backend.have("cuda"):
        decide = importlib.import_module("eldr.kernels.decide")
        built = torch.ops.eldr_cuda.accumulate_hits if op == OPS[0] else decide.decide_cuda
        found["cuda"] = _all_of_it(op, built)
    if backend.have("cupy"):
        found["cupy"] = _all_of_it(op, getattr(importlib.import_module("eldr.kernels.nvrtc"), op))
    return found


def _all_of_it(op: str, launch: Implementation) -> Implementation:
    def call(*arguments: object) -> None:
        if launch(*arguments) == backend.UNSUPPORTED:
            raise NotImplementedError(f"{op}: the CUDA kernel has no instance for this shape")

    return call
