import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from eldr.kernels import gather_signatures, gather_signatures_ref
from tests.kernels import oracles
from tests.kernels.strategies import ragged, random_histograms


def reference(histograms, block_ids, offsets):
    shape = (offsets.numel() - 1, *histograms.shape[1:])
    counts = torch.full(shape, -1, dtype=torch.int32)
    gather_signatures_ref(histograms, block_ids, offsets, counts)
    return counts


def portable(histograms, block_ids, offsets):
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("ELDR_CPU", "portable")
        return gather_signatures(histograms, block_ids, offsets)


BACKENDS = {"served": gather_signatures, "portable": portable, "reference": reference}


@pytest.mark.parametrize("backend", BACKENDS)
@settings(max_examples=60, deadline=None, derandomize=True)
@given(
    seed=st.integers(0, 2**32 - 1),
    shape=st.sampled_from([(1, 1), (3, 60), (2, 512), (9, 128), (17, 61)]),
    requests=st.integers(0, 5),
    dtype=st.sampled_from([np.uint8, np.uint16]),
)
def test_equals_numpy(backend, seed, shape, requests, dtype):
    rng = np.random.default_rng(seed)
    histograms = random_histograms(rng, (11, *shape), dtype)
    block_ids, offsets = ragged(rng, requests, 11)
    got = BACKENDS[backend](*map(torch.from_numpy, (histograms, block_ids, offsets)))
    np.testing.assert_array_equal(got.numpy(), oracles.gather(histograms, block_ids, offsets))


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(("dtype", "rows"), [(np.uint8, 70_000), (np.uint16, 32_768)])
def test_long_prompts_of_full_rows_do_not_overflow_the_narrow_lanes(backend, dtype, rows):
    limit = np.iinfo(dtype).max
    histograms = torch.from_numpy(np.full((2, 1, 20), limit, dtype))
    block_ids = torch.ones(rows, dtype=torch.int32)
    offsets = torch.tensor([0, rows], dtype=torch.int32)
    assert bool((BACKENDS[backend](histograms, block_ids, offsets) == rows * limit).all())


def test_writes_into_the_given_tensor_and_reads_one_layer_of_a_larger_array():
    rng = np.random.default_rng(1)
    whole = torch.from_numpy(random_histograms(rng, (6, 4, 33), np.uint8))
    block_ids, offsets = map(torch.from_numpy, ragged(rng, 3, 6))
    every = gather_signatures(whole, block_ids, offsets)
    counts = torch.empty(3, 1, 33, dtype=torch.int32)
    assert gather_signatures(whole[:, 2:3], block_ids, offsets, counts=counts) is counts
    assert torch.equal(counts, every[:, 2:3])


def arguments() -> dict[str, object]:
    return {
        "histograms": torch.ones(4, 2, 3, dtype=torch.uint8),
        "block_ids": torch.tensor([0, 1, 3], dtype=torch.int32),
        "offsets": torch.tensor([0, 1, 3], dtype=torch.int32),
    }


def int32(*values: int) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32)


BAD = [
    ("block_ids", torch.tensor([0, 1, 3]), TypeError, "block_ids: expected int32, got int64"),
    ("block_ids", int32(0, -1, 3), ValueError, r"block_ids: -1 at position 1 is not in \[0, 3\]"),
    ("block_ids", int32(0, 1, 4), ValueError, r"block_ids: 4 at position 2 is not in \[0, 3\]"),
    ("block_ids", torch.zeros(6, dtype=torch.int32)[::2], ValueError, "block_ids: expected a cont"),
    ("offsets", int32(), ValueError, "offsets: empty"),
    ("offsets", int32(0, 2, 1), ValueError, r"offsets: -1 at position 1 .* must ascend"),
    ("offsets", int32(0, 1, 4), ValueError, r"offsets: 4 at position 2 is not in \[0, 3\]"),
    ("offsets", int32(-1, 1, 3), ValueError, r"offsets: -1 at position 0"),
    ("histograms", torch.ones(4, 2, 3), TypeError, "histograms: expected uint8 or uint16, got"),
    (
        "block_ids",
        int32(0, 1, 3).to("meta"),
        ValueError,
        "block_ids: on meta, but histograms is on",
    ),
    ("offsets", torch.tensor([0, 1, 3]), TypeError, "offsets: expected int32, got int64"),
    (
        "offsets",
        int32(0, 1, 3).to("meta"),
        ValueError,
        "offsets: on meta, but histograms is on cpu",
    ),
    ("counts", torch.zeros(2, 2, 3).int().to("meta"), ValueError, "counts: on meta, but hist"),
    ("counts", torch.zeros(2, 2, 3), TypeError, "counts: expected int32, got float32"),
    ("counts", torch.zeros(3, 2, 3, dtype=torch.int32), ValueError, r"counts: .*\[2, 2, 3\]"),
]


@pytest.mark.parametrize(("name", "value", "error", "message"), BAD)
def test_bad_arguments_are_named(name, value, error, message):
    with pytest.raises(error, match=message):
        gather_signatures(**arguments() | {name: value})


def test_counts_that_could_pass_int32_are_refused():
    many = 2**31 // 65535 + 1
    with pytest.raises(ValueError, match=r"offsets: 32769 at position 0 .* sum fits int32"):
        gather_signatures(
            torch.zeros(1, 1, 1, dtype=torch.uint16),
            torch.zeros(many, dtype=torch.int32),
            int32(0, many),
        )


def test_a_direct_call_of_the_op_cannot_read_out_of_bounds():
    call = arguments() | {"block_ids": int32(0, 1, 9), "counts": torch.zeros(2, 2, 3).int()}
    with pytest.raises(RuntimeError, match="block_ids: 9 at position 2"):
        torch.ops.eldr.gather_signatures(*call.values())


def test_opcheck():
    call = (*arguments().values(), torch.zeros(2, 2, 3, dtype=torch.int32))
    torch.library.opcheck(torch.ops.eldr.gather_signatures.default, call)
