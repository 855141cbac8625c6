"""csrc/cuda/accumulate.cu in emulation against NumPy, on shapes chosen to break it."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.kernels.cuda import oracle
from tests.kernels.cuda.emulation import UNSUPPORTED, Device
from tests.kernels.cuda.steps import blocks_needed, step_slots, top_k_ids

RAGGED = ((0, 40), (5, 20), (16, 16), (33, 1), (0, 3), (30, 37))


def check(
    device: Device,
    ids: np.ndarray,
    slots: np.ndarray,
    rows: np.ndarray,
    block_size: int,
    seeds: int = 2,
) -> None:
    expected = oracle.accumulate(ids, slots, rows, block_size)
    for seed in range(seeds):
        got = rows.copy()
        device.reset(seed)
        assert device.accumulate(ids, slots, got, block_size) == 0
        np.testing.assert_array_equal(got, expected)


def garbage_rows(rng: np.random.Generator, shape: tuple[int, int, int], dtype: type) -> np.ndarray:
    """What a reused cache holds: anything, up to the dtype's maximum."""
    return rng.integers(0, np.iinfo(dtype).max + 1, shape).astype(dtype)


@pytest.mark.parametrize("row", [np.uint8, np.uint16])
@pytest.mark.parametrize("id_dtype", [np.int32, np.uint8, np.uint16, np.int64])
@pytest.mark.parametrize(
    ("layers", "experts", "top_k", "block_size", "chunks"),
    [
        (48, 128, 8, 16, RAGGED),
        (9, 60, 6, 16, RAGGED),  # neither a power of two
        (3, 62, 3, 24, RAGGED),  # rows that are no whole words
        (9, 128, 4, 64, ((0, 200), (70, 100))),
        (5, 256, 8, 128, ((3, 300),)),
        (3, 512, 16, 255, ((0, 300), (200, 100))),
        (1, 1, 1, 16, ((0, 33),)),
        (2, 7, 2, 1, ((0, 33), (2, 3))),
    ],
)
def test_equals_the_reference(
    device: Device,
    layers: int,
    experts: int,
    top_k: int,
    block_size: int,
    chunks: tuple,
    id_dtype: type,
    row: type,
) -> None:
    rng = np.random.default_rng(experts * block_size)
    num_blocks = blocks_needed(block_size, chunks) + 2
    slots = step_slots(rng, block_size, num_blocks, chunks)
    ids = top_k_ids(rng, len(slots), layers, top_k, experts, id_dtype)
    check(device, ids, slots, garbage_rows(rng, (num_blocks, layers, experts), row), block_size)


@settings(
    max_examples=60,
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
@given(data=st.data())
def test_any_step(device: Device, data: st.DataObject) -> None:
    draw = data.draw
    block_size = draw(st.sampled_from([1, 2, 3, 16, 31, 32, 33, 64, 256]))
    row = np.uint16 if block_size > 255 else draw(st.sampled_from([np.uint8, np.uint16]))
    experts = draw(st.integers(1, 70))
    top_k = draw(st.integers(1, min(16, experts)))
    chunks = draw(
        st.lists(st.tuples(st.integers(0, 70), st.integers(1, 90)), min_size=0, max_size=4)
    )
    rng = np.random.default_rng(draw(st.integers(0, 2**32)))
    num_blocks = blocks_needed(block_size, chunks) + 1
    slots = step_slots(rng, block_size, num_blocks, chunks, padding=draw(st.integers(0, 40)))
    # Tokens that the engine masks (rejected drafts, decode tokens) leave holes anywhere.
    slots[rng.random(len(slots)) < draw(st.sampled_from([0.0, 0.1, 0.9]))] = -1
    ids = top_k_ids(rng, len(slots), draw(st.integers(1, 10)), top_k, experts, np.int32)
    rows = garbage_rows(rng, (num_blocks, ids.shape[1], experts), row)
    check(device, ids, slots, rows, block_size, seeds=1)


def test_no_tokens_and_only_padding(device: Device) -> None:
    rows = np.full((3, 2, 8), 9, np.uint8)
    for tokens in (0, 1, 70):
        ids = np.zeros((tokens, 2, 4), np.int32)
        assert device.accumulate(ids, np.full(tokens, -1, np.int64), rows, 16) == 0
    assert (rows == 9).all()


def test_slots_of_blocks_that_do_not_exist_are_ignored(device: Device) -> None:
    slots = np.array([3 * 16, 3 * 16 + 1, 2**40, -(2**40), 16, 17], np.int64)
    ids = np.zeros((len(slots), 2, 1), np.int32)
    check(device, ids, slots, np.full((3, 2, 8), 9, np.uint8), 16)


def test_repeated_ids_fill_a_count_to_its_maximum_and_no_further(device: Device) -> None:
    block_size, top_k = 64, 16
    slots = np.arange(block_size, dtype=np.int64)
    ids = np.full((block_size, 1, top_k), 5, np.int32)
    rows = np.zeros((1, 1, 8), np.uint8)
    check(device, ids, slots, rows, block_size)
    device.accumulate(ids, slots, rows, block_size)
    assert rows[0, 0].tolist() == [0, 0, 0, 0, 0, 255, 0, 0]


def test_tokens_of_a_block_in_any_order_within_its_window(device: Device) -> None:
    rng = np.random.default_rng(3)
    slots = np.concatenate([rng.permutation(16) + 16 * b for b in (4, 1, 3)]).astype(np.int64)
    ids = top_k_ids(rng, len(slots), 3, 4, 32, np.int32)
    check(device, ids, slots, garbage_rows(rng, (5, 3, 32), np.uint8), 16)


def test_strided_ids_and_rows(device: Device) -> None:
    rng = np.random.default_rng(4)
    slots = step_slots(rng, 16, 12, RAGGED[:4])
    ids = top_k_ids(rng, len(slots), 6, 8, 64, np.int32)[:, 1:5]
    rows = garbage_rows(rng, (12, 7, 64), np.uint8)[:, 2:6]
    check(device, ids, slots, rows, 16)


def test_unaligned_ids_take_the_narrow_path(device: Device) -> None:
    rng = np.random.default_rng(5)
    slots = step_slots(rng, 16, 12, RAGGED[:4])
    ids = top_k_ids(rng, len(slots), 3, 8, 64, np.int32)
    moved = np.empty(ids.size + 1, np.int32)[1:].reshape(ids.shape)
    moved[:] = ids
    check(device, moved, slots, garbage_rows(rng, (12, 3, 64), np.uint8), 16)


@pytest.mark.parametrize(
    ("experts", "top_k", "block_size"),
    [(513, 8, 16), (128, 16, 4096)],
    ids=["experts", "run too long"],
)
def test_what_it_cannot_do_is_refused_and_nothing_written(
    device: Device, experts: int, top_k: int, block_size: int
) -> None:
    rows = np.full((1, 1, experts), 9, np.uint16)
    ids = np.zeros((4, 1, top_k), np.int32)
    assert device.accumulate(ids, np.arange(4, dtype=np.int64), rows, block_size) == UNSUPPORTED
    assert (rows == 9).all()
