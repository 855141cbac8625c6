"""Whole runs: exact against plain Python, conserved, eventful, and honest about bad input."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest

from eldr.routing.cost import StepCost
from eldr.routing.fleet import Fleet
from eldr.routing.policies import make_policy
from eldr.simulation import run as run_module
from eldr.simulation.events import FleetEvent, Kind, check_events, load_events
from eldr.simulation.pool import PoolConfig
from eldr.simulation.prefill import PrefillConfig, first_tokens
from eldr.simulation.reference import ReferencePool
from eldr.simulation.replay import Replay
from eldr.simulation.run import DONE, FAILED, REJECTED, ConservationError, Run, RunConfig
from eldr.simulation.traffic import draw
from eldr.simulation.variants import signatures
from eldr.workload.arrivals import Arrivals, poisson
from tests.simulation.helpers import random_trace

TRACE = random_trace(tokens=(20, 60))
REPLAY = Replay.of(TRACE)
SIGNATURES = signatures(TRACE)
COST = StepCost(base=2e-3, expert=5e-5, kv=1e-8, request=1e-5)
PREFILL = PrefillConfig(workers=2, fixed=1e-3, token=2e-6, transfer_fixed=1e-3, transfer_token=1e-7)


def execute(
    policy="least_requests", requests=120, workers=3, rate=60.0, seed=0, mix="same", **changes
):
    made = poisson(rate, requests, seed)
    arrivals = Arrivals(made.times, made.input_tokens, np.minimum(made.output_tokens // 12, 60) + 1)
    arrivals.output_tokens[::10] = 1
    traffic = draw(TRACE, np.arange(len(TRACE)), mix, arrivals, seed)
    settings = {"pool": PoolConfig(COST, seed=seed), "prefill": PREFILL, "seed": seed, **changes}
    config = RunConfig(workers, **settings)

    def factory(_names: Sequence[str]):
        return make_policy(policy)

    return Run(TRACE, REPLAY, SIGNATURES, traffic, config, factory).execute()


@pytest.mark.parametrize("policy", ["random", "power_of_two", "marginal_cost"])
@pytest.mark.parametrize(("mix", "seed"), [("same", 0), ("even", 1), ("skewed", 2), ("drift", 3)])
def test_a_run_equals_the_one_in_plain_python(monkeypatch, policy, mix, seed):
    """Every time, worker and count, with workers that join, leave and fail on the way."""
    events = (
        FleetEvent(0.4, Kind.JOIN, "late"),
        FleetEvent(0.7, Kind.LEAVE, "w1"),
        FleetEvent(0.9, Kind.FAIL, "w0"),
    )
    ranks = 1 + seed % 2
    pool = PoolConfig(COST, max_batch=6, kv_tokens=9000, seed=seed, expert_ranks=ranks)
    fast = execute(policy, mix=mix, seed=seed, events=events, pool=pool)
    monkeypatch.setattr(run_module, "make_pool", ReferencePool)
    plain = execute(policy, mix=mix, seed=seed, events=events, pool=pool)
    np.testing.assert_array_equal(fast.end, plain.end)
    np.testing.assert_array_equal(fast.worker, plain.worker)
    np.testing.assert_array_equal(fast.status, plain.status)
    for a, b in zip(fast.totals, plain.totals, strict=True):
        assert (a.seconds, a.steps, a.tokens, a.slowest) == (
            b.seconds,
            b.steps,
            b.tokens,
            b.slowest,
        )
        np.testing.assert_array_equal(a.distinct, b.distinct)


class Broken(ReferencePool):
    """A pool that breaks one law, named by `fault`."""

    fault = ""

    def advance(self, until):
        done = super().advance(until)
        if done and self.fault == "lost":
            done.pop()
        if done and self.fault == "twice":
            done.append(done[-1])
        if done and self.fault == "elsewhere":
            done[0] = done[0]._replace(worker=(done[0].worker + 1) % 3)
        if done and self.fault == "early":
            done[0] = done[0]._replace(time=-1.0)
        if done and self.fault == "late":
            done[-1] = done[-1]._replace(time=done[-1].time + 1e6)
        return done

    def totals(self, worker):
        found = super().totals(worker)
        if self.fault == "load":
            found.reserved = 1
        if self.fault == "tokens":
            found.tokens -= 1
        return found


@pytest.mark.parametrize(
    ("fault", "message"),
    [
        ("lost", "never ended"),
        ("twice", "ended twice"),
        ("elsewhere", "another worker"),
        ("early", "between"),
        ("late", "between"),
        ("load", "in the pool"),
        ("tokens", "tokens made"),
    ],
)
def test_every_run_checks_that_nothing_is_lost_doubled_or_out_of_time(monkeypatch, fault, message):
    monkeypatch.setattr(Broken, "fault", fault)
    monkeypatch.setattr(run_module, "make_pool", Broken)
    with pytest.raises(ConservationError, match=message):
        # Beyond the last arrival time has no end, so only what still arrives can come late.
        execute(requests=60, rate=20.0)


def test_a_reservation_left_behind_is_found(monkeypatch):
    monkeypatch.setattr(Fleet, "release", lambda self, request: True)
    with pytest.raises(ConservationError, match="reserved"):
        execute(requests=20)


def test_every_request_ends_once_and_equal_seeds_give_equal_runs():
    a, b = execute(seed=5), execute(seed=5)
    assert (a.status == DONE).all()
    np.testing.assert_array_equal(a.end, b.end)
    assert (execute(seed=6).end != a.end).any()
    steps = a.traffic.arrivals.output_tokens - 1
    assert sum(t.tokens for t in a.totals) == steps.sum()
    single = steps == 0
    assert single.any()
    assert (a.worker[single] == -1).all()  # one token: prefill made it, decode never saw it
    assert np.isnan(a.tpot[single]).all()
    assert (a.tpot[~single] >= COST.base).all()


def test_first_tokens_queue_for_the_prefill_workers():
    arrivals = Arrivals(np.array([0.0, 0.0, 0.0]), np.array([10, 20, 30]), np.array([1, 1, 1]))
    config = PrefillConfig(workers=2, fixed=1.0, token=0.1)
    assert first_tokens(arrivals, config).tolist() == [2.0, 3.0, 6.0]
    cached = PrefillConfig(workers=2, fixed=1.0, token=0.1, cached=0.95)
    assert first_tokens(arrivals, cached)[:2] == pytest.approx([1.1, 1.1])
    assert first_tokens(arrivals, PrefillConfig()).tolist() == [0.0, 0.0, 0.0]


def test_joining_leaving_and_failing_workers():
    events = (
        FleetEvent(0.5, Kind.JOIN, "late"),
        FleetEvent(0.6, Kind.LEAVE, "w1"),
        FleetEvent(1.0, Kind.FAIL, "w0"),
    )
    pool = PoolConfig(COST, max_batch=4)
    outcome = execute("marginal_cost", pool=pool, events=events)
    assert set(np.unique(outcome.status)) == {DONE, FAILED}
    assert 1 <= (outcome.status == FAILED).sum() <= 4  # what ran in w0's batch
    late = outcome.worker == 3
    assert late.any()
    assert (outcome.first_token[late] >= 0.5).all()
    on = {w: outcome.first_token[outcome.worker == w].max() for w in (0, 1, 2)}
    assert on[1] < 0.6
    assert on[0] < 1.0 < on[2]
    moved = (outcome.first_token < 1.0) & (outcome.end > 1.0) & (outcome.worker == 3)
    assert moved.any()  # requests that waited for w0 found another worker


def test_no_worker_left_rejects():
    events = (FleetEvent(0.5, Kind.LEAVE, "w0"),)
    outcome = execute(workers=1, events=events)
    after = (outcome.first_token > 0.5) & (outcome.traffic.arrivals.output_tokens > 1)
    assert (outcome.status[after] == REJECTED).all()
    assert (outcome.status[~after] == DONE).all()


def test_a_request_that_never_fits_is_rejected_and_the_rest_is_served():
    outcome = execute(pool=PoolConfig(COST, kv_tokens=1500))
    arrivals = outcome.traffic.arrivals
    large = arrivals.input_tokens + arrivals.output_tokens - 1 > 1500
    assert large.any()
    np.testing.assert_array_equal(outcome.status == REJECTED, large & (arrivals.output_tokens > 1))


def test_beyond_capacity_it_ends_all_the_same():
    outcome = execute(rate=1e5, pool=PoolConfig(COST, max_batch=2))
    assert (outcome.status == DONE).all()
    assert np.nanmax(outcome.tpot) > 10 * COST.base


@pytest.mark.parametrize("shared", [False, True])
def test_several_routers(shared):
    outcome = execute("marginal_cost", workers=6, routers=3, shared=shared)
    assert (outcome.status == DONE).all()
    placed = outcome.worker >= 0
    i = np.flatnonzero(placed)
    split = outcome.worker[placed] % 3 == i % 3
    assert split.all() != shared  # its own share of the workers, or any worker


def test_routers_hear_from_their_workers(monkeypatch):
    seen = []

    def observe(self, name, sample, use):
        seen.append((name, sample))
        assert use is not None
        assert use.shape == (TRACE.geometry.cells,)

    monkeypatch.setattr(Fleet, "observe", observe)
    arrivals = poisson(60.0, 50, 0).clip(2, 20)
    traffic = draw(TRACE, np.arange(len(TRACE)), "same", arrivals, 0)
    config = RunConfig(2, PoolConfig(COST, track_use=True), telemetry=0.1)
    run = Run(TRACE, REPLAY, SIGNATURES, traffic, config, lambda _names: make_policy("random"))
    outcome = run.execute()
    for w in range(2):
        steps = sum(sample.steps for name, sample in seen if name == f"w{w}")
        assert 0 < steps <= outcome.totals[w].steps  # all but what came after the last reading


def test_online_fits_find_the_step_cost():
    told = execute("marginal_cost", requests=400, rate=80.0)
    learned = execute("marginal_cost", requests=400, rate=80.0, telemetry=0.2, trust=0.3,
                      pool=PoolConfig(COST, track_use=True))  # fmt: skip
    assert np.nanmedian(learned.tpot) == pytest.approx(np.nanmedian(told.tpot), rel=0.1)


def test_event_files(tmp_path):
    path = tmp_path / "events.jsonl"
    path.write_text(
        '{"time": 2, "event": "fail", "worker": "w0"}\n\n'
        '{"time": 1.5, "event": "join", "worker": "x"}\n'
    )
    assert load_events(path, 2)[1] == FleetEvent(1.5, Kind.JOIN, "x")
    for line, message in [
        ("{", "line 1"),
        ('{"time": 1, "event": "leave"}', "keys"),
        ('{"time": -1, "event": "leave", "worker": "w0"}', "time"),
        ('{"time": true, "event": "leave", "worker": "w0"}', "time"),
        ('{"time": 1, "event": "dance", "worker": "w0"}', "dance"),
        ('{"time": 1, "event": "leave", "worker": "w7"}', "'w7' is not there"),
        ('{"time": 1, "event": "join", "worker": "w0"}', "used already"),
        ('{"time": 1, "event": "join", "worker": ""}', "empty"),
    ]:
        path.write_text(line)
        with pytest.raises(ValueError, match=message):
            load_events(path, 2)
    gone = [FleetEvent(1, Kind.FAIL, "w0"), FleetEvent(2, Kind.LEAVE, "w0")]
    with pytest.raises(ValueError, match="not there"):
        check_events(gone, 1)


def test_bad_configurations():
    with pytest.raises(ValueError, match="routers"):
        RunConfig(2, PoolConfig(COST), routers=3)
    with pytest.raises(ValueError, match="telemetry"):
        RunConfig(2, PoolConfig(COST), telemetry=float("nan"))
    with pytest.raises(ValueError, match="cached"):
        PrefillConfig(cached=1.0)
    with pytest.raises(ValueError, match="token"):
        PrefillConfig(token=-1.0)
    with pytest.raises(ValueError, match="workers"):
        PrefillConfig(workers=0)
