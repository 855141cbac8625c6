"""NumPy references of the CUDA kernels: what csrc/eldr_launch.h says, one loop after the other."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

CLOSED = 2**31 - 1


def accumulate(ids: np.ndarray, slots: np.ndarray, rows: np.ndarray, block_size: int) -> np.ndarray:
    """The rows after one step, as a new array."""
    blocks, layers, experts = rows.shape
    total = rows.astype(np.int64)
    valid = (slots >= 0) & (slots // block_size < blocks)
    total[slots[valid & (slots % block_size == 0)] // block_size] = 0
    for t in np.flatnonzero(valid):
        for layer in range(layers):
            own = ids[t, layer].astype(np.int64)
            own = own[(own >= 0) & (own < experts)]
            np.add.at(total[slots[t] // block_size, layer], own, 1)
    return np.minimum(total, np.iinfo(rows.dtype).max).astype(rows.dtype)


def gather(rows: np.ndarray, block_ids: np.ndarray, offsets: np.ndarray) -> np.ndarray:
    """int64 [requests, cells]: sums over each request's existing blocks; offsets are clamped."""
    flat = rows.reshape(len(rows), -1).astype(np.int64)
    clamped = np.clip(offsets, 0, len(block_ids))
    counts = np.zeros((len(offsets) - 1, flat.shape[1]), np.int64)
    for r in range(len(counts)):
        own = block_ids[clamped[r] : clamped[r + 1]]
        counts[r] = flat[own[(own >= 0) & (own < len(rows))]].sum(0)
    return counts


def scores(
    counts: np.ndarray,
    vectors: np.ndarray,
    prior: np.ndarray | None = None,
    squares: np.ndarray | None = None,
    tokens: np.ndarray | None = None,
    shrinkage: float = 0.0,
) -> np.ndarray:
    """float64 [requests, workers]."""
    out = counts.astype(float) @ vectors.astype(float).T + (0.0 if prior is None else prior)
    if squares is not None:
        norm = (counts.astype(float) ** 2) @ squares.astype(float)
        return out / np.sqrt(np.maximum(norm, 1e-24))[:, None]
    if tokens is not None:
        return out / np.maximum(tokens + np.float32(shrinkage), 1e-12)[:, None]
    return out


@dataclass
class Assignment:
    """A rule and the workers' state; `run` walks the requests and updates the state."""

    rule: int
    load: np.ndarray  # int32 [W]
    cost: np.ndarray  # int32 [R]
    tau: float = 0.0
    coefficients: tuple[float, float, float, float] = (
        0.0,
        0.0,
        0.0,
        0.0,
    )  # c_expert, c_kv, c_request, hedge
    state: np.ndarray | None = None  # float32 [2, W]
    request_kv: np.ndarray | None = None  # float32 [R]

    def run(self, scores: np.ndarray) -> np.ndarray:
        chosen = np.full(len(scores), -1, np.int32)
        for r, raw in enumerate(scores):
            chosen[r] = best = self._best(r, raw)
            if best < 0:
                continue
            self.load[best] = min(int(self.load[best]) + max(int(self.cost[r]), 0), CLOSED - 1)
            if self.state is not None and self.request_kv is not None:
                self.state[0, best] += np.float32(max(np.nan_to_num(raw[best]), 0))
                self.state[1, best] += self.request_kv[r]
        return chosen

    def _best(self, r: int, raw: np.ndarray) -> int:
        open_workers = [w for w in range(len(raw)) if self.load[w] != CLOSED]
        if not open_workers:
            return -1
        score = np.where(np.isnan(raw), np.float32(-np.inf), raw)
        if self.rule == 1:
            return min(open_workers, key=lambda w: (self.load[w], w))
        if self.rule == 2:
            floor = max(score[w] for w in open_workers) - np.float32(self.tau)
            band = [w for w in open_workers if score[w] >= floor]
            return min(band, key=lambda w: (self.load[w], -score[w], w))
        return min(open_workers, key=lambda w: (self._cost(r, w, raw[w]), w))

    def _cost(self, r: int, w: int, raw: np.float32) -> np.float32:
        assert self.state is not None
        assert self.request_kv is not None
        c_expert, c_kv, c_request, hedge = (np.float32(c) for c in self.coefficients)
        score, n = np.float32(max(np.nan_to_num(raw), 0)), np.float32(self.load[w])
        added = (c_expert * score + c_kv * self.request_kv[r]) + c_request
        now = (c_expert * self.state[0, w] + c_kv * self.state[1, w]) + c_request * n
        result: np.float32 = (now + added) + (hedge * n) * added
        return result
