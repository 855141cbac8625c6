"""Native code and NumPy side by side on any input: same bits, same choice."""

from __future__ import annotations

import types

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from eldr.routing import StepCost, Worker, fixed, price
from eldr.routing.decision import Context
from eldr.routing.expert_load import ExpertLoad
from eldr.routing.policies.base import least_requests, lightest_within
from eldr.routing.worker import WorkerTable
from tests.routing.helpers import admitted, request

needs_native = pytest.mark.skipif(fixed.native is None, reason="eldr._native is not built")
SEEDS = st.integers(0, 2**32 - 1)


def both(call):
    """What a call answers with native code, and what without."""
    answers = []
    for native in (fixed.native, None):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(fixed, "native", native)
            answers.append(call())
    return answers


def tables(rng, workers, cells=16):
    """A table with every column filled at random; loads tie often."""
    table = WorkerTable(ExpertLoad(cells))
    for i in range(workers):
        table.put(Worker(f"w{i}", weight=float(rng.choice([0.5, 1.0, 2.0]))))
    table.requests[:] = rng.integers(0, 4, workers)
    table.others[:] = rng.integers(0, 3, workers) / 2
    table.kv_tokens[:] = rng.integers(0, 5000, workers)
    for slot in range(workers):
        table.experts.add(slot, fixed.COST[rng.integers(0, fixed.P_ONE, cells)])
    return table


@needs_native
@settings(max_examples=60, deadline=None)
@given(SEEDS, st.integers(1, 9), st.integers(1, 8), st.sampled_from([0.0, 0.25, 3.0, np.inf]))
def test_prices(seed, workers, power, guard):
    rng = np.random.default_rng(seed)
    table = tables(rng, workers)
    slots = np.flatnonzero(rng.random(workers) < 0.7)
    slots = slots if len(slots) else np.array([0])
    terms = price.terms(StepCost(*rng.random(4)), 16, float(rng.integers(0, 3000)), rng.random())
    x = rng.integers(0, fixed.P_ONE, 16).astype(np.int16)
    ours, theirs = both(lambda: price.place(terms, power, guard, x, table, slots))
    assert ours[1] == theirs[1] == ours[0].argmin()
    dots = x.astype(np.int64) @ table.experts.survival[slots[ours[1]]]
    assert ours[2] == theirs[2] == dots * price.DOT_UNIT
    np.testing.assert_array_equal(ours[0], theirs[0])
    load = ((table.requests + table.others) / table.weight)[slots]
    limit = (1 + guard) * load.mean() + 1
    clear = np.abs(load - limit) > 1e-9
    np.testing.assert_array_equal(np.isinf(ours[0])[clear], (load > limit)[clear])


@needs_native
@settings(max_examples=60, deadline=None)
@given(SEEDS, st.integers(1, 9), st.integers(0, 2**64 - 1))
def test_the_least_loaded(seed, workers, draw):
    rng = np.random.default_rng(seed)
    table = tables(rng, workers)
    slots = np.flatnonzero(rng.random(workers) < 0.7)
    slots = slots if len(slots) else np.array([workers - 1])
    context = Context(request(0), table, slots, None, None, draw)
    ours, theirs = both(lambda: least_requests(context))
    assert ours.slot == theirs.slot
    np.testing.assert_array_equal(ours.scores, theirs.scores)
    load = ((table.requests + table.others) / table.weight)[slots]
    ties = slots[load == load.min()]
    assert ours.slot == ties[draw % len(ties)]
    similarity = rng.integers(0, 8, len(slots)) / 8
    tau = float(rng.integers(0, 4) / 8)
    ours, theirs = both(lambda: lightest_within(context, slots, similarity, tau))
    inside = similarity >= similarity.max() - tau
    assert ours[0] == theirs[0] == slots[inside][load[inside].argmin()]
    assert ours[1].tolist() == theirs[1].tolist() == slots[inside].tolist()


@needs_native
@pytest.mark.parametrize("rows", [1, 63, 64, 65, 127, 128, 130, 200])
def test_dots_of_many_workers(rows):
    rng = np.random.default_rng(rows)
    x = rng.integers(0, fixed.P_ONE, 33).astype(np.int16)
    survival = rng.integers(0, 256, (rows, 33)).astype(np.uint8)
    ours, theirs = both(lambda: fixed.dots(x, survival))
    wanted = survival.astype(np.int64) @ x.astype(np.int64)
    np.testing.assert_array_equal(ours, wanted)
    np.testing.assert_array_equal(theirs, wanted)


@needs_native
@settings(max_examples=60, deadline=None)
@given(SEEDS, st.integers(1, 70), st.floats(0, 300))
def test_similarities_are_those_of_the_definition(seed, cells, scale):
    """Products beyond int16 stay at its largest value, halves round up."""
    rng = np.random.default_rng(seed)
    counts = rng.integers(0, 300, cells, dtype=np.uint32)
    weights = rng.choice(np.array([0, 0.5, 1, 3], np.float32), cells)
    rows = rng.integers(0, 256, (5, cells)).astype(np.uint8)
    unit, of = rng.random(5), rng.integers(0, 5, 4)
    scale = float(np.round(scale * 4) / 4)  # then every product is exact, and many are halves
    ours, theirs = both(lambda: fixed.similarities(counts, weights, scale, rows, unit, of))
    x = np.minimum(np.floor(counts * weights.astype(np.float64) * scale + 0.5), fixed.P_ONE - 1)
    if not x.any():
        assert ours is theirs is None
        return
    np.testing.assert_array_equal(ours, theirs)
    wanted = (rows[of].astype(np.float64) @ x) * unit[of] / np.sqrt((x**2).sum())
    np.testing.assert_allclose(ours, wanted, rtol=1e-12)


@needs_native
@settings(max_examples=60, deadline=None)
@given(SEEDS, st.integers(1, 70))
def test_activations_are_those_of_the_definition(seed, cells):
    rng = np.random.default_rng(seed)
    counts = rng.integers(0, rng.choice([1, 4, 4000]), cells, dtype=np.uint32)
    mean = rng.integers(0, 9, cells).astype(np.float32) / 8
    scale, keep = float(rng.integers(0, 64) / 4), float(rng.integers(0, 64) / 4)

    wanted = np.minimum(np.floor(counts * scale + mean * keep + 0.5), fixed.P_ONE - 1)
    for hit, out, _, _ in both(lambda: admitted(counts, scale, mean, keep)):
        assert hit is bool(counts.any())
        np.testing.assert_array_equal(out, wanted)


@needs_native
@settings(max_examples=60, deadline=None)
@given(SEEDS, st.integers(1, 2500))
def test_admission_is_activation_its_costs_and_a_sum(seed, cells):
    rng = np.random.default_rng(seed)
    counts = rng.integers(0, rng.choice([1, 4, 4000]), cells, dtype=np.uint32)
    mean = rng.random(cells, np.float32)
    before = rng.integers(0, 9, cells, dtype=np.uint32)

    def call():
        total, x, step = before.copy(), np.empty(cells, np.int16), np.empty(cells, np.uint16)
        hit = fixed.admit(counts, 11.5, mean, 900.0, x, step, total)
        return hit, x, step, total

    prior = mean * np.float32(900) + np.float32(0.5)
    value = np.minimum(counts.astype(np.float32) * np.float32(11.5) + prior, fixed.P_ONE - 1)
    wanted = value.astype(np.int16)
    for hit, x, step, total in both(call):
        assert hit is bool(counts.any())
        np.testing.assert_array_equal(x, wanted)
        np.testing.assert_array_equal(step, fixed.COST[wanted])
        np.testing.assert_array_equal(total, before + counts)


@needs_native
def test_no_negative_activation_is_admitted():
    """Its cost would be read from outside the table."""

    def call():
        total, x, step = (np.zeros(3, t) for t in (np.uint32, np.int16, np.uint16))
        # The last one's is -1.
        for counts, mean in (([0, 2**31, 0], 0.0), ([1, 0, 0], -1.0), ([0, 0, 0], -1.75 / 9)):
            given = np.array(counts, np.uint32), 1e-6, np.full(3, mean, np.float32), 9.0
            with pytest.raises(ValueError, match="negative"):
                fixed.admit(*given, x, step, total)
        return total.tolist()

    assert both(call) == [[0, 0, 0]] * 2


@needs_native
@settings(max_examples=40, deadline=None)
@given(SEEDS, st.sampled_from([1, -1]))
def test_survival_below_zero_and_beyond_the_table(seed, sign):
    """Measurements may take away more than was predicted: then nothing is expected to be read."""
    rng = np.random.default_rng(seed)
    start = rng.integers(-80_000, 140_000, 33, dtype=np.int32)
    step = fixed.COST[rng.integers(0, fixed.P_ONE, 33)]

    def call():
        load, out, idle = start[None].copy(), np.empty((1, 33), np.uint8), np.zeros(1, np.int64)
        fixed.shift(load, out, idle, 0, step, sign)
        return int(idle[0]), load[0], out[0]

    wanted = start + sign * step.astype(np.int64)
    alive = np.rint(255 * np.exp(-np.maximum(wanted, 0) / fixed.LOG_ONE))
    for total, load, out in both(call):
        np.testing.assert_array_equal(load, wanted)
        np.testing.assert_array_equal(out, alive)
        assert total == alive.sum()


def test_the_tables_are_those_of_the_format():
    """Other constants would be another format: states of two versions could not be compared."""
    x = np.arange(2**15) / 2**15
    assert fixed.COST.tolist() == np.minimum(np.rint(-np.log1p(-x) * 8192), 65535).tolist()
    load = np.arange(len(fixed.SURVIVAL)) / 8192
    assert fixed.SURVIVAL.tolist() == np.rint(255 * np.exp(-load)).tolist()
    assert (fixed.P_ONE, fixed.LOG_ONE, fixed.SURVIVAL_ONE) == (32768, 8192, 255)


def test_which_code_runs_is_told():
    assert fixed.describe() == {"native": fixed.native is not None}
    assert both(fixed.describe)[1] == {"native": False}


def test_an_old_library_s_first_missing_function_is_named(monkeypatch, caplog):
    old = types.ModuleType("old")
    for name in fixed._NEEDED[:2]:
        setattr(old, name, len)
    monkeypatch.setattr(fixed.importlib, "import_module", lambda _: old)
    assert fixed._load_native() is None
    assert f"(no {fixed._NEEDED[2]})" in caplog.text
    for name in fixed._NEEDED[2:-1]:
        setattr(old, name, len)
    assert fixed._load_native() is None
    assert f"(no {fixed._NEEDED[-1]})" in caplog.text
    setattr(old, fixed._NEEDED[-1], len)
    assert fixed._load_native() is old
