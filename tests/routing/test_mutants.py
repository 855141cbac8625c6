"""Cases that mutation testing asked for: ends of every allowed range, and documented defaults."""

from __future__ import annotations

import inspect
import math
import re
from pathlib import Path

import numpy as np
import pytest

from eldr.routing import Fleet, RouteRequest, Worker, price
from eldr.routing.activation import Shrinkage
from eldr.routing.cost import StepCost
from eldr.routing.policies.affinity import SessionAffinity
from eldr.routing.policies.balance import LeastRequests, PowerOfTwo
from eldr.routing.policies.locality import LocalityBand
from eldr.routing.policies.marginal import MarginalCost

PAGE = Path(__file__).resolve().parents[2] / "docs/policies.md"


def fleet(**options):
    return Fleet(LeastRequests(), **options)


@pytest.mark.parametrize(
    ("make", "name", "ends", "outside"),
    [
        (MarginalCost, "hedge", (0.0, 5.0), (-1e-9, math.inf, math.nan)),
        (MarginalCost, "power", (1, 8), (0, 9, 2.5)),
        (MarginalCost, "guard", (0.0, math.inf), (-1e-9, math.nan)),
        (LocalityBand, "tau", (0.0, 1.0), (-1e-9, 1 + 1e-9, math.nan)),
        (SessionAffinity, "bound", (1.0, 9.0), (1 - 1e-9, math.nan)),
        (fleet, "min_coverage", (0.0, 1.0), (-1e-9, 1 + 1e-9, math.nan)),
        (fleet, "trust", (0.0, 1.0), (-1e-9, 1 + 1e-9, math.nan)),
        (Shrinkage, "k", (0.0, 1e6), (-1e-9, math.inf, math.nan)),
        (Shrinkage, "limit", (1e-9, 1.0), (0.0, 1 + 1e-9, math.nan)),
    ],
)
def test_ends_of_ranges(make, name, ends, outside) -> None:
    for value in ends:
        assert getattr(made := make(**{name: value}), name) == value, made
    for value in outside:
        with pytest.raises(ValueError, match=name):
            make(**{name: value})


def test_ends_of_a_step_cost_and_of_a_worker() -> None:
    assert StepCost(0.0, 0.0).base == 0.0
    for value in (-1e-12, math.inf, math.nan):
        with pytest.raises(ValueError, match="base must be finite and >= 0"):
            StepCost(value, 1e-6)
    assert Worker("w", rank=0, weight=1e-9).rank == 0
    for changed, said in (
        ({"name": ""}, "the name is empty"),
        ({"rank": -1}, "rank must be >= 0"),
        ({"weight": 0.0}, "weight must be > 0"),
        ({"weight": math.inf}, "weight must be > 0"),
    ):
        with pytest.raises(ValueError, match=said):
            Worker(**{"name": "w", **changed})


def test_defaults_are_those_of_the_page() -> None:
    """docs/policies.md: `hedge` 1, `power` 3, `guard` 0.25."""
    said = re.search(r"Defaults: ((?:`\w+` [\d.]+(?:, )?)+)", PAGE.read_text(encoding="utf-8"))
    assert said
    page = {name: float(value) for name, value in re.findall(r"`(\w+)` ([\d.]+\d|\d)", said[1])}
    code = inspect.signature(MarginalCost).parameters
    assert page
    for name, value in page.items():
        assert code[name].default == value, name


def test_other_defaults() -> None:
    assert LocalityBand().tau == 0.1
    assert SessionAffinity().bound == 1.25
    assert (fleet().min_coverage, fleet().trust) == (0.5, 0.0)


def test_the_cost_is_the_formula_of_its_docstring() -> None:
    """NumPy's form of it, for three workers, against the equations written out term by term."""
    cost = StepCost(0.002, 3e-6, kv=5e-9, request=7e-6)
    cells, tokens, hedge, power = 40, 900.0, 1.5, 3
    distinct, added = np.array([12.0, 3.0, 30.0]), np.array([4.0, 9.0, 0.5])
    requests, others = np.array([2, 0, 7]), np.array([0.5, 0.0, 2.0])
    kv, weight = np.array([3000, 0, 90000]), np.array([1.0, 2.0, 0.5])
    found = price.increase(
        price.terms(cost, cells, tokens, hedge),
        power,
        added / price.DOT_UNIT,
        (cells - distinct) / price.IDLE_UNIT,
        *(requests, others, kv, weight),
    )
    n = requests + others
    step = (cost.base + cost.expert * distinct + cost.kv * kv + cost.request * n) / weight
    more = (cost.expert * added + cost.request + cost.kv * tokens) / weight
    wanted = (1 + hedge * n) * (step + more) ** power - hedge * n * step**power
    np.testing.assert_allclose(found, wanted, rtol=1e-9)


def test_power_of_two_takes_the_first_draw_on_a_tie() -> None:
    """Whatever the draw, with equal loads; and every worker is drawn by some."""
    for seed in range(3):
        tied = Fleet(PowerOfTwo(), [Worker(n) for n in "abc"], seed=seed)
        chosen = set()
        for i in range(30):
            decision = tied.reserve(RouteRequest(str(i)))
            pair = decision.explain()["band"]
            load = decision.explain()["load"]
            least = pair[0] if load[pair[0]] <= load[pair[1]] else pair[1]
            assert decision.worker.name == least
            chosen.add(decision.worker.name)
            tied.release(str(i))
        assert chosen == {"a", "b", "c"}


def test_half_of_the_weight_at_k_tokens() -> None:
    assert Shrinkage().k == 8.0
    assert Shrinkage(k=8.0, limit=0.6).weight(8.0) == pytest.approx(0.3)


def test_power_of_two_with_one_worker() -> None:
    decision = Fleet(PowerOfTwo(), [Worker("only")]).reserve(RouteRequest("1"))
    assert (decision.worker.name, decision.branch) == ("only", "single")
