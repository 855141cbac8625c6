"""The compiled pool against the plain-Python one, and both against the rules of a step."""

from __future__ import annotations

import numpy as np
import pytest

from eldr.routing.cost import StepCost
from eldr.simulation.pool import PoolConfig
from eldr.simulation.reference import ReferencePool, draw
from eldr.simulation.replay import Replay, bit_sets
from tests.simulation.helpers import drive, random_trace

native = pytest.importorskip("eldr.simulation.native", reason="eldr._native is not built")
NativePool = native.NativePool
COST = StepCost(base=3e-3, expert=5e-5, kv=1e-7, request=1e-5)
REPLAY = Replay.of(random_trace())


def owners(ranks, seed):
    """Contiguous blocks for even seeds, else two random placements for the three workers."""
    if seed % 2 == 0:
        return None
    return np.random.default_rng(seed).integers(ranks, size=(2, 3, 70)).astype(np.uint8)


@pytest.mark.parametrize("ranks", [1, 2, 5])
@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize(("batch", "kv"), [(256, 1 << 40), (3, 1 << 40), (256, 500), (1, 340)])
def test_discrete_times_equal_the_reference_bit_for_bit(ranks, seed, batch, kv):
    config = PoolConfig(
        COST, max_batch=batch, kv_tokens=kv, expert_ranks=ranks, seed=seed, track_use=True,
        owners=owners(ranks, seed),
    )  # fmt: skip
    fast, plain = NativePool(REPLAY, config), ReferencePool(REPLAY, config)
    done = drive(fast, 24, 3, 40, seed)
    assert done == drive(plain, 24, 3, 40, seed)
    assert sorted(c.request for c in done) == list(range(40))
    for w in range(3):
        a, b = fast.totals(w), plain.totals(w)
        assert (a.seconds, a.steps, a.tokens, a.kv, a.slowest) == (
            b.seconds, b.steps, b.tokens, b.kv, b.slowest,
        )  # fmt: skip
        np.testing.assert_array_equal(a.distinct, b.distinct)
        np.testing.assert_array_equal(a.use, b.use)
        assert a.running == a.waiting == a.reserved == 0


@pytest.mark.parametrize("ranks", [1, 3])
@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize(("batch", "kv"), [(256, 1 << 40), (3, 1 << 40), (256, 500)])
def test_expected_runs_of_steps_equal_single_steps(ranks, seed, batch, kv):
    config = PoolConfig(
        COST, max_batch=batch, kv_tokens=kv, expected=True, track_use=True, expert_ranks=ranks,
        owners=owners(ranks, seed),
    )  # fmt: skip
    fast, plain = NativePool(REPLAY, config), ReferencePool(REPLAY, config)
    done, slow = drive(fast, 24, 3, 40, seed), drive(plain, 24, 3, 40, seed)
    times = {c.request: c.time for c in slow}
    assert {c.request: c.worker for c in done} == {c.request: c.worker for c in slow}
    for c in done:
        assert c.time == pytest.approx(times[c.request], rel=1e-9)
    for w in range(3):
        a, b = fast.totals(w), plain.totals(w)
        assert (a.steps, a.tokens) == (b.steps, b.tokens)
        assert a.kv == pytest.approx(b.kv, rel=1e-12)
        assert a.slowest == pytest.approx(b.slowest, rel=1e-9)
        np.testing.assert_allclose(a.distinct, b.distinct, rtol=1e-9)
        np.testing.assert_allclose(a.use, b.use, rtol=1e-9)


def test_distinct_experts_are_counted_not_assumed():
    """Two identical requests read what one reads; the step says so."""
    config = PoolConfig(StepCost(base=0.0, expert=1.0))
    for copies in (1, 2, 5):
        pool = NativePool(REPLAY, config)
        pool.add_worker(0.0)
        for i in range(copies):
            pool.submit(0, i, 0, 3, 10, 0.0)
        done = pool.advance(float("inf"))
        assert {c.time for c in done} == {3.0 * 3 * 4}  # 3 steps x 3 layers x top-4


def test_draws_past_the_recorded_decode_depend_on_request_and_seed():
    assert draw(1, 2, 3) == draw(1, 2, 3)
    assert len({draw(s, r, t) for s in range(4) for r in range(4) for t in range(4)}) == 64


def test_a_newcomer_joins_at_the_next_step_and_a_step_waits_for_who_arrives_then():
    pool = NativePool(REPLAY, PoolConfig(StepCost(base=1.0, expert=0.0)))
    pool.add_worker(0.0)
    pool.submit(0, 0, 0, 4, 0, 0.0)
    assert pool.advance(2.5) == []
    pool.submit(0, 1, 1, 1, 0, 2.5)  # the step of [2, 3) runs; it joins that of [3, 4)
    assert [(c.time, c.request) for c in pool.advance(4.0)] == [(4.0, 0), (4.0, 1)]
    pool.submit(0, 2, 1, 1, 0, 6.0)
    assert pool.advance(6.0) == []  # a step at 6.0 has not begun: others may still arrive at 6.0
    pool.submit(0, 3, 1, 1, 0, 6.0)
    assert [(c.time, c.request) for c in pool.advance(7.0)] == [(7.0, 2), (7.0, 3)]


@pytest.mark.parametrize("make", [NativePool, ReferencePool])
def test_failing_takes_running_and_waiting_requests(make):
    pool = make(REPLAY, PoolConfig(StepCost(base=1.0, expert=0.0), max_batch=1))
    pool.add_worker(0.0)
    for i in range(3):
        pool.submit(0, i, 0, 5, 0, 0.0)
    pool.advance(0.5)
    assert pool.fail(0) == ([0], [1, 2])
    assert pool.advance(float("inf")) == []
    with pytest.raises(ValueError, match="failed"):
        pool.submit(0, 9, 0, 5, 0, float("inf"))


@pytest.mark.parametrize("make", [NativePool, ReferencePool])
def test_refusals(make):
    pool = make(REPLAY, PoolConfig(COST, kv_tokens=100))
    pool.add_worker(0.0)
    with pytest.raises(ValueError, match="101 tokens"):
        pool.submit(0, 0, 0, 51, 50, 0.0)
    pool.advance(1.0)
    with pytest.raises(ValueError, match="past"):
        pool.submit(0, 0, 0, 1, 1, 0.5)
    with pytest.raises(ValueError, match="back"):
        pool.advance(0.5)
    with pytest.raises(ValueError, match="positive"):
        PoolConfig(COST, max_batch=0)
    with pytest.raises(ValueError, match="expert_ranks"):
        PoolConfig(COST, expert_ranks=256)
    with pytest.raises(ValueError, match="71 ranks cannot share 70"):
        make(REPLAY, PoolConfig(COST, expert_ranks=71))


def test_native_refuses_arrays_that_do_not_fit():
    broken = Replay(REPLAY.geometry, REPLAY.bits[:5], REPLAY.first, REPLAY.length, REPLAY.logs)
    with pytest.raises(ValueError, match="outside the trace"):
        NativePool(broken, PoolConfig(COST))
    pool = NativePool(REPLAY, PoolConfig(COST))
    with pytest.raises(ValueError, match="worker"):
        pool.submit(0, 0, 0, 1, 1, 0.0)
    pool.add_worker(0.0)
    with pytest.raises(ValueError, match="row 24"):
        pool.submit(0, 0, 24, 1, 1, 0.0)


def test_bit_sets():
    topk = np.array([[[0, 63, 64, 69]]], np.uint8)
    words = bit_sets(topk, 70)
    assert words.tolist() == [[[1 | 1 << 63, 1 | 1 << 5]]]
