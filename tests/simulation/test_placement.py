"""The slowest rank by brute force, and placements that level the ranks."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from eldr.geometry import Geometry
from eldr.routing.cost import StepCost
from eldr.simulation import placement
from eldr.simulation.native import NativePool
from eldr.simulation.pool import PoolConfig
from eldr.simulation.reference import ReferencePool
from eldr.simulation.replay import Replay
from tests.simulation.helpers import random_trace


@pytest.mark.parametrize("ranks", [1, 2, 3, 8])
def test_the_expected_slowest_rank_is_the_mean_over_all_outcomes(ranks):
    rng = np.random.default_rng(ranks)
    chance = rng.random((2, 8))
    chance[0, :3] = 0.0, 1.0, 1e-9
    owner = rng.integers(ranks, size=(2, 8)).astype(np.uint8)
    brute = 0.0
    for layer in range(2):
        for outcome in itertools.product((0, 1), repeat=8):
            read = np.array(outcome)
            weight = np.prod(np.where(read, chance[layer], 1 - chance[layer]))
            brute += weight * np.bincount(owner[layer], read, ranks).max()
    assert placement.expected_slowest(chance, owner, ranks) == pytest.approx(brute, rel=1e-12)
    sure = (chance > 0.5).astype(float)  # certain reads: counting and expecting are the same
    counted = placement.counted_slowest(sure, owner, ranks)
    assert placement.expected_slowest(sure, owner, ranks) == pytest.approx(counted)


@pytest.mark.parametrize("make", [NativePool, ReferencePool])
def test_a_step_lasts_as_long_as_its_slowest_rank(make):
    """One request, top-4 of each of 3 layers: all on one rank, or one expert on each of four."""
    trace = random_trace(k=4)
    replay = Replay.of(trace)
    topk = trace.topk[trace.cuts[0]]
    together = np.zeros((1, 3, 70), np.uint8)
    apart = together.copy()
    for layer in range(3):
        apart[0, layer, topk[layer]] = range(4)
    for owners, seconds in ((together, 12.0), (apart, 3.0)):
        pool = make(replay, PoolConfig(StepCost(0.0, 1.0), expert_ranks=4, owners=owners))
        pool.add_worker(0.0)
        pool.submit(0, 0, 0, 1, 0, 0.0)
        assert [c.time for c in pool.advance(float("inf"))] == [seconds]
        assert pool.totals(0).distinct.sum() == 12.0


@pytest.mark.parametrize("make", [NativePool, ReferencePool])
def test_workers_take_placements_in_turn(make):
    replay = Replay.of(random_trace(k=4))
    owners = np.zeros((2, 3, 70), np.uint8)
    owners[1] = np.arange(70) % 70  # every expert on a rank of its own
    pool = make(replay, PoolConfig(StepCost(0.0, 1.0), expert_ranks=70, owners=owners))
    for worker in range(4):
        pool.add_worker(0.0)
        pool.submit(worker, worker, 0, 1, 0, 0.0)
    times = {c.worker: c.time for c in pool.advance(float("inf"))}
    assert times == {0: 12.0, 1: 3.0, 2: 12.0, 3: 3.0}


def test_strategies_share_out_the_experts():
    geometry = Geometry(2, 10, 2)
    assert placement.linear(geometry, 4)[0, 1].tolist() == [0, 0, 0, 1, 1, 2, 2, 2, 3, 3]
    assert placement.round_robin(geometry, 4)[0, 0].tolist() == [0, 1, 2, 3, 0, 1, 2, 3, 0, 1]


def test_spread_levels_the_ranks_and_fills_them_evenly():
    rng = np.random.default_rng(0)
    reads = rng.random((3, 4, 64)) ** 3
    owners = placement.spread(reads, 4)
    geometry = Geometry(4, 64, 4)
    placement.check(owners, geometry, 4)
    for p in range(3):
        linear = placement.linear(geometry, 4)[0]
        level = placement.expected_slowest(reads[p], owners[p], 4)
        assert level < placement.expected_slowest(reads[p], linear, 4)
        for layer in range(4):
            assert np.bincount(owners[p, layer]).tolist() == [16] * 4
            sums = np.bincount(owners[p, layer], reads[p, layer])
            assert np.ptp(sums) < 0.05 * sums.mean()


def test_placements_that_do_not_fit_are_refused():
    geometry = Geometry(2, 10, 2)
    good = placement.linear(geometry, 3)
    for bad in (good.astype(np.int64), good[0], good[:, :1], good[:0], good + np.uint8(1)):
        with pytest.raises(ValueError, match="placement"):
            placement.check(bad, geometry, 3)
