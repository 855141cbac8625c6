"""Adversarial inputs, shared by the tests of every backend."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from hypothesis import strategies as st

GEOMETRIES = ((60, 6), (128, 8), (512, 16), (1, 1), (2, 2), (7, 3), (33, 4))  # (E, K)
ID_DTYPES = (np.int32, np.uint8, np.uint16, np.int64)


@dataclass(frozen=True, eq=False)
class Step:
    """Arguments of accumulate_hits, as NumPy arrays."""

    ids: np.ndarray
    slots: np.ndarray
    block_size: int
    histograms: np.ndarray


def random_ids(rng: np.random.Generator, shape: tuple[int, ...], experts: int, dtype) -> np.ndarray:
    """Mostly valid ids with some outside [0, E), as far as the dtype can say them."""
    ids = rng.integers(0, experts, shape)
    odd = rng.random(shape) < 0.1
    wrong = np.array([-1, -experts, experts, experts + 7, 2**31 - 1, 2**32, -(2**40)])
    info = np.iinfo(dtype)
    sayable = wrong[(wrong >= info.min) & (wrong <= info.max)]
    if sayable.size:
        ids = np.where(odd, rng.choice(sayable, shape), ids)
    return np.clip(ids, info.min, info.max).astype(dtype)


def random_histograms(rng: np.random.Generator, shape: tuple[int, ...], dtype) -> np.ndarray:
    """Old rows: small counts, some at the edge of the dtype."""
    limit = np.iinfo(dtype).max
    rows = rng.integers(0, 20, shape)
    return np.where(rng.random(shape) < 0.05, limit - rng.integers(0, 3, shape), rows).astype(dtype)


@st.composite
def block_sizes(draw, dtype) -> int:
    sizes = [1, 3, 16, 17, 64, 128, 255]
    return draw(st.sampled_from([*sizes, 256] if dtype is np.uint16 else sizes))


@st.composite
def steps(draw, max_tokens: int = 70, max_layers: int = 3) -> Step:
    """Any slots in any order: duplicates, padding, blocks left and entered again."""
    experts, top_k = draw(st.sampled_from(GEOMETRIES))
    dtype = draw(st.sampled_from((np.uint8, np.uint16)))
    size = draw(block_sizes(dtype))
    tokens, layers = draw(st.integers(0, max_tokens)), draw(st.integers(1, max_layers))
    blocks = draw(st.integers(1, 9))
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    ids = random_ids(rng, (tokens, layers, top_k), experts, draw(st.sampled_from(ID_DTYPES)))
    slots = rng.integers(-1, blocks * size, tokens)
    return Step(ids, slots, size, random_histograms(rng, (blocks, layers, experts), dtype))


def scheduled_slots(rng: np.random.Generator, blocks: int, size: int, tokens: int) -> np.ndarray:
    """Slots as a scheduler lays them out: runs of requests' chunks, holes and padding between."""
    free, slots = list(rng.permutation(blocks)), []
    while free and len(slots) < tokens:
        start = int(rng.choice([0, 0, 1, size - 1, rng.integers(0, size)]))
        length = int(rng.choice([1, size - start, size, 2 * size, rng.integers(1, 3 * size + 1)]))
        mine = [free.pop() for _ in range(min(len(free), -(-(start + length) // size)))]
        length = min(length, len(mine) * size - start, tokens - len(slots))
        place = start + np.arange(max(length, 0))
        run = np.asarray(mine, dtype=np.int64)[place // size] * size + place % size
        run[rng.random(run.size) < 0.1] = -1
        slots += [*run.tolist(), *[-1] * int(rng.integers(0, 3))]
    return np.asarray(slots[:tokens], dtype=np.int64)


def ragged(rng: np.random.Generator, requests: int, blocks: int) -> tuple[np.ndarray, np.ndarray]:
    """(block_ids, offsets) of requests with 0 to 40 blocks."""
    lengths = rng.choice([0, 1, 2, 3, 4, 5, 40], requests)
    offsets = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32)
    return rng.integers(0, blocks, int(offsets[-1])).astype(np.int32), offsets
