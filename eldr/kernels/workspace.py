"""Scratch memory of device kernels: zeroed once, kept per device and stream, grown when needed."""

from __future__ import annotations

import torch
from torch import Tensor

_kept: dict[tuple[int, int], Tensor] = {}


def zeroed(device: torch.device, size: int) -> Tensor:
    """At least `size` bytes, uint8, for kernels that leave what must be zero at zero.

    The same memory serves all calls on a stream, which run one after the other. While a CUDA graph
    is captured the graph gets memory of its own, which every replay zeroes: memory allocated
    during a capture belongs to the graph's pool and must not outlive it here.
    """
    if torch.cuda.is_current_stream_capturing():
        return torch.zeros(size, dtype=torch.uint8, device=device)
    stream = torch.cuda.current_stream(device)
    key = (stream.device_index, stream.cuda_stream)
    kept = _kept.get(key)
    if kept is None or kept.numel() < size:
        kept = torch.zeros(1 << (size - 1).bit_length(), dtype=torch.uint8, device=device)
        _kept[key] = kept
    return kept
