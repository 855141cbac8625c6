from dataclasses import dataclass

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from eldr.kernels import (
    CLOSED,
    LeastLoad,
    LocalityBand,
    MarginalCost,
    Rule,
    assign,
    assign_ref,
)
from eldr.kernels.assign import coefficients
from tests.kernels import oracles

NAMES = {LeastLoad: "least_load", LocalityBand: "locality_band", MarginalCost: "marginal_cost"}


def reference(scores, rule, load, cost, *, state=None, request_kv=None):
    chosen = torch.empty(scores.shape[0], dtype=torch.int32)
    assign_ref(scores, rule.code, coefficients(rule), cost, request_kv, load, state, chosen)
    return chosen


BACKENDS = {"served": assign, "reference": reference}


@dataclass(frozen=True, eq=False)
class Case:
    """Arguments of assign, as NumPy arrays."""

    scores: np.ndarray
    rule: Rule
    load: np.ndarray
    cost: np.ndarray
    state: np.ndarray | None
    request_kv: np.ndarray | None


@st.composite
def cases(draw) -> Case:
    """Few distinct values, so that ties are common; closed workers, NaN, infinities, full loads."""
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    requests = draw(st.integers(0, 12))
    workers = draw(st.sampled_from([1, 2, 3, 16, 33, 130]))
    grid = draw(st.sampled_from([3, 1000]))
    scores = (rng.integers(-grid, grid + 1, (requests, workers)) / grid).astype(np.float32)
    odd = rng.random(scores.shape)
    scores = np.where(odd < 0.03, np.float32(np.nan), scores)
    scores = np.where((odd > 0.03) & (odd < 0.05), np.float32(-np.inf), scores)
    scores = np.where((odd > 0.05) & (odd < 0.08), np.float32(-0.0), scores)
    load = rng.integers(0, 4, workers).astype(np.int32)
    load[rng.random(workers) < draw(st.sampled_from([0.0, 0.2, 1.0]))] = CLOSED
    load[rng.random(workers) < 0.02] = CLOSED - 2
    cost = rng.integers(0, 3, requests).astype(np.int32)
    rule = draw(st.sampled_from([
        LeastLoad(), LocalityBand(0.0), LocalityBand(0.3), LocalityBand(1e-7),
        MarginalCost(1.0, 0.0, 0.0, 0.0), MarginalCost(1e-6, 3e-10, 1e-5, 1.0),
        MarginalCost(0.3, 0.7, 0.1, 2.0), MarginalCost(3e38, 1.0, 1.0, 3e38),
    ]))  # fmt: skip
    if not isinstance(rule, MarginalCost):
        return Case(scores, rule, load, cost, None, None)
    state = (rng.integers(0, 50, (2, workers)) * [[1], [100]]).astype(np.float32)
    kv = rng.integers(1, 5000, requests).astype(np.float32)
    return Case(scores, rule, load, cost, state, kv)


def tensor(array: np.ndarray | None) -> torch.Tensor | None:
    return None if array is None else torch.from_numpy(array.copy())


@pytest.mark.parametrize("backend", BACKENDS)
@settings(max_examples=200, deadline=None, derandomize=True)
@given(case=cases())
def test_equals_numpy_choice_by_choice(backend, case):
    load, state = tensor(case.load), tensor(case.state)
    chosen = BACKENDS[backend](
        tensor(case.scores), case.rule, load, tensor(case.cost), state=state,
        request_kv=tensor(case.request_kv),
    )  # fmt: skip
    want = oracles.assign(
        case.scores, NAMES[type(case.rule)], coefficients(case.rule), case.load, case.cost,
        case.state, case.request_kv,
    )  # fmt: skip
    np.testing.assert_array_equal(chosen.numpy(), want[0])
    np.testing.assert_array_equal(load.numpy(), want[1])
    if state is not None:
        np.testing.assert_array_equal(state.numpy(), want[2])


def test_loads_of_one_step_spread_over_the_band():
    scores = torch.tensor([[0.9, 0.89, 0.5]]).expand(6, 3).contiguous()
    load = torch.zeros(3, dtype=torch.int32)
    ones = torch.ones(6, dtype=torch.int32)
    assert assign(scores, LocalityBand(0.05), load, ones).tolist() == [0, 1, 0, 1, 0, 1]
    assert load.tolist() == [3, 3, 0]


def test_all_closed_assigns_nobody():
    load = torch.full((3,), CLOSED, dtype=torch.int32)
    chosen = assign(torch.zeros(2, 3), LeastLoad(), load, torch.ones(2, dtype=torch.int32))
    assert chosen.tolist() == [-1, -1]
    assert load.tolist() == [CLOSED] * 3


def arguments(rule: Rule = LeastLoad()) -> dict[str, object]:  # noqa: B008 - a frozen value
    call = {
        "scores": torch.zeros(2, 3),
        "rule": rule,
        "load": torch.zeros(3, dtype=torch.int32),
        "cost": torch.ones(2, dtype=torch.int32),
    }
    if isinstance(rule, MarginalCost):
        call |= {"state": torch.zeros(2, 3), "request_kv": torch.ones(2)}
    return call


COST = MarginalCost(1.0, 1.0, 1.0, 1.0)
BAD = [
    (LeastLoad(), {"scores": torch.zeros(2, 3).double()}, TypeError, r"scores: .*got float64"),
    (LeastLoad(), {"scores": torch.zeros(2, 0)}, ValueError, "scores: no worker"),
    (LeastLoad(), {"load": torch.zeros(3)}, TypeError, "load: expected int32, got float32"),
    (LeastLoad(), {"load": torch.zeros(2).int()}, ValueError, r"load: expected shape \[3\]"),
    (LeastLoad(), {"load": -torch.ones(3).int()}, ValueError, "load: -1 at position 0"),
    (LeastLoad(), {"cost": -torch.ones(2).int()}, ValueError, "cost: -1 at position 0"),
    (LeastLoad(), {"state": torch.zeros(2, 3)}, ValueError, r"state: .*meaningless"),
    (LeastLoad(), {"rule": "least"}, TypeError, r"rule: expected LeastLoad, .*got str"),
    (LeastLoad(), {"cost": torch.ones(3).int()}, ValueError, r"cost: expected shape \[2\]"),
    (
        LeastLoad(),
        {"load": torch.zeros(3).int().to("meta")},
        ValueError,
        "load: on meta, but scores",
    ),
    (
        LeastLoad(),
        {"cost": torch.ones(2).int().to("meta")},
        ValueError,
        "cost: on meta, but scores",
    ),
    (COST, {"request_kv": torch.ones(2).double()}, TypeError, "request_kv: expected float32, got"),
    (COST, {"state": None}, ValueError, r"state: needed with"),
    (COST, {"request_kv": None}, ValueError, r"request_kv: needed with"),
    (COST, {"state": torch.zeros(3, 2)}, ValueError, r"state: expected shape \[2, 3\]"),
    (COST, {"chosen": torch.zeros(2)}, TypeError, "chosen: expected int32"),
]


@pytest.mark.parametrize(("rule", "change", "error", "message"), BAD)
def test_bad_arguments_are_named(rule, change, error, message):
    with pytest.raises(error, match=message):
        assign(**arguments(rule) | change)


@pytest.mark.parametrize("value", [-0.1, float("nan"), float("inf"), 1e39, "0.1", True])
def test_bad_coefficients_are_refused(value):
    with pytest.raises(ValueError, match="is not a finite number >= 0"):
        LocalityBand(value)
    with pytest.raises(ValueError, match="is not a finite number >= 0"):
        MarginalCost(1.0, 1.0, 1.0, value)


@pytest.mark.parametrize("rule", [LeastLoad(), LocalityBand(0.1), COST])
def test_opcheck(rule):
    a = arguments(rule)
    call = (
        a["scores"], rule.code, coefficients(rule), a["cost"], a.get("request_kv"), a["load"],
        a.get("state"), torch.empty(2, dtype=torch.int32),
    )  # fmt: skip
    torch.library.opcheck(torch.ops.eldr.assign.default, call)
