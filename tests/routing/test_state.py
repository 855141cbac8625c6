"""Exact values of the fleet's state: draws, means, measured load, clocks, integrity."""

from __future__ import annotations

import hashlib

import numpy as np
import pytest

from eldr.routing import Fleet, Reason, RouteRequest, StepSample, Worker, activation, fixed
from eldr.routing.activation import ActivationModel
from eldr.routing.cost import StepCost
from eldr.routing.expert_load import ExpertLoad
from eldr.routing.policies.affinity import SessionAffinity
from eldr.routing.policies.balance import LeastRequests, RoundRobin
from eldr.routing.policies.marginal import MarginalCost
from eldr.routing.worker import WorkerTable
from eldr.signature import Signature
from tests.routing.helpers import SMALL, only, request, signatures


class Recorder(LeastRequests):
    """Keeps the draws and the samples that the fleet hands to its policy."""

    def __init__(self) -> None:
        self.draws: list[int] = []
        self.samples: list[StepSample] = []

    def choose(self, context):
        self.draws.append(context.draw)
        return super().choose(context)

    def observe(self, sample):
        self.samples.append(sample)


def fleet(policy=None, names=("d0", "d1"), **options):
    workers = [Worker(name) for name in names]
    return Fleet(policy or MarginalCost(), workers, geometry=SMALL, **options)


def sample(batch, steps=100):
    return StepSample(steps, 1.0, float(steps * batch), 2000.0)


def splitmix64(state: int) -> int:
    """The generator as its author publishes it (prng.di.unimi.it/splitmix64.c)."""
    mask = 2**64 - 1
    z = (state + 0x9E3779B97F4A7C15) & mask
    z = ((z ^ z >> 30) * 0xBF58476D1CE4E5B9) & mask
    z = ((z ^ z >> 27) * 0x94D049BB133111EB) & mask
    return z ^ z >> 31


def drawn(**options) -> list[int]:
    policy = Recorder()
    one = fleet(policy, **options)
    for i in range(3):
        one.reserve(request(i))
    return policy.draws


def test_draws_are_splitmix64_of_seed_and_sequence():
    """A version that draws otherwise would not decide a recorded day again as it did."""
    published = [0xE220A8397B1DCDAF, 0x6E789E6AA1B965F4, 0x06C45D188009454F]
    assert drawn() == drawn(seed=0) == published
    for seed in (1, 7, 2**40):
        start = seed * 0xD1342543DE82EF95
        assert drawn(seed=seed) == [
            splitmix64((start + i * 0x9E3779B97F4A7C15) % 2**64) for i in range(3)
        ]


def test_membership_is_told():
    one = fleet(names=("a", "b", "c"))
    assert (len(one), one.names, one.geometry) == (3, ("a", "b", "c"), SMALL)
    one.leave("b")
    assert (len(one), one.names) == (2, ("a", "c"))
    one.join(Worker("d"))
    assert one.names == ("a", "d", "c")  # the free slot


def test_requests_of_others_are_set_and_never_negative():
    one = fleet(Recorder())
    one.report_others("d0", 2.5)
    one.report_others("gone", 9.0)
    assert one._table.others.tolist() == [2.5, 0.0]
    assert {one.reserve(request(i)).worker.name for i in range(2)} == {"d1"}
    one.report_others("d0", -3.0)
    assert one._table.others.tolist() == [0.0, 0.0]


def test_without_trust_a_sample_reaches_the_policy_and_nothing_else():
    policy = Recorder()
    one = fleet(policy)
    one.report_others("d0", 2.5)
    one.observe("d0", sample(20), np.ones((3, 16)))
    one.observe("d0", sample(0, steps=0))
    one.observe("gone", sample(4))
    assert policy.samples == [sample(20), sample(0, steps=0)]
    assert one._table.others.tolist() == [2.5, 0.0]
    assert not one._table.experts.load.any()


def test_others_are_the_trusted_part_of_what_we_do_not_run():
    one = fleet(trust=0.5)
    for i in range(3):
        one.reserve(request(i), exclude=["d1"])
    one.observe("d0", sample(20))  # without the use of experts
    assert one._table.others.tolist() == [0.5 * 17, 0.0]
    one.observe("d0", sample(1))
    assert one._table.others.tolist() == [0.0, 0.0]
    one.observe("d0", sample(20))
    one.observe("d0", sample(0, steps=0))
    assert one._table.others.tolist() == [0.0, 0.0]


def test_an_idle_worker_is_left_with_what_we_predict_exactly():
    one = fleet(trust=1.0)
    one.reserve(request(0, only(1)), exclude=["d1"])
    predicted = one._table.experts.load.copy()
    one.observe("d0", sample(20), np.full((3, 16), 0.9))
    assert (one._table.experts.load != predicted).any()
    one.observe("d0", sample(0, steps=0))
    np.testing.assert_array_equal(one._table.experts.load, predicted)


def test_use_may_be_any_share_and_nothing_else():
    one = fleet(trust=1.0)
    one.observe("d0", sample(4), np.ones(48))
    assert one.status()[0]["experts"] == 48.0
    for bad in (-0.01, 1.01):
        with pytest.raises(ValueError, match="use of d0"):
            one.observe("d0", sample(4), np.full(48, bad))
    bare = Fleet(LeastRequests(), [Worker("d0")], trust=1.0)
    bare.observe("d0", sample(4), np.ones(48))  # no geometry yet: only the batch is known
    assert bare._table.others.tolist() == [4.0]


def test_measured_load_is_a_blend_in_log_survival():
    load = ExpertLoad(4)
    assert len(load.idle) == 0
    load.resize(2)
    own = np.array([0, 8192, 16384, 32767], np.int16)
    load.add(1, fixed.COST[own])
    start = load.load[1].astype(np.int64)
    use = np.array([0.0, 0.3, 0.9, 1.0])
    load.measured(1, use, 0.25)
    with np.errstate(divide="ignore"):
        seen = np.minimum(np.rint(-np.log(1 - use) * fixed.LOG_ONE), 65535)
    wanted = start + np.rint(0.25 * (seen - start))
    np.testing.assert_array_equal(load.load[1], wanted)
    alive = np.rint(255 * np.exp(-wanted / fixed.LOG_ONE))
    np.testing.assert_array_equal(load.survival[1], alive)
    assert load.idle.tolist() == [4 * 255, load.survival[1].sum()]
    load.measured(1, np.ones(4), 1.0)
    assert load.load[1].tolist() == [65535] * 4
    assert load.survival[1].tolist() == [0] * 4


def test_distinct_experts_by_their_definition():
    load = ExpertLoad(3)
    load.resize(2)
    load.add(1, fixed.COST[[0, 16384, 32000]])
    alive = load.survival / 255
    np.testing.assert_allclose(load.distinct(), 3 - alive.sum(axis=1), rtol=1e-12)


def test_room_for_more_workers_keeps_what_was_there():
    load = ExpertLoad(2)
    for slots in range(1, 9):
        load.resize(slots)
        assert [len(a) for a in (load.load, load.other, load.survival, load.idle)] == [slots] * 4
        assert load.idle[-1] == 2 * 255
        load.measured(slots - 1, np.full(2, slots / 10), 1.0)
    np.testing.assert_array_equal(load.load, load.other)
    np.testing.assert_array_equal(
        load.load[:, 0], np.rint(-np.log1p(-np.arange(1, 9) / 10) * fixed.LOG_ONE)
    )


def hits(expert, tokens):
    counts = np.zeros((3, 16), np.uint32)
    counts[:, expert] = tokens
    return Signature(counts, tokens)


def test_the_mean_moves_every_32_requests_by_its_formula():
    model = ActivationModel(SMALL)
    uniform = 2 / 16
    for seen in range(1, 97):
        model.admit(hits(5, 10))
        known = seen // 32 * 32 * 10
        mean = model.mean.reshape(3, 16)
        np.testing.assert_allclose(
            mean[:, 5], (known + 256 * uniform) / (known + 256), rtol=1e-6, err_msg=str(seen)
        )
        np.testing.assert_allclose(mean[:, 0], 256 * uniform / (known + 256), rtol=1e-6)


@pytest.mark.parametrize("extra", [0, 1])
def test_old_requests_weigh_half_beyond_the_window(extra):
    """Exactly at the window they do not yet."""
    model = ActivationModel(SMALL)
    each = 2**22 // 32
    for i in range(32):
        model.admit(hits(5, each + (extra if i == 0 else 0)))
    old = 2**22 + extra
    old = old / 2 if extra else old
    for _ in range(32):
        model.admit(hits(9, 1000))
    mean = model.mean.reshape(3, 16)[0]
    total = old + 32_000 + 256
    np.testing.assert_allclose(mean[5], (old + 32) / total, rtol=1e-6)
    np.testing.assert_allclose(mean[9], (32_000 + 32) / total, rtol=1e-6)
    assert activation.WINDOW == 2**22


def test_placed_requests_move_the_mean_and_others_do_not():
    one = fleet()
    for i in range(31):
        one.reserve(request(i, only(5)))
        one.reserve(request(100 + i))  # no signature
    assert len(set(one.activations.mean.tolist())) == 1
    one.reserve(request(31, only(5)))
    assert one.activations.mean.reshape(3, 16)[0].argmax() == 5


def test_one_token_is_enough():
    decision = fleet().reserve(request(0, Signature(only(1, tokens=1).counts, 1)))
    assert decision.reason is None


def test_a_decision_explains_its_reason_and_rounds_to_a_billionth():
    one = fleet(names=("d0",))
    told = one.reserve(request(0)).explain()
    assert told["reason"] == Reason.NO_SIGNATURE.value
    assert type(told["reason"]) is str
    decision = one.reserve(request(1, signatures(1)[0][0]))
    assert decision.explain()["reason"] is None
    decision.choice.scores = np.array([2 / 3])
    assert decision.explain()["scores"] == {"d0": 0.666666667}


def test_every_array_has_one_entry_for_each_slot():
    table = WorkerTable(ExpertLoad(3))
    arrays = ("requests", "others", "kv_tokens", "turns", "weight", "open", "names", "workers")
    for count in range(4):
        assert {len(getattr(table, name)) for name in arrays} == {count}
        assert len(table.experts.idle) == count
        epoch = table.epoch
        table.put(Worker(f"w{count}"))
        assert table.epoch != epoch
    epoch = table.epoch
    table.drop(1)
    assert table.epoch != epoch
    assert table.names == ("w0", "", "w2", "w3")


def test_a_newcomer_s_clock_starts_with_the_slowest_open_one():
    table = WorkerTable(None)
    for name in "abc":
        table.put(Worker(name))
    assert table.turns.tolist() == [0.0, 0.0, 0.0]
    table.turns[:] = 5.0, 3.0, 1.0
    table.open[2] = False
    late = table.put(Worker("late"))
    assert table.turns[late] == 3.0
    table.open[:] = False
    alone = table.put(Worker("alone"))
    assert table.turns[alone] == 0.0


def test_a_slot_that_is_left_remembers_nothing():
    one = fleet(trust=1.0)
    one.reserve(request(0, only(1)), exclude=["d1"])
    one.observe("d0", sample(20), np.full((3, 16), 0.9))
    one.leave("d0")
    table = one._table
    assert table.names == ("", "d1")
    assert table.others[0] == table.requests[0] == table.kv_tokens[0] == 0
    assert not table.experts.load[0].any()
    assert not table.experts.other[0].any()
    assert (table.experts.survival[0] == 255).all()


def test_turns_follow_weights_one_by_one():
    one = Fleet(RoundRobin(), [Worker("double", weight=2.0), Worker("single")])
    order = [one.reserve(request(i)).worker.name for i in range(6)]
    assert order == ["double", "double", "single"] * 2
    assert one._table.turns.tolist() == [2.0, 2.0]


@pytest.mark.parametrize(
    ("prompt", "signed", "wanted"),
    [
        *((5, True, 5), (1, True, 1), (0, True, 50), (-1, True, 50)),
        *((5, False, 5), (0, False, 0), (-3, False, 0)),
    ],
)
def test_kv_tokens_are_the_caller_s_or_the_signature_s(prompt, signed, wanted):
    one = RouteRequest("r", only(1) if signed else None, prompt_tokens=prompt)
    assert one.kv_tokens == wanted
    assert RouteRequest("r").prompt_tokens == 0


@pytest.mark.parametrize("name", ["requests", "kv_tokens"])
def test_integrity_names_the_first_counter_that_is_off(name):
    one = fleet(names=("a", "b", "c"))
    one.check_integrity()
    getattr(one._table, name)[1:] += 1
    with pytest.raises(AssertionError, match=rf"{name}\[1\] differs"):
        one.check_integrity()


@pytest.mark.parametrize("name", ["survival", "idle"])
def test_integrity_notices_derived_values(name):
    one = fleet(names=("a", "b", "c"))
    getattr(one._table.experts, name)[1:] -= 1
    with pytest.raises(AssertionError, match=rf"{name}\[1(, 0)?\] differs"):
        one.check_integrity()


def test_integrity_notices_names_that_moved():
    one = fleet()
    one._slots["d0"], one._slots["d1"] = one._slots["d1"], one._slots["d0"]
    with pytest.raises(AssertionError, match="slots hold"):
        one.check_integrity()


def test_seconds_of_a_step_are_the_sum_of_its_parts():
    assert StepCost(2.0, 3.0, kv=5.0, request=7.0).seconds(11.0, 13.0, 17.0) == 219.0


def test_a_session_s_home_is_the_least_hash_of_session_and_worker():
    """Another hash would move every session at an upgrade."""
    names = ("d0", "d1", "d2", "d3")
    one = fleet(SessionAffinity(bound=1e9), names=names)
    for i in range(20):
        home = min(
            names, key=lambda n: hashlib.blake2b(f"s{i}\0{n}".encode(), digest_size=8).digest()
        )
        assert one.reserve(request(i, session=f"s{i}")).worker.name == home
