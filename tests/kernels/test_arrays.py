"""Arrays of other libraries: taken over without a copy, written in place, refused with a name."""

import numpy as np
import pytest
import torch

from eldr.kernels import (
    Assignment,
    Centroids,
    LeastLoad,
    MarginalCost,
    Survival,
    accumulate_hits,
    assign,
    decide,
    gather_signatures,
    score,
)
from tests.kernels import oracles


class Foreign:
    """An array of a library that torch does not know, such as CuPy's on a CPU; DLPack only."""

    def __init__(self, array: np.ndarray) -> None:
        self.array = array

    def __dlpack__(self, **options):
        return self.array.__dlpack__(**options)

    def __dlpack_device__(self):
        return self.array.__dlpack_device__()


WRAPPERS = {"numpy": lambda array: array, "dlpack": Foreign}


@pytest.fixture(params=WRAPPERS)
def wrap(request):
    return WRAPPERS[request.param]


@pytest.mark.parametrize("dtype", [np.uint8, np.uint16])
def test_accumulate_writes_into_the_arrays_own_memory(wrap, dtype):
    rng = np.random.default_rng(0)
    ids = rng.integers(0, 60, (40, 3, 6)).astype(np.int32)
    slots, histograms = np.arange(5, 45), rng.integers(0, 20, (3, 3, 60)).astype(dtype)
    want = oracles.accumulate(ids, slots, 16, histograms)
    accumulate_hits(wrap(ids), slot_mapping=wrap(slots), block_size=16, histograms=wrap(histograms))
    np.testing.assert_array_equal(histograms, want)


def test_the_decision_on_arrays_is_that_on_tensors(wrap):
    rng = np.random.default_rng(1)
    histograms = rng.integers(0, 20, (7, 2, 60)).astype(np.uint8)
    block_ids, offsets = np.array([0, 6, 3], np.int32), np.array([0, 2, 3], np.int32)
    counts = np.empty((2, 2, 60), np.int32)
    gather_signatures(wrap(histograms), wrap(block_ids), wrap(offsets), counts=wrap(counts))
    np.testing.assert_array_equal(counts, oracles.gather(histograms, block_ids, offsets))
    vectors, squares = rng.random((4, 120), np.float32), rng.random(120, np.float32)
    scorer = Centroids(wrap(vectors), wrap(squares))
    scores = score(wrap(counts), scorer)
    tensors = Centroids(torch.from_numpy(vectors), torch.from_numpy(squares))
    assert torch.equal(scores, score(torch.from_numpy(counts), tensors))
    load, cost = np.zeros(4, np.int32), np.ones(2, np.int32)
    chosen = assign(wrap(scores.numpy()), LeastLoad(), wrap(load), wrap(cost))
    assert load.tolist() == [1, 1, 0, 0]
    load[:] = 0
    rule = Assignment(LeastLoad(), wrap(load), wrap(cost))
    done = decide(wrap(histograms), wrap(block_ids), wrap(offsets), scorer, assignment=rule)
    assert torch.equal(done.scores, scores)
    assert torch.equal(done.chosen, chosen)
    assert load.tolist() == [1, 1, 0, 0]


def test_state_and_survival_may_be_arrays(wrap):
    survival, mean = np.ones((2, 1, 3), np.float32), np.full((1, 3), 0.5, np.float32)
    scorer = Survival.of(wrap(survival), wrap(mean), 2.0)
    assert scorer.prior.tolist() == [3.0, 3.0]
    assert Centroids.fold(wrap(survival), wrap(mean)).squares.tolist() == [0.25] * 3
    state, kv = np.zeros((2, 2), np.float32), np.array([7.0], np.float32)
    load, cost = np.zeros(2, np.int32), np.ones(1, np.int32)
    scores = np.array([[2.0, 1.0]], np.float32)
    rule = MarginalCost(1.0, 0.0, 0.0, 0.0)
    assign(wrap(scores), rule, wrap(load), wrap(cost), state=wrap(state), request_kv=wrap(kv))
    assert state.tolist() == [[0.0, 1.0], [0.0, 7.0]]


def test_what_cannot_be_shared_is_refused_by_name():
    histograms = np.zeros((1, 1, 4), np.uint8)
    histograms.flags.writeable = False
    ids, slots = np.zeros((1, 1, 1), np.int32), np.zeros(1, np.int64)
    with pytest.raises(TypeError, match=r"histograms: read-only .*pass a copy"):
        accumulate_hits(ids, slots, 16, histograms)
    with pytest.raises(TypeError, match=r"topk_ids: expected a tensor or .*got ndarray"):
        accumulate_hits(topk_ids=ids.astype("U1"), slot_mapping=slots, block_size=16,
                        histograms=histograms)  # fmt: skip
    with pytest.raises(TypeError, match=r"vectors: expected a tensor or .*got ndarray"):
        Centroids(np.array([["a"]]), torch.ones(1))
    with pytest.raises(TypeError, match=r"load: expected a tensor or .*got ndarray"):
        Assignment(LeastLoad(), np.array(["a"]), torch.ones(1))
    with pytest.raises(TypeError, match=r"topk_ids: expected int32 or .*got float64"):
        accumulate_hits(ids.astype(float), slots, 16, np.zeros((1, 1, 4), np.uint8))
