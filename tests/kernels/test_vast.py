"""Caches and buffers past 2^31 elements, on the CPU's backends: no offset may wrap."""

import numpy as np
import pytest
import torch

from eldr.kernels import (
    Centroids,
    accumulate_hits,
    accumulate_hits_ref,
    decide,
    gather_signatures,
    gather_signatures_ref,
)
from tests.kernels import oracles, vast


@pytest.fixture(scope="module")
def cache() -> np.ndarray:
    return vast.histograms()


@pytest.mark.parametrize("function", [accumulate_hits, accumulate_hits_ref])
def test_accumulate_into_blocks_past_2_31_elements(function, cache):
    slots, rows = vast.slots(), cache[vast.LAST :]
    ids, before = vast.ids(slots.size, vast.LAYERS), rows.copy()
    want = oracles.accumulate(ids, slots - vast.LAST * vast.BLOCK, vast.BLOCK, rows)
    function(torch.from_numpy(ids), torch.from_numpy(slots), vast.BLOCK, torch.from_numpy(cache))
    np.testing.assert_array_equal(rows, want)
    assert not cache[:2].any()
    rows[:] = before


@pytest.mark.parametrize("function", [accumulate_hits, accumulate_hits_ref])
def test_accumulate_ids_past_2_31_elements(function):
    slots = np.arange(20)
    ids = vast.layer_major_ids(slots.size)
    rows = np.zeros((2, ids.shape[1], vast.EXPERTS), np.uint8)
    want = oracles.accumulate(ids, slots, vast.BLOCK, rows)
    function(torch.from_numpy(ids), torch.from_numpy(slots), vast.BLOCK, torch.from_numpy(rows))
    np.testing.assert_array_equal(rows, want)


def test_gather_and_decide_from_blocks_past_2_31_elements(cache):
    block_ids = np.array([vast.LAST, vast.LAST + 2, 0, vast.LAST + 1], np.int32)
    offsets = np.array([0, 2, 4], np.int32)
    want = oracles.gather(cache, block_ids, offsets)
    blocks = [torch.from_numpy(array) for array in (cache, block_ids, offsets)]
    np.testing.assert_array_equal(gather_signatures(*blocks).numpy(), want)
    counts = torch.empty(want.shape, dtype=torch.int32)
    gather_signatures_ref(*blocks, counts)
    np.testing.assert_array_equal(counts.numpy(), want)
    cells = vast.LAYERS * vast.EXPERTS
    decide(*blocks, Centroids(torch.ones(2, cells), torch.ones(cells)), counts=counts.zero_())
    np.testing.assert_array_equal(counts.numpy(), want)
