"""The ops once more, in plain NumPy loops that share nothing with the implementations."""

from __future__ import annotations

import itertools

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[np.generic]
CLOSED = 2**31 - 1


def accumulate(ids: Array, slots: Array, block_size: int, histograms: Array) -> Array:
    total = histograms.astype(np.int64)
    num_blocks, layers, experts = histograms.shape
    for slot in slots:
        if 0 <= slot < num_blocks * block_size and slot % block_size == 0:
            total[slot // block_size] = 0
    for t, slot in enumerate(slots):
        if not 0 <= slot < num_blocks * block_size:
            continue
        for layer in range(layers):
            for expert in ids[t, layer].tolist():
                if 0 <= expert < experts:
                    total[slot // block_size, layer, expert] += 1
    return np.minimum(total, np.iinfo(histograms.dtype).max).astype(histograms.dtype)


def gather(histograms: Array, block_ids: Array, offsets: Array) -> Array:
    spans = itertools.pairwise(offsets)
    rows = [histograms[block_ids[a:b]].astype(np.int64).sum(0) for a, b in spans]
    empty = np.zeros((0, *histograms.shape[1:]))
    return np.stack(rows).astype(np.int32) if rows else empty.astype(np.int32)


def score_centroids(counts: Array, centroids: Array, weights: Array) -> Array:
    """Cosine of weighted counts with unit centroids, float64 [R, W]."""
    x = (counts * weights.astype(np.float64)).reshape(len(counts), weights.size)
    norm = np.sqrt(np.maximum((x * x).sum(1), 1e-24))
    return x @ centroids.reshape(len(centroids), -1).astype(np.float64).T / norm[:, None]


def score_survival(counts: Array, survival: Array, mean: Array, k: float, tokens: Array) -> Array:
    """Expected added experts of shrunk probabilities, float64 [R, W]."""
    spread = np.maximum(tokens + k, 1e-12)[:, None, None]
    p = (counts + k * mean.astype(np.float64)) / spread
    return p.reshape(len(p), -1) @ survival.reshape(len(survival), -1).astype(np.float64).T


def assign(
    scores: Array,
    rule: str,
    coefficients: list[float],
    load: Array,
    cost: Array,
    state: Array | None,
    request_kv: Array | None,
) -> tuple[list[int], Array, Array | None]:
    """Worker per request, loads and state afterwards; every float operation in float32."""
    load, state = load.copy(), None if state is None else state.copy()
    c = [np.float32(value) for value in coefficients]
    chosen = []
    for r, row in enumerate(scores):
        best: tuple[object, ...] | None = None
        open_scores = [_worst(s) for s, n in zip(row, load, strict=True) if n != CLOSED]
        for w, s in enumerate(row):
            if load[w] == CLOSED:
                continue
            if rule == "least_load":
                key: tuple[object, ...] = (load[w], w)
            elif rule == "locality_band":
                if not _worst(s) >= np.float32(max(open_scores)) - c[0]:
                    continue
                key = (load[w], -_worst(s), w)
            else:
                assert state is not None
                assert request_kv is not None
                key = (_cost(_added(s), request_kv[r], load[w], state[:, w], c), w)
            if best is None or key < best:
                best = key
        pick = -1 if best is None else int(best[-1])  # type: ignore[call-overload]
        chosen.append(pick)
        if pick < 0:
            continue
        load[pick] = min(int(load[pick]) + max(int(cost[r]), 0), CLOSED - 1)
        if state is not None and request_kv is not None:
            state[0, pick] += _added(row[pick])
            state[1, pick] += request_kv[r]
    return chosen, load, state


def _worst(score: np.float32) -> np.float32:
    return np.float32(-np.inf) if np.isnan(score) else score


def _added(score: np.float32) -> np.float32:
    return np.float32(score) if score > 0 else np.float32(0)


def _cost(
    added: np.float32, kv: np.float32, load: np.int32, state: Array, c: list[np.float32]
) -> np.float32:
    n = np.float32(load)
    with np.errstate(over="ignore", invalid="ignore"):
        more = (c[0] * added + c[1] * kv) + c[2]
        now = (c[0] * state[0] + c[1] * state[1]) + c[2] * n
        total = (now + more) + (c[3] * n) * more
    return np.float32(np.inf) if np.isnan(total) else total
