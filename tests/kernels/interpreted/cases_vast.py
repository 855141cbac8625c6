"""Caches and buffers past 2^31 elements under the interpreter: no offset may wrap."""

import numpy as np
import torch

from eldr.kernels.accumulate import accumulate_hits_triton
from eldr.kernels.decide import decide_triton
from eldr.kernels.gather import gather_signatures_triton
from tests.kernels import oracles, vast


def test_blocks_past_2_31_elements():
    """The last layer of a whole cache: one layer keeps the interpreter quick."""
    cache = vast.histograms()
    layer, slots = cache[:, -1:], vast.slots()
    ids = vast.ids(slots.size, 1)
    want = oracles.accumulate(ids, slots - vast.LAST * vast.BLOCK, vast.BLOCK, layer[vast.LAST :])
    rows = torch.from_numpy(layer)
    accumulate_hits_triton(torch.from_numpy(ids), torch.from_numpy(slots), vast.BLOCK, rows)
    np.testing.assert_array_equal(layer[vast.LAST :], want)

    block_ids = torch.tensor([vast.LAST, vast.LAST + 2, 0], dtype=torch.int32)
    offsets = torch.tensor([0, 3], dtype=torch.int32)
    counts, fused = torch.empty(2, 1, 1, vast.EXPERTS, dtype=torch.int32)
    gather_signatures_triton(rows, block_ids, offsets, counts)
    vectors, scores = torch.ones(2, vast.EXPERTS), torch.empty(1, 2)
    decide_triton(
        rows, block_ids, offsets, vectors, None, None, None, 0.0, 0, [], None, None, scores, fused,
        None, None, None,
    )  # fmt: skip
    expected = want[[0, 2]].astype(np.int32).sum(0)
    np.testing.assert_array_equal(counts[0].numpy(), expected)
    np.testing.assert_array_equal(fused[0].numpy(), expected)
    assert scores.tolist() == [[expected.sum()] * 2]


def test_ids_past_2_31_elements():
    slots = np.arange(20)
    ids = vast.layer_major_ids(slots.size)
    rows = np.zeros((2, ids.shape[1], vast.EXPERTS), np.uint8)
    want = oracles.accumulate(ids, slots, vast.BLOCK, rows)
    accumulate_hits_triton(
        torch.from_numpy(ids), torch.from_numpy(slots), vast.BLOCK, torch.from_numpy(rows)
    )
    np.testing.assert_array_equal(rows, want)
