"""Adversarial scheduler steps: tokens in KV blocks, padding, and ids that must be ignored."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

Chunk = tuple[int, int]  # (first position in its request, number of tokens)


def step_slots(
    rng: np.random.Generator,
    block_size: int,
    num_blocks: int,
    chunks: Sequence[Chunk],
    padding: int = 7,
) -> np.ndarray:
    """int64 slots of one step: each request's chunk in random blocks of its own, then padding."""
    free = rng.permutation(num_blocks)
    parts, used = [], 0
    for first, count in chunks:
        need = -(-(first + count) // block_size)
        own = free[used : used + need]
        used += need
        position = np.arange(first, first + count)
        parts.append(own[position // block_size] * block_size + position % block_size)
    return np.concatenate([*parts, np.full(padding, -1)]).astype(np.int64)


def blocks_needed(block_size: int, chunks: Sequence[Chunk]) -> int:
    return sum(-(-(first + count) // block_size) for first, count in chunks)


def top_k_ids(
    rng: np.random.Generator, tokens: int, layers: int, top_k: int, experts: int, dtype: type
) -> np.ndarray:
    """Distinct ids per token and layer, one in twenty replaced by one outside [0, experts)."""
    keys = rng.random((tokens, layers, experts))
    ids = np.argsort(keys, axis=2)[:, :, :top_k].astype(np.int64)
    outside = (
        [-1, experts, experts + 7]
        if np.issubdtype(dtype, np.signedinteger)
        else [experts, experts + 3]
    )
    outside = [e for e in outside if e <= np.iinfo(dtype).max]
    if outside:
        bad = rng.random(ids.shape) < 0.05
        ids[bad] = rng.choice(outside, int(bad.sum()))
    return np.ascontiguousarray(ids.astype(dtype))
