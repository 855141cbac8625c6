"""Arrays whose offsets pass 2^31: as large as a real cache, but only touched pages take memory."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import pytest

LAYERS, EXPERTS, TOP_K, BLOCK = 94, 128, 8, 16  # Qwen3-235B-A22B
BLOCKS = 2**31 // (LAYERS * EXPERTS) + 4  # a cache of 178,485 blocks
LAST = BLOCKS - 3  # the last three blocks begin past element 2^31


def _zeros(shape: tuple[int, ...]) -> npt.NDArray[np.uint8]:
    try:
        return np.zeros(shape, np.uint8)  # pages come when they are touched
    except MemoryError:
        pytest.skip(f"the system promises no {np.prod(shape) >> 20} MiB that nobody touches")


def histograms() -> npt.NDArray[np.uint8]:
    """uint8 [BLOCKS, LAYERS, EXPERTS], zero but for old counts in the last three blocks."""
    rows = _zeros((BLOCKS, LAYERS, EXPERTS))
    rows[LAST:] = np.random.default_rng(0).integers(0, 17, (3, LAYERS, EXPERTS))
    assert LAST * LAYERS * EXPERTS >= 2**31
    return rows


def slots() -> npt.NDArray[np.int64]:
    """int64 [42] in the last three blocks: a tail, a block that starts anew, a beginning."""
    return LAST * BLOCK + np.arange(5, 47, dtype=np.int64)


def layer_major_ids(tokens: int, layers: int = 3) -> npt.NDArray[np.uint8]:
    """Ids [tokens, layers, TOP_K] in a layer-major buffer whose last layer lies past 2^31."""
    buffer = _zeros((layers, 2**31 // (layers - 1) + 64))
    ids = buffer[:, : tokens * TOP_K].reshape(layers, tokens, TOP_K).transpose(1, 0, 2)
    ids[:] = np.random.default_rng(1).integers(0, EXPERTS, ids.shape)
    assert ids.strides[1] * (layers - 1) >= 2**31
    assert np.may_share_memory(ids, buffer)
    return ids


def ids(tokens: int, layers: int) -> npt.NDArray[np.int32]:
    """int32 [tokens, layers, TOP_K]."""
    rng = np.random.default_rng(2)
    return rng.integers(0, EXPERTS, (tokens, layers, TOP_K)).astype(np.int32)
