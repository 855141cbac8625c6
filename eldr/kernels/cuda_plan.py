"""How the CUDA kernels of csrc/cuda are launched: which instance, which grid, which parameters.

The same decisions as csrc/cuda/*.cu take for the built extension, for kernels that are compiled at
run time. A plan is plain data; tests run plans in emulation, on CPU tensors.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from eldr.kernels.device_kernel import ceil_div

_MAX_EXPERTS, _MAX_RUN_IDS, _INT32_MAX = 512, 65535, 2**31 - 1
_MAX_REQUESTS, _MAX_WORKERS, _MAX_CELLS = 1024, 1024, 1 << 24
_TICKETS = 1 + _MAX_REQUESTS
_ACCUMULATE_WARPS, _DECIDE_WARPS = 8, 16
_LARGE_GRID, _LARGE_GROUP = 264, 4

_C_NAMES = {
    torch.uint8: "uint8_t",
    torch.uint16: "uint16_t",
    torch.int32: "int32_t",
    torch.int64: "int64_t",
}
_WIDE_BYTES = {torch.uint8: 8, torch.uint16: 16, torch.int32: 16, torch.int64: 8}

# The kernels' parameter structures (AccumulateParams, DecideParams), field for field.
_ACCUMULATE = np.dtype(
    [(name, np.uint64) for name in ("ids", "slots", "rows")]
    + [(name, np.int64) for name in ("ids_stride_token", "ids_stride_layer", "row_stride")]
    + [(name, np.int32) for name in ("tokens", "layers", "top_k", "experts", "block_size")]
    + [("slot_limit", np.int32), ("words", np.int32)],
    align=True,
)
_DECIDE_POINTERS = (
    "rows", "block_ids", "offsets", "counts", "vectors", "prior", "squares", "tokens", "scores",
    "load", "cost", "state", "request_kv", "chosen", "tickets", "partial", "norms",
)  # fmt: skip
_COEFFICIENTS = ("tau", "c_expert", "c_kv", "c_request", "hedge")
_DECIDE = np.dtype(
    [(name, np.uint64) for name in _DECIDE_POINTERS]
    + [(name, np.int64) for name in ("row_stride", "num_blocks", "num_ids")]
    + [(name, np.int32) for name in ("cells", "chunks", "requests", "workers", "rule")]
    + [(name, np.float32) for name in ("shrinkage", *_COEFFICIENTS)],
    align=True,
)


@dataclass(frozen=True, slots=True, eq=False)
class Plan:
    """One launch.

    Attributes:
        kernel: the instance as a C++ name expression.
        grid: thread blocks along x and y.
        block: threads of a thread block.
        params: the kernel's only argument, a structure by value (0-d NumPy array).
    """

    kernel: str
    grid: tuple[int, int]
    block: int
    params: np.ndarray


def _pack(dtype: np.dtype, values: dict[str, object]) -> np.ndarray:
    out = np.zeros((), dtype)
    for name, value in values.items():
        out[name] = value
    return out


def _address(tensor: Tensor | None) -> int:
    return 0 if tensor is None else tensor.data_ptr()


def accumulate(
    topk_ids: Tensor, slot_mapping: Tensor, block_size: int, histograms: Tensor
) -> Plan | None:
    """The launch of `accumulate_hits`; None where there is no kernel for the shape."""
    (tokens, layers, top_k), (num_blocks, _, experts) = topk_ids.shape, histograms.shape
    if (
        not 1 <= experts <= _MAX_EXPERTS
        or not 1 <= block_size * top_k <= _MAX_RUN_IDS
        or layers > 65535 * _ACCUMULATE_WARPS
        or tokens > _INT32_MAX - 65536
        or num_blocks * block_size > _INT32_MAX
    ):
        return None
    size, row_bytes = topk_ids.element_size(), histograms.element_size()
    steps = (topk_ids.stride(0) * size, topk_ids.stride(1) * size, topk_ids.data_ptr())
    wide = _WIDE_BYTES[topk_ids.dtype]
    width = wide if all(n % wide == 0 for n in (top_k * size, *steps)) else size
    bits = 8 if histograms.dtype == torch.uint8 and block_size * top_k <= 255 else 16
    row_starts = (experts * row_bytes, histograms.stride(0) * row_bytes, histograms.data_ptr())
    names = _C_NAMES[topk_ids.dtype], _C_NAMES[histograms.dtype]
    params = _pack(
        _ACCUMULATE,
        {
            "ids": topk_ids.data_ptr(), "slots": slot_mapping.data_ptr(),
            "rows": histograms.data_ptr(), "ids_stride_token": topk_ids.stride(0),
            "ids_stride_layer": topk_ids.stride(1), "row_stride": histograms.stride(0),
            "tokens": tokens, "layers": layers, "top_k": top_k, "experts": experts,
            "block_size": block_size, "slot_limit": num_blocks * block_size,
            "words": all(n % 4 == 0 for n in row_starts),
        },
    )  # fmt: skip
    return Plan(
        f"eldr::accumulate<{', '.join(names)}, {bits}, {width}>",
        (ceil_div(tokens, 32), ceil_div(layers, _ACCUMULATE_WARPS)),
        32 * _ACCUMULATE_WARPS,
        params,
    )


def _per_lane(element_size: int) -> int:
    """Cells in 16 bytes; a chunk is 32 times as many."""
    return 16 // element_size


def decide_workspace(requests: int, cells: int, workers: int) -> int:
    """Bytes that `decide` needs, zeroed once; 0 where there is no kernel for the shape."""
    possible = (
        1 <= requests <= _MAX_REQUESTS and 1 <= cells <= _MAX_CELLS and 1 <= workers <= _MAX_WORKERS
    )
    chunks = ceil_div(cells, 32 * _per_lane(2))
    return 4 * (_TICKETS + requests * chunks * (workers + 1)) if possible else 0


def decide(
    histograms: Tensor,
    block_ids: Tensor,
    offsets: Tensor,
    vectors: Tensor,
    prior: Tensor | None,
    squares: Tensor | None,
    tokens: Tensor | None,
    shrinkage: float,
    rule: int,
    coefficients: Sequence[float],
    cost: Tensor | None,
    request_kv: Tensor | None,
    scores: Tensor,
    counts: Tensor | None,
    load: Tensor | None,
    state: Tensor | None,
    chosen: Tensor | None,
    workspace: Tensor,
) -> Plan:
    """The launch of `decide` on a shape for which `decide_workspace` is not 0."""
    (requests, workers), cells = scores.shape, vectors.shape[1]
    lane = _per_lane(histograms.element_size())
    chunks = ceil_div(cells, 32 * lane)
    starts = (
        histograms.data_ptr(), histograms.stride(0) * histograms.element_size(),
        _address(vectors), _address(squares),
    )  # fmt: skip
    wide = cells % lane == 0 and all(n % 16 == 0 for n in starts)
    groups = ceil_div(requests, _LARGE_GROUP)
    group = _LARGE_GROUP if chunks * groups >= _LARGE_GRID else 1
    partial = workspace.data_ptr() + 4 * _TICKETS
    tensors = {
        "rows": histograms, "block_ids": block_ids, "offsets": offsets, "counts": counts,
        "vectors": vectors, "prior": prior, "squares": squares, "tokens": tokens, "scores": scores,
        "load": load, "cost": cost, "state": state, "request_kv": request_kv, "chosen": chosen,
        "tickets": workspace,
    }  # fmt: skip
    params = _pack(
        _DECIDE,
        {name: _address(tensor) for name, tensor in tensors.items()}
        | {
            "partial": partial, "norms": partial + 4 * requests * chunks * workers,
            "row_stride": histograms.stride(0), "num_blocks": histograms.shape[0],
            "num_ids": block_ids.numel(), "cells": cells, "chunks": chunks, "requests": requests,
            "workers": workers, "rule": rule, "shrinkage": shrinkage,
        }
        | _by_rule(rule, coefficients),
    )  # fmt: skip
    row = _C_NAMES[histograms.dtype]
    return Plan(
        f"eldr::decide<{row}, {'true' if wide else 'false'}, {group}>",
        (chunks, ceil_div(requests, group)),
        32 * _DECIDE_WARPS,
        params,
    )


def _by_rule(rule: int, coefficients: Sequence[float]) -> dict[str, object]:
    """The rule's numbers by name: `LocalityBand` has tau, `MarginalCost` the other four."""
    names = {2: _COEFFICIENTS[:1], 3: _COEFFICIENTS[1:]}.get(rule, ())
    return dict(zip(names, coefficients, strict=True))
