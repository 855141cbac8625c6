"""The two things that clustering does with N unit vectors, on the host or on a device.

Centroids and assignments are small and stay in NumPy; only the points live where they were given.
"""

from __future__ import annotations

from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

F32 = npt.NDArray[np.float32]
I32 = npt.NDArray[np.int32]

# Points that seeding looks at; on a device only these are copied to the host.
_SEEDING = 4096
_BLOCK = 2048


class Points(Protocol):
    """N unit vectors of D dimensions."""

    def __len__(self) -> int: ...

    def cost(self, centroids: F32) -> F32:
        """1 - cosine to every centroid, float32 [N, W]."""

    def sums(self, home: I32, clusters: int) -> npt.NDArray[np.float64]:
        """Sum of every cluster's points, float64 [clusters, D]."""

    def sample(self, seed: int) -> F32:
        """Points for seeding: all, or a random part of many."""


class HostPoints:
    """Points in a NumPy array float32 [N, D]."""

    def __init__(self, array: F32) -> None:
        self._array = array

    def __len__(self) -> int:
        return len(self._array)

    def cost(self, centroids: F32) -> F32:
        """One matrix product."""
        return np.asarray(1.0 - self._array @ centroids.T, np.float32)

    def sums(self, home: I32, clusters: int) -> npt.NDArray[np.float64]:
        """Products with blocks of the membership matrix; the points are not copied."""
        out = np.zeros((clusters, self._array.shape[1]))
        for start in range(0, len(home), _BLOCK):
            block = slice(start, start + _BLOCK)
            member = (home[block, None] == np.arange(clusters)).astype(np.float32)
            out += member.T @ self._array[block]
        return out

    def sample(self, seed: int) -> F32:
        """All points while they are few."""
        return np.asarray(self._array[_pick(len(self), seed)], np.float32)


class DevicePoints:
    """Points in a torch tensor float32 [N, D], or anything DLPack can hand to torch (CuPy)."""

    def __init__(self, array: Any) -> None:
        import torch
        from torch.utils.dlpack import from_dlpack

        tensor = array if isinstance(array, torch.Tensor) else from_dlpack(array)
        if tensor.ndim != 2 or tensor.dtype != torch.float32:
            raise ValueError(f"points: expected float32 [N, D], got {tensor.dtype} {tensor.shape}")
        self._tensor = tensor

    def __len__(self) -> int:
        return len(self._tensor)

    def cost(self, centroids: F32) -> F32:
        """One matrix product on the device; only [N, W] comes back."""
        import torch

        other = torch.from_numpy(np.ascontiguousarray(centroids)).to(self._tensor.device)
        return np.asarray((1.0 - self._tensor @ other.T).cpu().numpy(), np.float32)

    def sums(self, home: I32, clusters: int) -> npt.NDArray[np.float64]:
        """A product with the membership matrix: no atomics, so the same every time."""
        import torch

        where = torch.from_numpy(home.astype(np.int64)).to(self._tensor.device)
        member = torch.nn.functional.one_hot(where, clusters).to(torch.float32)
        return np.asarray((member.T @ self._tensor).cpu().numpy(), np.float64)

    def sample(self, seed: int) -> F32:
        """Copies the seeding points to the host."""
        import torch

        rows = torch.from_numpy(np.arange(len(self))[_pick(len(self), seed)])
        picked = self._tensor.index_select(0, rows.to(self._tensor.device))
        return np.asarray(picked.cpu().numpy(), np.float32)


def as_points(array: Any) -> Points:
    """Wraps a NumPy array, a torch tensor or a DLPack array."""
    return HostPoints(array) if isinstance(array, np.ndarray) else DevicePoints(array)


def _pick(count: int, seed: int) -> Any:
    if count <= _SEEDING:
        return slice(None)
    return np.sort(np.random.default_rng(seed).choice(count, _SEEDING, replace=False))
