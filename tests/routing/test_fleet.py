"""Reservations, membership, fallbacks and integrity of the fleet."""

import subprocess
import sys
import threading

import numpy as np
import pytest

from eldr.geometry import Geometry
from eldr.routing import Fleet, NoWorkerError, Reason, Worker, make_policy
from eldr.signature import Signature
from tests.routing.helpers import SMALL, only, request, signatures


def fleet(count=3, policy="least_requests", geometry=SMALL, **options):
    workers = [Worker(f"d{i}") for i in range(count)]
    return Fleet(make_policy(policy, **options), workers, geometry=geometry)


def loads(fleet):
    return {row["name"]: row["requests"] for row in fleet.status()}


def test_reserve_and_release_exactly_once():
    f = fleet()
    chosen = {f.reserve(request(i)).worker.name for i in range(3)}
    assert chosen == {"d0", "d1", "d2"}
    assert f.running == 3
    assert f.release("r0")
    assert not f.release("r0")
    assert not f.release("never")
    assert f.running == 2
    f.check_integrity()


@pytest.mark.parametrize("policy", ["least_requests", "marginal_cost"])
def test_a_decision_tells_the_load_that_it_found(policy):
    f = fleet(policy=policy)
    for i in range(7):
        before = loads(f)
        told = f.reserve(request(i, only(i)), exclude=["d1"] if i > 3 else ()).explain()
        assert told["load"] == {name: before[name] for name in told["candidates"]}
        assert all(type(n) is int for n in told["load"].values())


def test_an_id_that_runs_cannot_be_reserved_again():
    f = fleet()
    f.reserve(request(1))
    with pytest.raises(ValueError, match="reserved already"):
        f.reserve(request(1))
    assert sum(loads(f).values()) == 1


def test_a_fleet_without_open_workers_says_so():
    with pytest.raises(NoWorkerError, match="0 in the fleet"):
        fleet(0).reserve(request(0))
    f = fleet(2)
    f.drain("d0")
    f.drain("d1")
    with pytest.raises(NoWorkerError, match="2 in the fleet, 0 open"):
        f.reserve(request(0))
    f.drain("d1", draining=False)
    assert f.reserve(request(0)).worker.name == "d1"
    with pytest.raises(NoWorkerError, match="1 excluded"):
        f.reserve(request(1), exclude=["d1"])
    assert f.running == 1


def test_draining_keeps_running_requests_and_takes_no_new_ones():
    f = fleet(2)
    first = f.reserve(request(0)).worker.name
    f.drain(first)
    assert {f.reserve(request(i)).worker.name for i in range(1, 4)} == {"d0", "d1"} - {first}
    assert loads(f)[first] == 1
    assert f.release("r0")


def test_leave_ends_the_reservations_that_it_names():
    f = fleet(2, "marginal_cost")
    for i, signature in enumerate(signatures(8)[0]):
        f.reserve(request(i, signature))
    lost = f.leave("d0")
    assert len(lost) == 8 - loads(f)["d1"]
    assert not any(f.release(i) for i in lost)
    f.check_integrity()
    f.join(Worker("d2"))
    assert loads(f)["d2"] == 0
    assert f.status()[0]["experts"] == 0.0
    f.check_integrity()


def test_membership_errors_name_the_worker():
    f = fleet(1)
    with pytest.raises(ValueError, match="'d0'"):
        f.join(Worker("d0"))
    for act in (f.leave, f.drain):
        with pytest.raises(KeyError, match="'nobody'"):
            act("nobody")


@pytest.mark.parametrize(
    ("signature", "reason"),
    [
        (None, Reason.NO_SIGNATURE),
        (Signature(np.ones((2, 16), np.uint32), 10), Reason.GEOMETRY),
        (Signature(np.ones((3, 16), np.uint32), 10, 0.4), Reason.LOW_COVERAGE),
        (Signature(np.zeros((3, 16), np.uint32), 10), Reason.EMPTY),
        (Signature(np.ones((3, 16), np.uint32), 0), Reason.EMPTY),
    ],
)
def test_unusable_signatures_fall_back_with_a_reason(signature, reason):
    f = fleet(policy="marginal_cost")
    decision = f.reserve(request(0, signature))
    assert decision.reason is reason
    assert decision.branch == "fallback"
    assert f.release("r0")
    f.check_integrity()


def test_zero_coverage_is_empty_even_when_allowed():
    f = Fleet(make_policy("marginal_cost"), [Worker("a")], geometry=SMALL, min_coverage=0.0)
    assert f.reserve(request(0, Signature(only(1).counts, 9, 0.0))).reason is Reason.EMPTY


def test_the_caller_s_problem_becomes_the_reason():
    f = fleet(policy="marginal_cost")
    assert f.reserve(request(0, problem=Reason.MALFORMED)).reason is Reason.MALFORMED


def test_a_policy_that_fails_costs_no_request(monkeypatch, caplog):
    f = fleet(policy="marginal_cost")
    f.reserve(request(0, only(1)))

    def choose(_):
        raise ZeroDivisionError("bug")

    monkeypatch.setattr(f.policy, "choose", choose)
    decision = f.reserve(request(1, only(1)))
    assert decision.reason is Reason.POLICY_ERROR
    assert "marginal_cost failed on request r1" in caplog.text
    f.check_integrity()
    assert f.release("r1")
    assert f.release("r0")
    assert not f._table.experts.load.any()


@pytest.mark.parametrize("dtype", [np.uint8, np.uint16, np.int64])
def test_other_integer_types_and_strides_are_read(dtype):
    f = fleet(policy="marginal_cost")
    wide = np.repeat(only(1).counts, 2, axis=1)[:, ::2].astype(dtype, order="F")
    assert f.reserve(request(0, Signature(wide, 50))).reason is None
    f.check_integrity()


def test_geometry_may_be_learnt_late_but_not_changed():
    f = fleet(policy="marginal_cost", geometry=None)
    assert f.reserve(request(0, only(1))).reason is Reason.GEOMETRY
    f.set_geometry(SMALL)
    assert f.reserve(request(1, only(1))).reason is None
    f.set_geometry(SMALL)
    with pytest.raises(ValueError, match="geometry"):
        f.set_geometry(Geometry(1, 4, 1))
    assert f.release("r0")
    assert f.release("r1")
    f.check_integrity()


def test_integrity_notices_a_counter_that_is_off():
    f = fleet(policy="marginal_cost")
    f.reserve(request(0, only(1)))
    f._table.experts.load[0, 3] += 1
    with pytest.raises(AssertionError, match=r"load\[0, 3\]"):
        f.check_integrity()


def test_threads_share_a_fleet():
    f = fleet(4, "marginal_cost")
    made = signatures(50)[0]

    def work(base):
        for i, signature in enumerate(made):
            f.reserve(request(base + i, signature))
        for i in range(len(made)):
            assert f.release(f"r{base + i}")

    threads = [threading.Thread(target=work, args=(1000 * t,)) for t in range(4)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert f.running == 0
    f.check_integrity()
    assert not f._table.experts.load.any()


@pytest.mark.parametrize("weight", [0, -1, float("nan"), float("inf")])
def test_worker_weights_must_be_positive(weight):
    with pytest.raises(ValueError, match="weight"):
        Worker("a", weight=weight)


def test_routing_loads_neither_torch_nor_http():
    code = (
        "import sys, eldr.routing; eldr.routing.Fleet(eldr.routing.make_policy('marginal_cost'));"
        "print([m for m in ('torch', 'vllm', 'aiohttp', 'sklearn', 'scipy') if m in sys.modules])"
    )
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert out.stdout.strip() == "[]"
