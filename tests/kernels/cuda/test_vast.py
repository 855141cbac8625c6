"""The CUDA kernels in emulation on caches and buffers past 2^31 elements: no offset may wrap."""

from __future__ import annotations

import numpy as np

from tests.kernels import oracles, vast
from tests.kernels.cuda.emulation import Device


def test_blocks_past_2_31_elements(device: Device) -> None:
    cache, slots = vast.histograms(), vast.slots()
    layers = cache[:, -2:]
    ids = vast.ids(slots.size, 2)
    want = oracles.accumulate(ids, slots - vast.LAST * vast.BLOCK, vast.BLOCK, layers[vast.LAST :])
    assert device.accumulate(ids, slots, layers, vast.BLOCK) == 0
    np.testing.assert_array_equal(layers[vast.LAST :], want)

    rows = cache.reshape(vast.BLOCKS, -1)
    block_ids = np.array([vast.LAST, vast.LAST + 2, 0], np.int32)
    offsets, vectors = np.array([0, 3], np.int32), np.ones((2, rows.shape[1]), np.float32)
    got = device.decide(rows, block_ids, offsets, vectors, counts=True)
    expected = rows[[vast.LAST, vast.LAST + 2]].astype(np.int32).sum(0)
    assert got.counts is not None
    np.testing.assert_array_equal(got.counts[0], expected)
    assert got.scores.tolist() == [[expected.sum()] * 2]


def test_ids_past_2_31_elements(device: Device) -> None:
    slots = np.arange(20)
    ids = vast.layer_major_ids(slots.size)
    rows = np.zeros((2, ids.shape[1], vast.EXPERTS), np.uint8)
    want = oracles.accumulate(ids, slots, vast.BLOCK, rows)
    assert device.accumulate(ids, slots, rows, vast.BLOCK) == 0
    np.testing.assert_array_equal(rows, want)
