"""The fixed-point loops: native and NumPy agree bit for bit, and removal is exact."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from eldr.routing import Fleet, RouteRequest, Worker, fixed, make_policy
from tests.routing.helpers import SMALL, admitted, axis_partition, signatures

needs_native = pytest.mark.skipif(fixed.native is None, reason="eldr._native is not built")


@pytest.fixture
def plain(monkeypatch):
    """Runs a function without the native library."""

    def call(function, *args):
        with monkeypatch.context() as patch:
            patch.setattr(fixed, "native", None)
            return function(*args)

    return call


def arrays(seed, cells, workers):
    rng = np.random.default_rng(seed)
    return (
        rng.integers(0, 3000, cells, dtype=np.uint32),
        rng.random(cells, np.float32) * 900 + 0.5,
        rng.integers(0, 256, (workers, cells), dtype=np.uint8),
    )


@needs_native
@pytest.mark.parametrize("cells", [1, 15, 16, 17, 1023, 1024, 1025, 6144])
@pytest.mark.parametrize("workers", [1, 3])
def test_native_equals_numpy(plain, cells, workers):
    counts, mean, rows = arrays(cells, cells, workers)
    for scale in (0.0, 1e-3, 0.37, 11.7, 4096.0):
        _, ours, step, _ = admitted(counts, scale, mean, 0.77)
        _, theirs, _, _ = plain(admitted, counts, scale, mean, 0.77)
        np.testing.assert_array_equal(ours, theirs)
        np.testing.assert_array_equal(fixed.dots(ours, rows), plain(fixed.dots, ours, rows))
    load = np.random.default_rng(1).integers(0, 90_000, (3, cells), dtype=np.int32)
    states = [
        (load.copy(), np.empty((3, cells), np.uint8), np.zeros(3, np.int64)) for _ in range(2)
    ]
    for slot, sign in ((0, 1), (1, 1), (0, -1), (2, 1), (2, -1)):
        fixed.shift(*states[0], slot, step, sign)
        plain(fixed.shift, *states[1], slot, step, sign)
        for a, b in zip(*states, strict=True):
            np.testing.assert_array_equal(a[slot], b[slot])
        assert states[0][2][slot] == states[0][1][slot].sum(dtype=np.int64)
    assert np.array_equal(states[0][0][[0, 2]], load[[0, 2]])  # taken back


@needs_native
@pytest.mark.parametrize("cells", [1, 17, 255, 257, 6144])
@pytest.mark.parametrize("of", [[], [0], [6, 0, 3], [1, 1, 2, 3, 4], [0, 1, 2, 3, 4, 5, 6, 2, 2]])
def test_native_similarities_equal_numpys(plain, cells, of):
    counts, weights, rows = arrays(cells, cells, 7)
    unit, of = np.random.default_rng(2).random(7), np.array(of, np.intp)
    for scale in (1e-7, 1e-3, 0.37):
        ours = fixed.similarities(counts, weights, scale, rows, unit, of)
        theirs = plain(fixed.similarities, counts, weights, scale, rows, unit, of)
        np.testing.assert_array_equal(ours, theirs)
    weights[:] = 0
    for call in (lambda f, *a: f(*a), plain):
        assert call(fixed.similarities, counts, weights, 1.0, rows, unit, of) is None


@needs_native
def test_the_largest_values_do_not_overflow():
    x = np.full(20_000, fixed.P_ONE - 1, np.int16)
    for count in range(1, 7):  # whole and broken tiles of rows
        rows = np.full((count, 20_000), 255, np.uint8)
        assert fixed.dots(x, rows).tolist() == [20_000 * 255 * (fixed.P_ONE - 1)] * count


def test_activation_saturates_just_below_one():
    counts = np.array([100, 0], np.uint32)
    _, out, _, _ = admitted(counts, float(fixed.P_ONE), np.zeros(2, np.float32), 1.0)
    assert out.tolist() == [fixed.P_ONE - 1, 0]


def test_tables_follow_their_formulas():
    assert fixed.COST[0] == 0
    assert fixed.COST[fixed.P_ONE // 2] == round(np.log(2) * fixed.LOG_ONE)
    assert fixed.SURVIVAL[0] == 255
    assert fixed.SURVIVAL[round(np.log(2) * fixed.LOG_ONE)] in (127, 128)
    assert fixed.SURVIVAL[-1] == 0
    assert fixed.SURVIVAL[-3] > 0
    assert (np.diff(fixed.SURVIVAL.astype(int)) <= 0).all()


@settings(max_examples=40, deadline=None)
@given(st.lists(st.integers(0, 2**32 - 1), min_size=1, max_size=30), st.randoms())
def test_removal_in_any_order_restores_the_start(seeds, order):
    load, survival, idle = (
        np.zeros((1, 50), np.int32), np.empty((1, 50), np.uint8), np.zeros(1, np.int64),
    )  # fmt: skip
    added = [fixed.COST[np.random.default_rng(s).integers(0, fixed.P_ONE, 50)] for s in seeds]
    for step in added:
        fixed.shift(load, survival, idle, 0, step, 1)
    order.shuffle(added)
    for step in added:
        fixed.shift(load, survival, idle, 0, step, -1)
    assert not load.any()
    assert idle == survival.sum() == 50 * 255


@needs_native
def test_native_refuses_what_it_cannot_use():
    x, rows, out = np.zeros(4, np.int16), np.zeros((2, 4), np.uint8), np.zeros(2, np.int64)
    with pytest.raises(TypeError, match="rows"):
        fixed.native.dots(x, rows.astype(np.int32), out)
    with pytest.raises(ValueError, match="rows"):
        fixed.native.dots(x, rows[:1], out)
    with pytest.raises((BufferError, ValueError)):
        fixed.native.dots(x, rows[:, ::2], out)
    load, survival, idle = np.zeros((1, 4), np.int32), np.empty((1, 4), np.uint8), np.zeros(1, int)
    step = np.zeros(4, np.uint16)
    for wrong, error, told in (
        ((load, survival, idle, 0, x, 1, fixed.SURVIVAL), TypeError, "step"),
        ((load, survival, idle, 0, step[:3], 1, fixed.SURVIVAL), ValueError, "load"),
        ((load, survival[:, :2].copy(), idle, 0, step, 1, fixed.SURVIVAL), ValueError, "survival"),
        ((load, survival, idle, 1, step, 1, fixed.SURVIVAL), IndexError, "slot 1 of 1"),
        ((load, survival, idle, -1, step, 1, fixed.SURVIVAL), IndexError, "slot -1"),
        ((load, survival, idle, 0, step, 2, fixed.SURVIVAL), ValueError, "sign"),
        ((load, survival, idle, 0, step, 1, np.zeros(65_537, np.uint8)), ValueError, "65536"),
    ):
        with pytest.raises(error, match=told):
            fixed.native.shift(*wrong)
    most, mean = np.ones(4, np.uint32), np.ones(4, np.float32)
    for wrong in (
        (most, 1.0, mean[:3], 1.0, fixed.COST, x, step, most),
        (most, 1.0, mean, 1.0, fixed.COST[:9], x, step, most),
        (most, 1.0, mean, 1.0, fixed.COST, x[:3], step, most),
        (most, 1.0, mean, 1.0, fixed.COST, x, step[:3], most),
        (most, 1.0, mean, 1.0, fixed.COST, x, step, most[:3]),
    ):
        with pytest.raises(ValueError, match="expected"):
            fixed.native.admit(*wrong)
    one, none = np.ones(1), np.zeros(1, np.int64)
    with pytest.raises(IndexError, match="candidate 1"):
        fixed.native.least(none, one, one, none + 1, 0, one.copy())
    with pytest.raises(ValueError, match="no candidates"):
        fixed.native.least(none, one, one, none[:0], 0, one[:0].copy())
    with pytest.raises(ValueError, match="no candidates"):
        fixed.native.band(one[:0], 0.1, none, one, one, none[:0], none[:0].copy())
    with pytest.raises(IndexError, match="candidate -1"):
        fixed.native.band(one, 0.1, none, one, one, none - 1, none.copy())
    with pytest.raises(ValueError, match="similarity"):
        fixed.native.band(np.ones(2), 0.1, none, one, one, none, none.copy())
    counts, weights, unit = np.ones(4, np.uint32), np.ones(4, np.float32), np.ones(2)
    with pytest.raises(IndexError, match=r"of 2: expected \[0, 2\)"):
        fixed.native.similarities(counts, weights, 1.0, rows, unit, none + 2, one.copy())
    with pytest.raises(ValueError, match="rows"):
        fixed.native.similarities(counts, weights, 1.0, rows[:1], unit, none, one.copy())


def test_a_library_of_another_version_is_not_used(monkeypatch, caplog):
    import types

    monkeypatch.setattr(fixed.importlib, "import_module", lambda _: types.ModuleType("old"))
    assert fixed._load_native() is None
    assert "another version" in caplog.text


@needs_native
@settings(max_examples=60, deadline=None)
@given(
    st.sampled_from(["least_requests", "marginal_cost", "locality_band", "nearest_two"]),
    st.integers(0, 2**32 - 1),
    st.lists(st.floats(0.1, 8), min_size=1, max_size=20),
)
def test_decisions_with_and_without_native_code_are_the_same(name, seed, weights):
    rng = np.random.default_rng(seed)
    made, _ = signatures(40, seed=seed % 1000)
    options = {}
    if name in ("locality_band", "nearest_two"):  # some workers are unknown to the partition
        known = [f"w{i}" for i in range(int(rng.integers(1, min(16, len(weights)) + 1)))]
        options["partition"] = axis_partition(known)
    if name == "locality_band":
        options["tau"] = float(rng.choice([0.0, 0.05, 0.3, 1.0]))
    plan = [(i, rng.random() < 0.3, rng.random() < 0.8, rng.integers(0, 2000)) for i in range(40)]
    stories = []
    for native in (fixed.native, None):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(fixed, "native", native)
            workers = [Worker(f"w{i}", weight=w) for i, w in enumerate(weights)]
            fleet = Fleet(make_policy(name, **options), workers, geometry=SMALL, seed=seed)
            story = []
            for i, gone, has, tokens in plan:
                signature = made[i] if has else None
                one = RouteRequest(f"r{i}", signature, prompt_tokens=int(tokens))
                decision = fleet.reserve(one)
                story.append((str(decision.explain()), decision.choice.scores.tobytes()))
                if gone:
                    fleet.release(f"r{i // 2}")
            stories.append(story)
    assert stories[0] == stories[1]
