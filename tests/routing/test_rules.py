"""Each rule of a policy where it turns: exact loads at bounds, every pair drawn, pools to the last.

A policy that fails costs no request, the fleet falls back; so these tests also ask for the reason.
"""

from __future__ import annotations

from collections import Counter
from itertools import permutations

import numpy as np
import pytest

from eldr.geometry import Geometry
from eldr.routing import Fleet, Partition, Reason, StepCost, StepSample, Worker, fixed, make_policy
from eldr.routing.decision import Context
from eldr.routing.policies.affinity import SessionAffinity, domain_pools
from eldr.routing.policies.balance import LeastKv, LeastRequests, PowerOfTwo, Random
from eldr.routing.policies.locality import BoundedLoad, LocalityBand, Nearest, NearestTwo
from eldr.routing.policies.marginal import MarginalCost
from eldr.signature import Signature
from tests.routing.helpers import SMALL, axis_partition, only, request

NAMES = ("d0", "d1", "d2", "d3")


def build(policy, names=NAMES, others=(), weights=(1, 1, 1, 1)):
    """A fleet whose workers run so many requests of others."""
    workers = [Worker(n, weight=w) for n, w in zip(names, weights, strict=False)]
    fleet = Fleet(policy, workers, geometry=SMALL)
    for name, count in zip(names, others, strict=False):
        fleet.report_others(name, count)
    return fleet


def choose(fleet, draw=0, signature=None, **options):
    """What the policy says to a request, without committing it."""
    found = None if signature is None else fleet.activations.admit(signature)
    activation = None if found is None else found[0]
    slots = fleet._candidates
    asked = request(0, signature, **options)
    return fleet.policy.choose(Context(asked, fleet._table, slots, activation, None, draw))


def test_random_draws_every_worker_by_its_weight_and_the_last_at_the_end():
    fleet = build(Random(), weights=(1, 2, 1, 4))
    step = 2**64 // 8
    assert [choose(fleet, i * step).slot for i in range(8)] == [0, 1, 1, 2, 3, 3, 3, 3]
    # The largest draws round to 1 as a share, where no edge lies beyond.
    assert choose(fleet, 2**64 - 1).slot == 3


def test_power_of_two_draws_every_ordered_pair_alike():
    fleet = build(PowerOfTwo())
    rng = np.random.default_rng(0)
    count = Counter(
        tuple(choose(fleet, int(rng.integers(2**63)) * 2 + i % 2).band) for i in range(6000)
    )
    assert set(count) == set(permutations(range(4), 2))
    assert min(count.values()) > 400  # of 500 on average


def test_power_of_two_takes_one_from_each_half_of_the_bits():
    """The halves are independent; a version that mixes them would replay otherwise."""
    fleet = build(PowerOfTwo())
    for high, low in ((7, 2), (5, 1), (6, 3), (2**31 + 4, 0)):
        first = low % 4
        assert choose(fleet, (high << 32) + low).band.tolist() == [
            first,
            (first + 1 + high % 3) % 4,
        ]


def test_power_of_two_takes_the_second_only_when_it_has_less():
    for others, wanted in (((1, 0), 1), ((0, 0), 0), ((0, 1), 0)):
        fleet = build(PowerOfTwo(), NAMES[:2], others)
        assert choose(fleet, 0).slot == wanted


def test_least_kv_is_relative_to_the_weight():
    fleet = build(LeastKv(), NAMES[:2], weights=(1, 4))
    for name, tokens in (("d0", 100), ("d1", 300)):
        excluded = set(NAMES) - {name}
        fleet.reserve(request(name, prompt_tokens=tokens), exclude=excluded)
    choice = choose(fleet)
    assert (choice.slot, choice.scores.tolist()) == (1, [100.0, 75.0])


def test_others_weigh_like_our_own():
    fleet = build(LeastRequests(), NAMES[:3], others=(2.0, 0.5, 1.0), weights=(4, 1, 1))
    choice = choose(fleet)
    assert (choice.slot, choice.scores.tolist()) == (0, [0.5, 0.5, 1.0])
    assert [choose(fleet, draw).slot for draw in range(4)] == [0, 1, 0, 1]


@pytest.mark.parametrize(
    ("home", "other", "branch"),
    [(1.0, 0.0, "home"), (1.01, 0.0, "overflow"), (3.0, 2.0, "home"), (3.01, 2.0, "overflow")],
)
def test_a_home_has_room_up_to_its_bound_with_the_request_counted(home, other, branch):
    """At a bound of 1: home <= (home + other + 1) / 2."""
    fleet = build(SessionAffinity(bound=1.0), NAMES[:2])
    first = choose(fleet, session="s").slot
    fleet.report_others(NAMES[first], home)
    fleet.report_others(NAMES[1 - first], other)
    choice = choose(fleet, session="s")
    assert (choice.branch, choice.slot == first) == (branch, branch == "home")


@pytest.mark.parametrize(
    ("shares", "workers", "sizes"),
    [
        ({"a": 6.0, "b": 2.0}, 4, {"a": 3, "b": 1}),
        ({"a": 1, "b": 1, "c": 2}, 4, {"a": 1, "b": 1, "c": 2}),  # exactly one worker each
        ({"a": 20, "b": 3, "c": 3, "d": 2}, 7, {"a": 5, "b": 2, "c": 2, "d": 2}),
        ({"a": 97, "b": 1, "c": 2}, 5, {"a": 4, "b": 1, "c": 1}),
        ({"a": 2, "b": 3, "c": 0}, 5, {"a": 1, "b": 3, "c": 1}),
        ({"a": 1, "b": 1, "c": 0, "d": 0}, 2, {"a": 1, "b": 1, "c": 2, "d": 2}),
        ({"a": 1, "b": 0}, 1, {"a": 1, "b": 1}),  # no worker is left for b: it uses a's
        ({"a": 0.45, "b": 0.3, "c": 0.25}, 6, {"a": 3, "b": 2, "c": 1}),
    ],
)
def test_pools_by_largest_remainder(shares, workers, sizes):
    names = [f"w{i}" for i in range(workers)]
    pools = domain_pools(shares, names)
    assert {domain: len(pool) for domain, pool in pools.items()} == sizes
    assert set().union(*pools.values()) == set(names)
    own = [pool for pool in set(pools.values()) if len(pool) < workers]
    assert len(set().union(*own)) == sum(map(len, own))  # none in two of them


@pytest.mark.parametrize("shares", [{}, {"a": 0.0}, {"a": 2.0, "b": -1.0}, {"a": 0.5, "b": -0.5}])
def test_pools_of_no_shares_are_refused(shares):
    with pytest.raises(ValueError, match="shares >= 0"):
        domain_pools(shares, ["w"])
    with pytest.raises(ValueError, match="need workers"):
        domain_pools({"a": 1.0}, [])


def mixed(**tokens):
    """A signature by expert: mixed(e0=100, e1=95)."""
    counts = np.zeros((3, 16), np.uint32)
    for name, count in tokens.items():
        counts[:, int(name[1:])] = count
    return Signature(counts, max(tokens.values()))


def test_similarity_is_the_weighted_cosine_to_a_thousandth():
    rng = np.random.default_rng(3)
    centroids = rng.random((4, 3, 16)).astype(np.float32)
    weights = rng.uniform(0.2, 5, (3, 16)).astype(np.float32)
    weights[:, 3] = 0.0
    flat = centroids.reshape(4, -1)
    partition = Partition(
        SMALL,
        NAMES,
        centroids / np.linalg.norm(flat, axis=1)[:, None, None],
        weights,
        np.ones(3, np.bool_),
    )
    fleet = build(LocalityBand(partition))
    for tokens in (1, 3, 1000, 60_000):  # as fine for a few tokens as for many
        counts = rng.integers(0, tokens + 1, (3, 16)).astype(np.uint32)
        counts[:, 0] = tokens
        x = (counts * weights).reshape(-1).astype(np.float64)
        wanted = flat @ x / np.linalg.norm(x) / np.linalg.norm(flat, axis=1)
        scores = choose(fleet, signature=Signature(counts, tokens)).scores
        np.testing.assert_allclose(scores, wanted, atol=1e-3)


@pytest.mark.parametrize(("tokens", "coverage", "covered"), [(1, 1.0, 1), (1, 0.5, 1), (9, 1.0, 9)])
def test_counts_fill_int16_whatever_the_prompt_s_length(tokens, coverage, covered):
    """To the bit: the device's router and other versions must find the same cosines."""
    partition = axis_partition(NAMES)
    partition.idf[:] = np.random.default_rng(5).uniform(0.2, 5, (3, 16))
    fleet = build(LocalityBand(partition))
    counts = np.random.default_rng(6).integers(0, tokens + 1, (3, 16)).astype(np.uint32)
    rows, unit = partition.quantised()
    scale = 32767 / (covered * float(partition.idf.max()))
    wanted = fixed.similarities(counts, partition.idf.reshape(-1), scale, rows, unit, np.arange(4))
    scores = choose(fleet, signature=Signature(counts, tokens, coverage)).scores
    np.testing.assert_array_equal(scores, wanted)


def test_a_signature_that_the_fleet_does_not_use_is_not_compared():
    fleet = build(LocalityBand(axis_partition(NAMES)))
    decision = fleet.reserve(request(0, Signature(only(1).counts, 50, 0.4)))
    assert (decision.reason, decision.branch) == (Reason.LOW_COVERAGE, "fallback")


def test_hits_without_weight_are_no_similarity():
    partition = axis_partition(NAMES)
    partition.idf[:, 7] = 0.0
    fleet = build(LocalityBand(partition))
    assert choose(fleet, signature=only(7)).reason is Reason.EMPTY
    assert choose(fleet, signature=only(6)).reason is None


def test_a_partition_of_another_geometry_says_so():
    other = axis_partition(NAMES, Geometry(3, 17, 2))
    choice = choose(build(LocalityBand(other)), signature=only(1))
    assert (choice.reason, choice.branch) == (Reason.GEOMETRY, "fallback")


def test_a_partition_may_be_prepared_ahead():
    policy = LocalityBand()
    partition = axis_partition(NAMES)
    prepared = policy.prepare(partition)
    policy.use(partition, prepared)
    assert policy.partition is partition
    assert policy._scorer is prepared is not None
    choice = choose(build(policy), signature=only(2))
    assert (choice.slot, choice.reason, choice.branch) == (2, None, "nearest")


def test_the_band_names_what_is_inside_and_takes_the_least_loaded():
    close = mixed(e0=100, e1=95, e2=90)
    fleet = build(LocalityBand(axis_partition(NAMES), tau=0.05), others=(2, 1, 0, 0))
    choice = choose(fleet, signature=close)
    assert (choice.slot, choice.branch, choice.band.tolist()) == (1, "band", [0, 1])
    fleet = build(LocalityBand(axis_partition(NAMES), tau=0.05), others=(1, 1, 0, 0))
    assert choose(fleet, signature=close).slot == 0  # the first on a tie
    far = choose(fleet, signature=only(3))
    assert (far.slot, far.branch, far.band.tolist()) == (3, "nearest", [3])


def test_workers_unknown_to_the_partition_have_no_score():
    names = ("d1", "new", "d0")
    fleet = build(LocalityBand(axis_partition(NAMES[:2]), tau=1.0), names, others=(1, 0, 2))
    choice = choose(fleet, signature=mixed(e0=80, e1=60))
    assert (choice.slot, choice.band.tolist()) == (0, [0, 2])
    np.testing.assert_allclose(choice.scores, [0.6, np.nan, 0.8], atol=1e-3)
    fleet.leave("d1")
    choice = choose(fleet, signature=mixed(e0=80, e1=60))
    assert (choice.slot, choice.band.tolist()) == (2, [2])


def test_nearest_takes_the_best_whatever_it_runs():
    fleet = build(Nearest(axis_partition(NAMES)), others=(99, 0, 0, 0))
    assert choose(fleet, signature=mixed(e0=100, e1=99)).slot == 0


def test_nearest_two_takes_the_less_loaded_of_the_best_two():
    fleet = build(NearestTwo(axis_partition(NAMES)), others=(2, 0, 1, 0))
    choice = choose(fleet, signature=mixed(e0=100, e1=20, e2=50))
    assert (choice.slot, choice.branch, choice.band.tolist()) == (2, "pair", [0, 2])


def test_bounded_load_takes_the_best_at_its_bound_and_passes_on_above():
    policy = BoundedLoad(axis_partition(NAMES), bound=1.0)
    asked = mixed(e0=100, e1=50, e2=20)
    at = choose(build(policy, NAMES[:2], others=(2, 0)), signature=asked)  # 2 <= mean of 1 + 1
    assert (at.slot, at.branch, at.band.tolist()) == (0, "nearest", [0, 1])
    above = choose(build(policy, NAMES[:2], others=(2.1, 0)), signature=asked)
    assert (above.slot, above.branch, above.band.tolist()) == (1, "overflow", [1])
    assert BoundedLoad(bound=1.0).bound == 1.0


def test_measured_steps_move_the_cost_once_there_is_a_scale():
    policy = MarginalCost(cost=StepCost(1.0, 1.0))
    fleet = build(policy)
    for i in range(40):
        n = float(i % 7 + 1)
        fleet.observe("d0", StepSample(10, 10 * (1 + n), 10 * n, 20 * n))
    assert policy.fit.cost != StepCost(1.0, 1.0)
    plain = make_policy("marginal_cost")
    plain.observe(StepSample(10, 1.0, 10.0, 20.0))
    assert plain.fit is None
