import numpy as np
import pytest
import torch

from eldr.kernels.accumulate import accumulate_hits_triton
from tests.kernels import oracles
from tests.kernels.strategies import random_histograms, random_ids, scheduled_slots

# E, K, block size, histogram, ids, layers: no powers of two, the largest sizes, every dtype
CASES = [
    (128, 8, 16, np.uint8, np.int32, 2),
    (60, 6, 16, np.uint8, np.int32, 5),
    (128, 4, 16, np.uint16, np.uint8, 2),
    (256, 8, 64, np.uint8, np.int32, 1),
    (512, 16, 256, np.uint16, np.uint16, 1),
    (256, 8, 64, np.uint8, np.uint8, 1),  # E itself does not fit the ids' dtype
    (60, 6, 33, np.uint8, np.int64, 1),
    (1, 1, 1, np.uint8, np.int32, 1),
]


def run(ids, slots, size, histograms):
    got = torch.from_numpy(histograms.copy())
    accumulate_hits_triton(torch.from_numpy(ids), torch.from_numpy(slots), size, got)
    return got.numpy()


@pytest.mark.parametrize("seed", [0, 1])
@pytest.mark.parametrize(("experts", "top_k", "size", "dtype", "id_dtype", "layers"), CASES)
def test_equals_numpy(experts, top_k, size, dtype, id_dtype, layers, seed):
    rng = np.random.default_rng([experts, top_k, size, seed])
    blocks = 6
    slots = scheduled_slots(rng, blocks, size, 3 * 16 + 7)
    ids = random_ids(rng, (slots.size, layers, top_k), experts, id_dtype)
    histograms = random_histograms(rng, (blocks, layers, experts), dtype)
    want = oracles.accumulate(ids, slots, size, histograms)
    np.testing.assert_array_equal(run(ids, slots, size, histograms), want)


def test_tokens_of_one_block_in_any_order_within_a_block_of_positions():
    rng = np.random.default_rng(7)
    slots = np.array([5, -1, 3, 0, 20, 2, 31, 1])  # two blocks of 16, interleaved, backwards
    ids = random_ids(rng, (8, 1, 4), 33, np.int32)
    histograms = random_histograms(rng, (2, 1, 33), np.uint8)
    want = oracles.accumulate(ids, slots, 16, histograms)
    np.testing.assert_array_equal(run(ids, slots, 16, histograms), want)


def test_blocks_that_do_not_exist_are_ignored():
    slots = np.array([0, 1, 32, 33, 2**40, -2])
    ids = np.zeros((6, 1, 1), np.int32)
    got = run(ids, slots, 16, np.zeros((2, 1, 4), np.uint8))
    assert got.sum() == 2


def test_strided_ids_and_one_layer_of_a_larger_array():
    rng = np.random.default_rng(8)
    wide = torch.from_numpy(random_ids(rng, (10, 3, 6), 20, np.int32))
    whole = torch.from_numpy(random_histograms(rng, (2, 3, 20), np.uint8))
    want = oracles.accumulate(wide[:, 1:2, 2:6].numpy(), np.arange(10), 16, whole[:, 1:2].numpy())
    accumulate_hits_triton(wide[:, 1:2, 2:6], torch.arange(10), 16, whole[:, 1:2])
    np.testing.assert_array_equal(whole[:, 1:2].numpy(), want)
