"""What `benchmarks.cpu_tpot` makes of measured steps; the engine itself is the benchmark's."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from benchmarks import cpu_tpot
from benchmarks.cpu_tpot_engine import Batch, Measured
from eldr.routing.cost import StepCost
from eldr.simulation import calibration
from eldr.workload.tiny import GEOMETRY, TRACE_PATH
from eldr.workload.traces import load

COST = StepCost(base=6e-3, expert=0.25e-3, request=0.4e-3)
SHARE = {
    "least_requests": 36.0,
    "locality_band:tau=0.1": 25.0,
    "marginal_cost": 29.0,
    "marginal_cost:power=1": 28.0,
}


def measured(batches, noise, seed=0):
    """Rows of a machine with the cost above and some noise; wall time is twice as long."""
    rng = np.random.default_rng(seed)
    rows = []
    for batch in batches:
        row = Measured(batch)
        experts = SHARE.get(batch.policy, 2.0 + 1.1 * len(batch.rows))
        for _ in range(16):
            distinct = experts + rng.normal(0, 1)
            seconds = COST.seconds(4 * distinct, 0, len(batch.rows)) * rng.normal(1, noise)
            row.cpu.append(1e3 * seconds)
            row.wall.append(2e3 * seconds)
            row.distinct.append(distinct)
        rows.append(row)
    return rows


@pytest.fixture(scope="module")
def work():
    trace = load(TRACE_PATH)
    made, simulated = cpu_tpot.schedule(COST, 4, 12.0, 3, 0)
    return made, simulated, cpu_tpot.sweep(trace, 5)


def test_the_schedule_holds_every_policys_batches_at_the_same_moments(work):
    made, simulated, _ = work
    assert {b.policy for b in made} == set(cpu_tpot.POLICIES) == set(simulated)
    for policy in cpu_tpot.POLICIES:
        mine = [b for b in made if b.policy == policy]
        assert {b.moment for b in mine} == {0, 1, 2}
        assert 5 < np.mean([len(b.rows) for b in mine]) < 20
    assert len(set(made)) == len(made)


def test_a_workers_policies_stay_side_by_side_and_rounds_differ(work):
    made, _, extra = work
    first, second = (cpu_tpot.interleaved(made, extra, seed) for seed in (0, 1))
    assert sorted(map(hash, first)) == sorted(map(hash, second)) != []
    assert first != second
    turns = [(b.moment, b.worker) for b in first if b.policy != cpu_tpot.SWEEP]
    changes = sum(a != b for a, b in itertools.pairwise(turns))
    assert changes == len(set(turns)) - 1
    at = [i for i, b in enumerate(first) if b.policy == cpu_tpot.SWEEP]
    assert max(np.diff(at)) <= len(made) // len(extra) + 2  # the sweep is spread over all of it


def test_calibration_and_fit_find_the_machines_cost(work):
    made, _, extra = work
    rows = measured([*made, *extra], 0.02)
    found = calibration.fit([r.sample("cpu", GEOMETRY.layers) for r in rows])
    assert found.r2 > 0.95
    assert found.cost.expert == pytest.approx(COST.expert, rel=0.1)
    both = cpu_tpot.fit(rows, "cpu")["distinct_and_batch"]
    assert both["r2"] > 0.95
    assert both["ms"]["expert"] == pytest.approx(1e3 * 4 * COST.expert, rel=0.1)
    assert cpu_tpot.fit(rows, "wall")["distinct"]["r2"] > 0.9


def test_ratios_are_against_least_requests_and_noise_widens_the_interval(work):
    made, _, extra = work
    found = {n: cpu_tpot.ratios(measured([*made, *extra], n), "cpu") for n in (0.01, 0.2)}
    band = found[0.01]["locality_band:tau=0.1"]
    assert band["ratio"] == pytest.approx(band["fitted_ratio"], rel=0.02)
    assert band["ratio"] < found[0.01]["marginal_cost"]["ratio"] < 1.0
    assert found[0.01]["least_requests"]["interval"] == [1.0, 1.0]
    low, high = band["interval"]
    assert low <= band["ratio"] <= high
    noisy = found[0.2]["locality_band:tau=0.1"]["interval"]
    assert noisy[1] - noisy[0] > high - low


def test_the_verdict_asks_for_both_bars(work):
    made, _, extra = work
    rows = measured([*made, *extra], 0.02)
    found = {
        "clock": "cpu",
        "fit": {"cpu": cpu_tpot.fits(rows, "cpu")},
        "policies": {"cpu": cpu_tpot.ratios(rows, "cpu")},
    }
    verdict = cpu_tpot.verdict(found)
    assert verdict["best"] == "locality_band:tau=0.1"
    assert verdict["bars_met"]
    assert set(verdict["r2_distinct"]) == {"all", "sweep"}
    found["fit"]["cpu"]["all"]["distinct_and_batch"]["r2"] = 0.89
    assert not cpu_tpot.verdict(found)["bars_met"]


def test_waiting_is_wall_time_without_processor_time():
    batch = Batch(0, 0, "least_requests", (1,))
    assert cpu_tpot.waited([Measured(batch, wall=[4.0], cpu=[3.0])]) == pytest.approx(0.25)
    assert cpu_tpot.waited([Measured(batch, wall=[3.0], cpu=[3.1])]) == 0.0
