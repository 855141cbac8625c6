"""The way without a kernel: send the captured ids to the host and count them there.

This is what vLLM's own routed-experts capture leads to: it holds a step's ids [T, L, K] in an int32
buffer on the device, narrows them to uint8 (uint16 past 256 experts), copies them to pinned memory
and hands them out once they have arrived. A histogram per request is then the host's work.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate, pairwise

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

NAME = "vLLM capture + host histogram"


class HostCapture:
    """Counts of a step's requests by narrowing, copying, waiting and np.bincount.

    Args:
        ids: a step's ids [T, L, K] as captured; fixes shape and device. All within [0, experts).
        experts: E.
        lengths: tokens of each request, in the step's order; their sum is T.

    Raises:
        ValueError: the lengths do not add up to T.
    """

    def __init__(self, ids: Tensor, experts: int, lengths: Sequence[int]) -> None:
        if sum(lengths) != ids.shape[0]:
            raise ValueError(f"lengths: {list(lengths)} do not add up to {ids.shape[0]} tokens")
        dtype = torch.uint8 if experts <= 256 else torch.uint16
        self._narrow = torch.empty(ids.shape, dtype=dtype, device=ids.device)
        self._host = torch.empty(ids.shape, dtype=dtype, pin_memory=ids.is_cuda)
        self._spans = list(pairwise(accumulate(lengths, initial=0)))
        self._layers = ids.shape[1]
        self._experts = experts
        self._first_cell = (np.arange(self._layers) * experts)[None, :, None]

    def __call__(self, ids: Tensor) -> list[npt.NDArray[np.int64]]:
        """Counts int64 [L, E] of every request; on a GPU this waits for the step."""
        self._narrow.copy_(ids)
        self._host.copy_(self._narrow, non_blocking=True)
        if ids.is_cuda:
            torch.cuda.current_stream(ids.device).synchronize()
        host = self._host.numpy()
        return [self._count(host[begin:end]) for begin, end in self._spans]

    def _count(self, ids: npt.NDArray[np.unsignedinteger]) -> npt.NDArray[np.int64]:
        cells = (ids + self._first_cell).ravel()
        counts = np.bincount(cells, minlength=self._layers * self._experts)
        return counts.reshape(self._layers, self._experts)
