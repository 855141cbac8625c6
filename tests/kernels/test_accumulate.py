import numpy as np
import pytest
import torch
from hypothesis import given, settings

from eldr.kernels import accumulate_hits, accumulate_hits_ref, gather_signatures
from tests.kernels import oracles
from tests.kernels.strategies import GEOMETRIES, Step, random_histograms, random_ids, steps

BACKENDS = {"served": accumulate_hits, "reference": accumulate_hits_ref}


def run(function, step: Step) -> np.ndarray:
    histograms = torch.from_numpy(step.histograms.copy())
    function(torch.from_numpy(step.ids), torch.from_numpy(step.slots), step.block_size, histograms)
    return histograms.numpy()


@pytest.mark.parametrize("backend", BACKENDS)
@settings(max_examples=150, deadline=None, derandomize=True)
@given(step=steps())
def test_equals_numpy_for_any_order_of_slots(backend, step):
    want = oracles.accumulate(step.ids, step.slots, step.block_size, step.histograms)
    np.testing.assert_array_equal(run(BACKENDS[backend], step), want)


@pytest.mark.parametrize(("experts", "top_k"), GEOMETRIES)
@pytest.mark.parametrize("size", [16, 64, 255])
def test_chunked_prefill_in_many_steps_equals_counting_the_prompt(experts, top_k, size):
    """Prompts in random chunks, interleaved, into blocks that held something else before."""
    rng = np.random.default_rng(experts * size)
    lengths = [1, size - 1, size, size + 1, 3 * size + 5]
    layers, blocks = 2, sum(-(-n // size) for n in lengths)
    free = rng.permutation(blocks)
    histograms = torch.from_numpy(random_histograms(rng, (blocks, layers, experts), np.uint8))
    prompts = [rng.permuted(np.tile(np.arange(experts), (n, layers, 1)), axis=2) for n in lengths]
    prompts = [p[:, :, :top_k].astype(np.int32) for p in prompts]
    tables = np.split(free, np.cumsum([-(-n // size) for n in lengths])[:-1])
    done = [0] * len(lengths)
    while any(d < n for d, n in zip(done, lengths, strict=True)):
        ids, slots = [], []
        for i, n in enumerate(lengths):
            take = min(int(rng.integers(0, size + 2)), n - done[i])
            place = np.arange(done[i], done[i] + take)
            ids.append(prompts[i][place])
            slots.append(tables[i][place // size] * size + place % size)
            done[i] += take
        step = np.concatenate(ids), np.concatenate(slots)
        accumulate_hits(torch.from_numpy(step[0]), torch.from_numpy(step[1]), size, histograms)
    offsets = np.cumsum([0, *map(len, tables)]).astype(np.int32)
    ids = torch.from_numpy(np.concatenate(tables).astype(np.int32))
    counts = gather_signatures(histograms, ids, torch.from_numpy(offsets)).numpy()
    for prompt, got in zip(prompts, counts, strict=True):
        for layer in range(layers):
            want = np.bincount(prompt[:, layer].ravel(), minlength=experts)
            np.testing.assert_array_equal(got[layer], want)


@pytest.mark.parametrize("dtype", [np.uint8, np.uint16])
@pytest.mark.parametrize("size", [16, 255])
def test_counts_stop_at_the_maximum(dtype, size):
    """A token that repeats one expert K times, and a row that is nearly full already."""
    ids = np.zeros((size, 1, 16), np.int32)
    slots = np.arange(size)
    full = np.full((2, 1, 4), np.iinfo(dtype).max - 1, dtype)
    for first in (0, 1):  # with and without the token that starts the block anew
        step = Step(ids[first:], slots[first:] + size, size, full)
        want = oracles.accumulate(step.ids, step.slots, size, full)
        np.testing.assert_array_equal(run(accumulate_hits, step), want)
        np.testing.assert_array_equal(run(accumulate_hits_ref, step), want)


def test_one_layer_of_a_larger_array_and_strided_ids():
    rng = np.random.default_rng(3)
    layers, experts, top_k, size, tokens = 4, 60, 6, 16, 40
    wide = torch.from_numpy(random_ids(rng, (tokens, layers, top_k + 2), experts, np.int32))
    whole = torch.from_numpy(random_histograms(rng, (5, layers, experts), np.uint8))
    slots = torch.arange(20, 20 + tokens)
    by_layer = whole.clone()
    for layer in range(layers):
        chosen = wide[:, layer : layer + 1, 1 : top_k + 1]
        accumulate_hits(chosen, slots, size, by_layer[:, layer : layer + 1])
    accumulate_hits(wide[:, :, 1 : top_k + 1], slots, size, whole)
    assert torch.equal(by_layer, whole)


def test_threads_do_not_change_a_bit():
    rng = np.random.default_rng(4)
    ids = random_ids(rng, (2048, 8, 8), 128, np.int32)
    slots = rng.permutation(4096)[:2048]
    step = Step(ids, slots, 16, random_histograms(rng, (256, 8, 128), np.uint8))
    before, results = torch.get_num_threads(), []
    try:
        for threads in (1, 2):
            torch.set_num_threads(threads)
            results.append(run(accumulate_hits, step))
    finally:
        torch.set_num_threads(before)
    np.testing.assert_array_equal(*results)


def test_a_block_larger_than_uint8_needs_uint16():
    """Block size 256 with K = 1: a count may be 256, which uint8 would wrap to 0."""
    call = {"topk_ids": torch.zeros(256, 1, 1).int(), "slot_mapping": torch.arange(256)}
    with pytest.raises(ValueError, match="block_size: 256 is not in"):
        accumulate_hits(**call, block_size=256, histograms=torch.zeros(1, 1, 2).to(torch.uint8))
    histograms = torch.zeros(1, 1, 2, dtype=torch.uint16)
    accumulate_hits(**call, block_size=256, histograms=histograms)
    assert histograms.tolist() == [[[256, 0]]]


def test_no_tokens_change_nothing():
    histograms = torch.full((2, 3, 5), 7, dtype=torch.uint8)
    accumulate_hits(
        torch.zeros(0, 3, 2, dtype=torch.int32), torch.zeros(0, dtype=torch.int64), 16, histograms
    )
    assert bool((histograms == 7).all())


def arguments() -> dict[str, object]:
    return {
        "topk_ids": torch.zeros(4, 3, 2, dtype=torch.int32),
        "slot_mapping": torch.arange(4),
        "block_size": 16,
        "histograms": torch.zeros(2, 3, 5, dtype=torch.uint8),
    }


BAD = [
    ("topk_ids", torch.zeros(4, 3, 2), TypeError, "topk_ids: expected int32 or .*got float32"),
    ("topk_ids", [[0]], TypeError, "topk_ids: expected a torch.Tensor, got list"),
    ("topk_ids", torch.zeros(4, 2, 2, dtype=torch.int32), ValueError, r"\[T, 3, K\], got \[4, 2"),
    ("topk_ids", torch.zeros(4, 3, 4, dtype=torch.int32)[:, :, ::2], ValueError, "last dimension"),
    ("slot_mapping", torch.arange(4, dtype=torch.int32), TypeError, "slot_mapping: expected int64"),
    ("slot_mapping", torch.arange(5), ValueError, r"slot_mapping: expected shape \[4\], got \[5\]"),
    ("slot_mapping", torch.arange(8)[::2], ValueError, "slot_mapping: expected a contiguous"),
    ("slot_mapping", torch.tensor([0, 1, 2, 32]), ValueError, r"slot_mapping: 32 at position 3"),
    ("slot_mapping", torch.tensor([0, -2, 2, 3]), ValueError, r"slot_mapping: -2 at position 1"),
    ("block_size", 0, ValueError, r"block_size: 0 is not in \[1, 255\]"),
    ("block_size", 256, ValueError, r"block_size: 256 is not in \[1, 255\], what torch.uint8"),
    ("block_size", 16.0, TypeError, "block_size: expected an int, got float 16.0"),
    ("block_size", True, TypeError, "block_size: expected an int, got bool True"),
    ("block_size", 2**31, ValueError, r"block_size: 2147483648 is not in \[1, 255\]"),
    (
        "topk_ids",
        torch.zeros(4, 3, 2, device="meta").int(),
        ValueError,
        "topk_ids: on meta, but hist",
    ),
    ("slot_mapping", torch.arange(4, device="meta"), ValueError, "slot_mapping: on meta, but hist"),
    ("slot_mapping", torch.tensor([0, 1, 2, 2**40]), ValueError, "slot_mapping: 1099511627776 at"),
    ("histograms", torch.zeros(2, 3, 5, dtype=torch.int8), TypeError, "uint8 or uint16, got int8"),
    ("histograms", torch.zeros(3, 5, dtype=torch.uint8), ValueError, r"\[num_blocks, L, E\]"),
    ("histograms", torch.zeros(2, 3, 0, dtype=torch.uint8), ValueError, "must be positive"),
    ("histograms", torch.zeros(2, 5, 3, dtype=torch.uint8).mT, ValueError, "must be dense"),
    ("histograms", torch.zeros(1, 3, 5, dtype=torch.uint8).expand(2, 3, 5), ValueError, "dense"),
    ("histograms", torch.zeros(2, 3, 5, dtype=torch.uint8, device="meta"), ValueError, "on cpu"),
]


@pytest.mark.parametrize(("name", "value", "error", "message"), BAD)
def test_bad_arguments_are_named_and_change_nothing(name, value, error, message):
    given_arguments = arguments() | {name: value}
    with pytest.raises(error, match=message):
        accumulate_hits(**given_arguments)
    histograms = given_arguments["histograms"]
    assert histograms.device.type == "meta" or not histograms.any()


def test_a_direct_call_of_the_op_cannot_write_out_of_bounds():
    call = arguments() | {"slot_mapping": torch.tensor([0, 1, 2, 32])}
    with pytest.raises(RuntimeError, match="slot_mapping: slot 32 of token 3"):
        torch.ops.eldr.accumulate_hits(*call.values())


def test_opcheck():
    torch.library.opcheck(torch.ops.eldr.accumulate_hits.default, tuple(arguments().values()))
