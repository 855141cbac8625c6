"""Cases that mutation testing asked for: ends of every allowed range, and documented defaults."""

from __future__ import annotations

import inspect
import math
import re
from pathlib import Path

import pytest

from eldr.routing import Fleet, Worker
from eldr.routing.activation import Shrinkage
from eldr.routing.cost import StepCost
from eldr.routing.policies.affinity import SessionAffinity
from eldr.routing.policies.balance import LeastRequests
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
