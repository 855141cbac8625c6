"""Expected-value mode against discrete mode, on real routing of a trained model."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from eldr.simulation.cells import ArrivalSpec, Case, Cell
from eldr.simulation.cost import study_cost
from eldr.simulation.traffic import Mix
from eldr.workload.tiny import TRACE_PATH
from eldr.workload.traces import load

P50, P99 = 0.02, 0.04  # what the modes may differ by
POLICIES = ("least_requests", "marginal_cost", "locality_band:tau=0.1")


def quantiles(policy, mix, seed, **changes):
    """[2, 2]: P50 and P99 of TPOT, counted and expected."""
    cost = study_cost(load(TRACE_PATH).geometry)
    cost = replace(cost, expert=cost.expert * changes.get("expert_ranks", 1))
    found = []
    for expected in (False, True):
        cell = Cell(
            str(TRACE_PATH), mix, 8, cost, 3000, batch=24.0, expected=expected,
            arrivals=ArrivalSpec(clip=(16, 400)), **changes,
        )  # fmt: skip
        tpot = Case(cell, seed).run(policy).tpot
        found.append(np.percentile(tpot[300:2700], [50, 99]))
    return np.array(found)


def assert_agree(found):
    (discrete, value) = found
    assert value[0] == pytest.approx(discrete[0], rel=P50)
    assert value[1] == pytest.approx(discrete[1], rel=P99)


@pytest.mark.parametrize("seed", [0, 1])
@pytest.mark.parametrize("mix", list(Mix))
@pytest.mark.parametrize("policy", POLICIES)
def test_expected_value_mode_agrees_with_discrete_mode(policy, mix, seed):
    assert_agree(quantiles(policy, mix, seed))


@pytest.mark.parametrize("placement", ["linear", "spread", "clusters"])
@pytest.mark.parametrize("policy", POLICIES)
def test_so_it_does_where_the_slowest_of_four_ranks_counts(policy, placement):
    found = quantiles(policy, Mix.SAME, 0, expert_ranks=4, placement=placement)
    assert_agree(found)
