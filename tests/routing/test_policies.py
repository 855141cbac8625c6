"""What each policy chooses, and that choosing changes nothing."""

from collections import Counter

import numpy as np
import pytest

from eldr.routing import POLICIES, Fleet, Reason, StepCost, Worker, fixed, make_policy
from eldr.routing.decision import Context
from eldr.routing.lengths import Lengths
from eldr.routing.policies.affinity import domain_pools
from eldr.routing.worker import WorkerTable
from eldr.signature import Signature, decode, encode
from tests.routing.helpers import SMALL, axis_partition, only, request, signatures

NAMES = ["d0", "d1", "d2", "d3"]
PARTITIONED = ("locality_band", "nearest", "nearest_two", "bounded_load")


def build(policy, names=NAMES, weights=(1, 1, 1, 1), **options):
    if policy in PARTITIONED:
        options.setdefault("partition", axis_partition(NAMES))
    workers = [Worker(n, weight=w) for n, w in zip(names, weights, strict=False)]
    return Fleet(make_policy(policy, **options), workers, geometry=SMALL)


def place(fleet, signatures, first=0):
    return [fleet.reserve(request(first + i, s)).worker.name for i, s in enumerate(signatures)]


def test_unknown_names_and_options_are_refused():
    with pytest.raises(ValueError, match="least_requests"):
        make_policy("fastest")
    with pytest.raises(ValueError, match="'tau'"):
        make_policy("random", tau=1)
    for name, options in [
        ("locality_band", {"tau": -0.1}),
        ("locality_band", {"tau": float("nan")}),
        ("bounded_load", {"bound": 0.5}),
        ("session", {"bound": 0}),
        ("marginal_cost", {"hedge": -1}),
        ("marginal_cost", {"power": 2.5}),
        ("marginal_cost", {"guard": -1}),
    ]:
        with pytest.raises(ValueError, match=name):
            make_policy(name, **options)


def test_every_policy_is_pure():
    for name in POLICIES:
        options = {"pools": {}} if name == "domain" else {}
        fleet = build(name, **options)
        place(fleet, signatures(9)[0])
        table = fleet._table
        activation = fleet.activations.admit(signatures(1)[0][0])[0]
        before = [a.copy() for a in (table.requests, table.turns, table.experts.load)]
        context = Context(
            request(99, signatures(1)[0][0]), table, np.arange(4), activation, None, 12345
        )
        first = fleet.policy.choose(context)
        for _ in range(5):
            assert fleet.policy.choose(context).slot == first.slot
        for old, new in zip(before, (table.requests, table.turns, table.experts.load), strict=True):
            np.testing.assert_array_equal(old, new)


def test_round_robin_takes_turns_by_weight():
    fleet = build("round_robin", weights=(2, 1, 1, 1))
    assert Counter(place(fleet, [None] * 50)) == {"d0": 20, "d1": 10, "d2": 10, "d3": 10}
    fleet.join(Worker("late"))
    assert Counter(place(fleet, [None] * 12, 50))["late"] in (2, 3)


def test_a_worker_that_was_away_is_one_turn_behind():
    table = WorkerTable(None)
    for name in "ab":
        table.put(Worker(name, weight=4.0))
    for _ in range(8):
        table.take_turn(0)
    table.take_turn(1)  # from one turn, a quarter, before the last one
    assert table.turns.tolist() == [2.0, 2.0]


def test_round_robin_does_not_make_up_for_an_absence():
    fleet = build("round_robin", weights=(2, 1, 1, 1))
    place(fleet, [None] * 20)
    for i in range(300):  # d3 is away
        fleet.reserve(request(1000 + i), exclude=["d3"])
    back = Counter(place(fleet, [None] * 50, 50))
    assert back == {"d0": 20, "d1": 10, "d2": 10, "d3": 10}


def test_random_follows_weights():
    fleet = build("random", weights=(3, 1, 1, 1))
    share = Counter(place(fleet, [None] * 3000))["d0"] / 3000
    assert 0.46 < share < 0.54


def test_least_requests_balances_and_weighs():
    fleet = build("least_requests", weights=(2, 1, 1, 1))
    assert Counter(place(fleet, [None] * 50)) == {"d0": 20, "d1": 10, "d2": 10, "d3": 10}


def test_power_of_two_never_takes_the_most_loaded_of_two():
    fleet = build("power_of_two", names=["d0", "d1"])
    assert Counter(place(fleet, [None] * 50)) == {"d0": 25, "d1": 25}
    one = build("power_of_two", names=["d0"])
    assert place(one, [None]) == ["d0"]


def test_least_kv_counts_tokens():
    fleet = build("least_kv", names=["d0", "d1"])
    big = fleet.reserve(request(0, prompt_tokens=1000)).worker.name
    others = {fleet.reserve(request(i, prompt_tokens=10)).worker.name for i in range(1, 20)}
    assert others == {"d0", "d1"} - {big}


def test_sessions_stay_and_move_only_when_they_must():
    fleet = build("session", bound=1000.0)
    homes = {
        s: fleet.reserve(request(i, session=s)).worker.name
        for i, s in enumerate(map(str, range(40)))
    }
    assert len(set(homes.values())) == 4
    fleet.leave("d0")
    for i, (session, home) in enumerate(homes.items()):
        now = fleet.reserve(request(100 + i, session=session)).worker.name
        assert now == home or home == "d0"
    assert fleet.reserve(request(999)).reason is Reason.NO_SESSION


def test_an_overloaded_home_passes_its_session_on():
    fleet = build("session")
    used = [fleet.reserve(request(i, session="one")) for i in range(8)]
    assert used[0].branch == "home"
    assert {d.branch for d in used[1:]} >= {"overflow"}


def test_domain_pools_are_proportional_and_small_domains_share():
    pools = domain_pools({"a": 0.5, "b": 0.3, "c": 0.1, "d": 0.1}, [f"w{i}" for i in range(8)])
    assert (len(pools["a"]), len(pools["b"])) == (4, 2)
    assert pools["c"] == pools["d"]
    assert len(pools["c"]) == 2
    fleet = build("domain", pools={"x": ["d1"], "y": ["gone"]})
    assert fleet.reserve(request(0, domain="x")).worker.name == "d1"
    assert fleet.reserve(request(1, domain="y")).reason is Reason.NO_DOMAIN
    assert fleet.reserve(request(2, domain="?")).reason is Reason.NO_DOMAIN
    with pytest.raises(ValueError, match="shares"):
        domain_pools({}, ["w"])


def test_the_band_is_what_tau_says():
    fleet = build("nearest")
    assert place(fleet, [only(2)] * 3) == ["d2"] * 3
    mixed = np.zeros((3, 16), np.uint32)
    mixed[:, 0], mixed[:, 1] = 100, 95
    near = Signature(mixed, 195)  # similarities 0.725 and 0.689
    fleet = build("locality_band", tau=0.05)
    assert place(fleet, [near, near]) == ["d0", "d1"]
    fleet = build("locality_band", tau=0.01)
    assert place(fleet, [near, near]) == ["d0", "d0"]
    decision = build("locality_band", tau=1.0).reserve(request(0, near))
    assert decision.explain()["band"] == NAMES


def test_similarity_is_the_cosine():
    fleet = build("locality_band")
    made = signatures(20, tokens=(50, 4000))[0]
    for i, signature in enumerate(made):
        flat = signature.counts.astype(np.float64).reshape(-1)
        expected = [
            flat @ c.reshape(-1) / np.linalg.norm(flat) for c in axis_partition(NAMES).centroids
        ]
        scores = fleet.reserve(request(i, signature)).choice.scores
        np.testing.assert_allclose(scores, expected, atol=2e-3)


def test_a_sample_has_the_direction_of_the_whole():
    fleet = build("locality_band")
    whole = signatures(1, tokens=(4000, 4001))[0][0]
    part = decode(encode(whole, SMALL, form="sampled", sample=64), SMALL)
    assert part.sampled == 64
    scores = [fleet.reserve(request(i, s)).choice.scores for i, s in enumerate((whole, part))]
    np.testing.assert_allclose(scores[0], scores[1], atol=0.03)


def test_variants_bound_the_load():
    assert Counter(place(build("nearest_two"), [only(2)] * 10)).most_common(1)[0] == ("d2", 5)
    crowd = Counter(place(build("bounded_load"), [only(2)] * 40))
    assert max(crowd.values()) <= 14  # 1.25 * (mean of 10 + 1)
    assert crowd["d2"] == 14


def test_workers_without_a_centroid_are_outside_the_band():
    fleet = build("locality_band", names=["d0", "new"])
    decision = fleet.reserve(request(0, only(1)))
    assert decision.worker.name == "d0"
    assert decision.explain()["candidates"] == ["d0", "new"]
    assert np.isnan(decision.choice.scores[1])
    assert build("nearest", names=["new"]).reserve(request(0, only(1))).reason is Reason.NO_CENTROID


def test_partition_reasons():
    fleet = Fleet(make_policy("locality_band"), [Worker("d0")], geometry=SMALL)
    assert fleet.reserve(request(0, only(0))).reason is Reason.NO_PARTITION
    fleet.policy.use(axis_partition(NAMES))
    fleet.policy.paused = True
    assert fleet.reserve(request(1, only(0))).reason is Reason.PARTITION_PAUSED
    fleet.policy.paused = False
    assert fleet.reserve(request(2, only(0))).reason is None


def test_marginal_cost_groups_like_with_like():
    fleet = build("marginal_cost", guard=10.0)
    made, labels = signatures(80, domains=4, seed=3)
    placed = place(fleet, made)
    homes = {d: Counter() for d in set(labels)}
    for name, label in zip(placed, labels, strict=True):
        homes[label][name] += 1
    kept = sum(c.most_common(1)[0][1] for c in homes.values()) / len(made)
    assert kept > 0.7
    assert max(Counter(placed).values()) <= 40


def test_the_guard_bounds_the_load():
    fleet = build("marginal_cost", guard=0.0, cost=StepCost(1e-3, 1e-3))
    loads = Counter(place(fleet, [only(2)] * 40))
    assert max(loads.values()) <= 12


def test_marginal_cost_explains_itself():
    fleet = build("marginal_cost")
    decision = fleet.reserve(request(0, only(3)))
    story = decision.explain()
    assert story["branch"] == "marginal"
    assert set(story["scores"]) == set(NAMES)
    # Every hit on one expert of each layer: three experts, all new, and a little of the rest.
    assert 2.5 < story["added_experts"] < 6


def test_a_long_request_spares_the_others_and_a_short_one_itself():
    """d0 runs many that share the request's experts, d1 has the shorter step and shares none."""

    def choose(new_tokens):
        fleet = build("marginal_cost", names=["d0", "d1"], guard=100.0, power=1,
                      cost=StepCost(1e-3, 1e-3))  # fmt: skip
        for i in range(20):
            fleet.reserve(request(i, only(2), new_tokens=100), exclude=["d1"])
        for i in range(20, 26):
            fleet.reserve(request(i, only(9), new_tokens=100), exclude=["d0"])
        mixed = np.zeros((3, 16), np.uint32)
        mixed[:, 2], mixed[:, 5] = 50, 5
        return fleet.reserve(request(26, Signature(mixed, 62), new_tokens=new_tokens))

    usual = list(choose(100).choice.scores)
    assert list(choose(None).choice.scores) == usual
    assert list(choose(0).choice.scores) == usual
    short, long = choose(10), choose(1000)
    assert short.choice.scores[1] < usual[1] < long.choice.scores[1]
    assert (short.worker.name, long.worker.name) == ("d1", "d0")


def test_lengths_need_a_mean_and_fade():
    known = Lengths()
    for _ in range(15):
        known.add(100)
    assert known.relative(400) == 1.0
    for unknown in (None, 0, -5):
        known.add(unknown)
        assert known.relative(unknown) == 1.0
    known.add(100)
    assert [known.relative(n) for n in (1, 60, 150, 9999)] == [0.5, 0.6, 1.5, 2.0]
    for _ in range(20_000):
        known.add(10)
    assert known.relative(15) == pytest.approx(1.5, rel=0.01)


def test_weights_attract_load():
    fleet = build("marginal_cost", weights=(4, 1, 1, 1), guard=10.0)
    assert Counter(place(fleet, signatures(70)[0])).most_common(1)[0][0] == "d0"


@pytest.mark.skipif(fixed.native is None, reason="eldr._native is not built")
def test_numpy_decides_as_native_code_does(monkeypatch):
    made = signatures(60)[0]
    for policy in ("marginal_cost", "locality_band"):
        ours = place(build(policy, weights=(2, 1, 1, 3)), made)
        with monkeypatch.context() as patch:
            patch.setattr(fixed, "native", None)
            assert place(build(policy, weights=(2, 1, 1, 3)), made) == ours
