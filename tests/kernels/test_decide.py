import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from eldr.kernels import (
    Assignment,
    Centroids,
    LeastLoad,
    LocalityBand,
    MarginalCost,
    Survival,
    assign,
    decide,
    decide_ref,
    gather_signatures,
    score,
)
from eldr.kernels.assign import coefficients
from eldr.kernels.score import operands
from tests.kernels.strategies import ragged, random_histograms

RULES = (None, LeastLoad(), LocalityBand(0.02), MarginalCost(1e-6, 1e-9, 1e-7, 1.0))


def problem(rng: np.random.Generator, shape: tuple[int, int], requests: int, workers: int):
    histograms = torch.from_numpy(random_histograms(rng, (11, *shape), np.uint8))
    block_ids, offsets = map(torch.from_numpy, ragged(rng, requests, 11))
    vectors, weights = rng.random((workers, *shape)), rng.random(shape)
    centroids = Centroids.fold(torch.from_numpy(vectors), torch.from_numpy(weights))
    survival = Survival.of(torch.from_numpy(vectors), torch.from_numpy(weights), 16.0)
    return (histograms, block_ids, offsets), (centroids, survival)


def assignment(rng: np.random.Generator, rule, requests: int, workers: int) -> Assignment:
    load = torch.from_numpy(rng.integers(0, 4, workers).astype(np.int32))
    cost = torch.ones(requests, dtype=torch.int32)
    if not isinstance(rule, MarginalCost):
        return Assignment(rule, load, cost)
    return Assignment(rule, load, cost, torch.rand(2, workers), torch.rand(requests))


@settings(max_examples=80, deadline=None, derandomize=True)
@given(
    seed=st.integers(0, 2**32 - 1),
    shape=st.sampled_from([(1, 1), (3, 60), (2, 512), (9, 128), (17, 61)]),
    requests=st.integers(0, 5),
    workers=st.sampled_from([1, 2, 16, 37]),
    rule=st.sampled_from(RULES),
    kind=st.integers(0, 1),
)
def test_is_gather_then_score_then_assign_bit_by_bit(seed, shape, requests, workers, rule, kind):
    rng = np.random.default_rng(seed)
    blocks, scorers = problem(rng, shape, requests, workers)
    tokens = None if kind == 0 else torch.arange(1, requests + 1, dtype=torch.int32)
    want_counts = gather_signatures(*blocks)
    want = score(want_counts, scorers[kind], tokens=tokens)
    counts = torch.full_like(want_counts, -1)
    given_assignment = None if rule is None else assignment(rng, rule, requests, workers)
    if given_assignment is None:
        chosen = None
    else:
        a = given_assignment
        load, state = a.load.clone(), None if a.state is None else a.state.clone()
        chosen = assign(want, a.rule, load, a.cost, state=state, request_kv=a.request_kv)
    got = decide(*blocks, scorers[kind], tokens=tokens, assignment=given_assignment, counts=counts)
    assert torch.equal(got.scores, want)
    assert torch.equal(counts, want_counts)
    if given_assignment is None:
        assert got.chosen is None
    else:
        assert torch.equal(got.chosen, chosen)
        assert torch.equal(given_assignment.load, load)
        assert state is None or torch.equal(given_assignment.state, state)


@pytest.mark.parametrize("rule", RULES[1:])
def test_agrees_with_the_reference(rule):
    """Scores to rounding; the choices are those of the reference on the same scores."""
    rng = np.random.default_rng(5)
    blocks, (scorer, _) = problem(rng, (5, 60), 7, 16)
    a = assignment(rng, rule, 7, 16)
    b = Assignment(a.rule, a.load.clone(), a.cost, *(
        None if t is None else t.clone() for t in (a.state, a.request_kv)
    ))  # fmt: skip
    got = decide(*blocks, scorer, assignment=a)
    scores, chosen = torch.empty(7, 16), torch.empty(7, dtype=torch.int32)
    decide_ref(
        *blocks, *operands(scorer, None), rule.code, coefficients(rule), b.cost, b.request_kv,
        scores, None, b.load, b.state, chosen,
    )  # fmt: skip
    torch.testing.assert_close(got.scores, scores, rtol=2e-5, atol=1e-6)
    assert torch.equal(got.chosen, chosen)
    assert torch.equal(a.load, b.load)


INT = torch.zeros(2, dtype=torch.int32)
BAD = [
    ({"chosen": torch.zeros(2, dtype=torch.int32)}, ValueError, "chosen: given without an assign"),
    ({"counts": torch.zeros(2, 3, 4)}, TypeError, "counts: expected int32"),
    ({"counts": torch.zeros(2, 3, 5).int()}, ValueError, r"counts: expected shape \[2, 3, 4\]"),
    ({"tokens": torch.ones(2).int()}, ValueError, "tokens: .*meaningless with Centroids"),
    ({"block_ids": torch.tensor([0, 7]).int()}, ValueError, "block_ids: 7 at position 1"),
    ({"block_ids": torch.tensor([-1, 2]).int()}, ValueError, "block_ids: -1 at position 0"),
    ({"offsets": torch.tensor([0, 1, 3]).int()}, ValueError, "offsets: 3 at position 2"),
    ({"counts": torch.zeros(2, 3, 4).int().to("meta")}, ValueError, "counts: on meta, but"),
    ({"scores": torch.zeros(2, 2).double()}, TypeError, "scores: expected float32, got float64"),
    (
        {"assignment": Assignment(LeastLoad(), INT.to("meta"), INT)},
        ValueError,
        "load: on meta, but",
    ),
    ({"assignment": Assignment(LeastLoad(), INT, INT[:1])}, ValueError, r"cost: expected .*\[2\]"),
    ({"scorer": Centroids(torch.ones(2, 5), torch.ones(5))}, ValueError, "have 5 cells"),
]


@pytest.mark.parametrize(("change", "error", "message"), BAD)
def test_bad_arguments_are_named(change, error, message):
    call = {
        "histograms": torch.ones(3, 3, 4, dtype=torch.uint8),
        "block_ids": torch.tensor([0, 2], dtype=torch.int32),
        "offsets": torch.tensor([0, 1, 2], dtype=torch.int32),
        "scorer": Centroids(torch.ones(2, 12), torch.ones(12)),
    }
    with pytest.raises(error, match=message):
        decide(**call | change)


@pytest.mark.parametrize("rule", RULES)
def test_opcheck(rule):
    rng = np.random.default_rng(6)
    blocks, (scorer, _) = problem(rng, (2, 5), 3, 4)
    scores, counts = torch.empty(3, 4), torch.empty(3, 2, 5, dtype=torch.int32)
    call = (*blocks, *operands(scorer, None))
    if rule is None:
        call += (0, [], None, None, scores, counts, None, None, None)
    else:
        a = assignment(rng, rule, 3, 4)
        chosen = torch.empty(3, dtype=torch.int32)
        call += (rule.code, coefficients(rule), a.cost, a.request_kv, scores, None, a.load)
        call += (a.state, chosen)
    torch.library.opcheck(torch.ops.eldr.decide.default, call)
