"""Assignment under capacities: optimal, feasible, and refused when it cannot be."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.optimize import linear_sum_assignment

from eldr.routing import fixed
from eldr.routing.assignment import assign, capacities


def hungarian(cost, capacity):
    columns = np.repeat(np.arange(len(capacity)), capacity)
    rows, chosen = linear_sum_assignment(cost[:, columns])
    return cost[rows, columns[chosen]].sum(dtype=np.float64)


@settings(max_examples=120, deadline=None)
@given(st.integers(0, 2**32 - 1), st.integers(1, 60), st.integers(1, 7), st.booleans())
def test_exact_equals_hungarian(seed, points, bins, integral):
    rng = np.random.default_rng(seed)
    cost = rng.normal(size=(points, bins)).astype(np.float32)
    if integral:  # many ties
        cost = np.rint(cost * 2).astype(np.float32)
    cuts = np.sort(rng.integers(0, points + 1, bins - 1))
    capacity = np.diff(np.concatenate([[0], cuts, [points]])).astype(np.int64)
    prices = rng.normal(size=bins)
    expected = hungarian(cost, capacity)
    for start in (None, prices):
        result = assign(cost, capacity, method="exact", prices=start)
        assert np.bincount(result.home, minlength=bins).tolist() == capacity.tolist()
        assert result.objective == pytest.approx(expected, rel=1e-6, abs=1e-5)
        assert result.gap * max(abs(expected), 1) < 1e-4
    rough = assign(cost, capacity, method="approximate")
    assert np.bincount(rough.home, minlength=bins).tolist() == capacity.tolist()
    assert rough.objective >= expected - 1e-4
    # The gap is certified: the optimum is not further away than it says.
    bound = rough.objective / (1 + rough.gap) if rough.objective > 0 else -np.inf
    assert expected >= bound - 1e-4


def test_a_bound_of_nothing_makes_no_gap():
    cost = np.rint(2 * np.random.default_rng(2).normal(size=(45, 1))).astype(np.float32)
    result = assign(cost, np.array([45]), method="exact", prices=np.array([0.9692722]))
    assert result.objective == 0.0
    assert result.gap < 1e-5


def test_the_fallback_without_native_code_is_exact_too(monkeypatch):
    rng = np.random.default_rng(5)
    cost = rng.random((80, 5), np.float32)
    capacity = capacities(80, [1, 2, 3, 1, 1])
    ours = assign(cost, capacity, method="exact").objective
    monkeypatch.setattr(fixed, "native", None)
    assert assign(cost, capacity, method="exact").objective == pytest.approx(ours, rel=1e-6)
    rough = assign(cost, capacity, method="approximate")
    assert ours - 1e-4 <= rough.objective <= ours * 1.05


def test_the_gap_is_small_on_clustered_points():
    rng = np.random.default_rng(2)
    centres = rng.normal(size=(80, 16))
    points = centres[rng.integers(80, size=4000)] + 0.4 * rng.normal(size=(4000, 16))
    points /= np.linalg.norm(points, axis=1, keepdims=True)
    centres /= np.linalg.norm(centres, axis=1, keepdims=True)
    cost = (1 - points @ centres.T).astype(np.float32)
    rough = assign(cost, capacities(4000, [1.0] * 80), method="approximate")
    exact = assign(cost, capacities(4000, [1.0] * 80))
    assert exact.gap < 1e-5
    assert rough.gap < 0.05
    assert exact.objective <= rough.objective <= exact.objective * 1.05


def test_capacities_are_proportional():
    assert capacities(10, [1, 1, 1]).tolist() == [4, 3, 3]
    assert capacities(100, [3, 1]).tolist() == [75, 25]
    assert capacities(3, [1, 1, 1]).tolist() == [1, 1, 1]


@pytest.mark.parametrize(
    ("points", "weights", "message"),
    [(2, [1, 1, 1], "2 samples"), (5, [], "positive"), (5, [1, 0], "positive"),
     (5, [1, float("nan")], "positive")],
)  # fmt: skip
def test_impossible_capacities(points, weights, message):
    with pytest.raises(ValueError, match=message):
        capacities(points, weights)


@pytest.mark.parametrize(
    ("cost", "capacity", "message"),
    [
        (np.zeros((3, 2)), [1, 1], "sum to 2 for 3"),
        (np.zeros((3, 2)), [5, -2], "sum"),
        (np.zeros((3, 2)), [3], "does not fit"),
        (np.full((3, 2), np.nan), [2, 1], "not finite"),
        (np.full((3, 2), np.inf), [2, 1], "not finite"),
    ],
)
def test_bad_input(cost, capacity, message):
    with pytest.raises(ValueError, match=message):
        assign(cost.astype(np.float32), np.array(capacity, np.int64))


@pytest.mark.skipif(fixed.native is None, reason="eldr._native is not built")
def test_native_code_checks_for_itself():
    cost, out = np.zeros((3, 2), np.float32), np.empty(3, np.int32)
    prices = np.zeros(2)
    with pytest.raises(ValueError, match="sum to 2"):
        fixed.native.assign_exact(cost, np.array([1, 1]), prices, out)
    with pytest.raises(ValueError, match="not finite"):
        fixed.native.assign_exact((cost + np.nan).astype(np.float32), np.array([1, 2]), prices, out)
