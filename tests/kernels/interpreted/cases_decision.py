import numpy as np
import pytest
import torch

from eldr.kernels import (
    CLOSED,
    Centroids,
    LeastLoad,
    LocalityBand,
    MarginalCost,
    Survival,
    assign,
    gather_signatures,
    score,
)
from eldr.kernels.assign import assign_triton, coefficients
from eldr.kernels.decide import decide_triton
from eldr.kernels.gather import gather_signatures_triton
from eldr.kernels.score import operands, score_triton
from tests.kernels import oracles
from tests.kernels.strategies import ragged, random_histograms

# (L, E), requests, workers: row by row and in tiles, several chunks, more workers than one tile
CASES = [((5, 128), 3, 5), ((2, 60), 17, 37), ((1, 40), 17, 70), ((3, 7), 1, 1)]


@pytest.mark.parametrize("dtype", [np.uint8, np.uint16])
@pytest.mark.parametrize(("shape", "requests", "workers"), CASES[:2])
def test_gather_equals_numpy(shape, requests, workers, dtype):
    rng = np.random.default_rng(requests)
    histograms = random_histograms(rng, (11, *shape), dtype)
    block_ids, offsets = ragged(rng, min(requests, 5), 11)
    counts = torch.full((offsets.size - 1, *shape), -1, dtype=torch.int32)
    gather_signatures_triton(*map(torch.from_numpy, (histograms, block_ids, offsets)), counts)
    want = oracles.gather(histograms, block_ids, offsets)
    np.testing.assert_array_equal(counts.numpy(), want)


def test_gather_ignores_blocks_that_do_not_exist_and_stays_within_the_list():
    histograms = torch.ones(2, 1, 4, dtype=torch.uint8)
    block_ids = torch.tensor([0, -1, 2, 1], dtype=torch.int32)
    offsets = torch.tensor([-5, 3, 99], dtype=torch.int32)
    counts = torch.empty(2, 1, 4, dtype=torch.int32)
    gather_signatures_triton(histograms, block_ids, offsets, counts)
    assert counts[:, 0, 0].tolist() == [1, 1]


def problem(shape, requests, workers, survival):
    rng = np.random.default_rng([requests, workers])
    histograms = torch.from_numpy(random_histograms(rng, (11, *shape), np.uint8))
    block_ids, offsets = map(torch.from_numpy, ragged(rng, requests, 11))
    vectors, weights = torch.from_numpy(rng.random((workers, *shape))), rng.random(shape)
    if survival:
        scorer = Survival.of(vectors, torch.from_numpy(weights), 16.0)
        tokens = torch.from_numpy(rng.integers(0, 999, requests).astype(np.int32))
        return (histograms, block_ids, offsets), scorer, tokens
    return (histograms, block_ids, offsets), Centroids.fold(vectors, torch.tensor(weights)), None


@pytest.mark.parametrize("survival", [False, True])
@pytest.mark.parametrize(("shape", "requests", "workers"), CASES)
def test_score_and_decide_equal_the_cpu_kernels(shape, requests, workers, survival):
    blocks, scorer, tokens = problem(shape, requests, workers, survival)
    counts = gather_signatures(*blocks)
    want = score(counts, scorer, tokens=tokens)
    got = torch.empty_like(want)
    score_triton(counts, *operands(scorer, tokens), got)
    torch.testing.assert_close(got, want, rtol=2e-5, atol=1e-5)

    load, cost = torch.zeros(workers, dtype=torch.int32), torch.ones(requests, dtype=torch.int32)
    chosen, fused = torch.empty_like(cost), torch.full_like(counts, -1)
    decide_triton(
        *blocks, *operands(scorer, tokens), LocalityBand.code, [0.01], cost, None, got.zero_(),
        fused, load, None, chosen,
    )  # fmt: skip
    torch.testing.assert_close(got, want, rtol=2e-5, atol=1e-5)
    assert torch.equal(fused, counts)
    cpu_load = torch.zeros_like(load)
    assert torch.equal(chosen, assign(got, LocalityBand(0.01), cpu_load, cost))
    assert torch.equal(load, cpu_load)


@pytest.mark.parametrize("workers", [2, 130])
@pytest.mark.parametrize(
    "rule",
    [
        LeastLoad(),
        LocalityBand(0.0),
        LocalityBand(0.3),
        MarginalCost(0.3, 0.7, 0.1, 2.0),
        MarginalCost(3e38, 1.0, 1.0, 3e38),
    ],
)
def test_assign_equals_the_cpu_kernel_choice_by_choice(rule, workers):
    """Ties, closed workers, NaN, infinities, negative zero, loads at the edge."""
    rng = np.random.default_rng(workers)
    requests, costs = 10, isinstance(rule, MarginalCost)
    scores = rng.choice(np.array([-1, -0.0, 0, 0.25, 0.5, np.nan, -np.inf]), (requests, workers))
    scores = torch.from_numpy(scores.astype(np.float32))
    load = rng.integers(0, 3, workers).astype(np.int32)
    load[rng.random(workers) < 0.3] = CLOSED
    load[-1] = CLOSED - 1
    cost = torch.from_numpy(rng.integers(0, 3, requests).astype(np.int32))
    kv = torch.from_numpy(rng.integers(1, 99, requests).astype(np.float32)) if costs else None
    results = []
    for function in ("cpu", "triton"):
        loads = torch.from_numpy(load.copy())
        state = torch.ones(2, workers) if costs else None
        chosen = torch.empty(requests, dtype=torch.int32)
        if function == "cpu":
            assign(scores, rule, loads, cost, state=state, request_kv=kv, chosen=chosen)
        else:
            numbers = coefficients(rule)
            assign_triton(scores, rule.code, numbers, cost, kv, loads, state, chosen)
        results.append((chosen, loads, torch.zeros(1) if state is None else state))
    for want, got in zip(*results, strict=True):
        assert torch.equal(want, got)


def test_assign_with_every_worker_closed():
    load = torch.full((3,), CLOSED, dtype=torch.int32)
    chosen, cost = torch.empty(2, dtype=torch.int32), torch.ones(2, dtype=torch.int32)
    for rule in (LeastLoad(), LocalityBand(0.1)):
        numbers = coefficients(rule)
        assign_triton(torch.zeros(2, 3), rule.code, numbers, cost, None, load, None, chosen)
        assert chosen.tolist() == [-1, -1]
        assert load.tolist() == [CLOSED] * 3
