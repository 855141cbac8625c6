"""Expected-value mode against discrete mode, on real routing of a trained model."""

from __future__ import annotations

import numpy as np
import pytest

from eldr.simulation.cells import ArrivalSpec, Case, Cell
from eldr.simulation.cost import study_cost
from eldr.simulation.traffic import Mix
from eldr.workload.tiny import TRACE_PATH
from eldr.workload.traces import load


@pytest.mark.parametrize("mix", [Mix.SAME, Mix.DRIFT])
@pytest.mark.parametrize("policy", ["least_requests", "marginal_cost", "locality_band:tau=0.1"])
def test_expected_value_mode_agrees_with_discrete_mode(policy, mix):
    cost = study_cost(load(TRACE_PATH).geometry)
    quantiles = []
    for expected in (False, True):
        cell = Cell(
            str(TRACE_PATH), mix, 8, cost, 3000, batch=24.0, expected=expected,
            arrivals=ArrivalSpec(clip=(16, 400)),
        )  # fmt: skip
        tpot = Case(cell, 0).run(policy).tpot
        quantiles.append(np.percentile(tpot[300:2700], [50, 99]))
    discrete, value = quantiles
    assert value[0] == pytest.approx(discrete[0], rel=0.02)
    assert value[1] == pytest.approx(discrete[1], rel=0.04)
