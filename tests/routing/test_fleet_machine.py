"""A fleet under any sequence of operations: counters and survival always fit the model."""

import numpy as np
import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    Bundle,
    RuleBasedStateMachine,
    consumes,
    initialize,
    invariant,
    precondition,
    rule,
)

from eldr.routing import POLICIES, Fleet, NoWorkerError, RouteRequest, Worker, make_policy
from tests.routing.helpers import SMALL, axis_partition, signatures

MADE = [None, *signatures(24)[0]]
NAMES = [f"d{i}" for i in range(6)]
OPTIONS = {"domain": {"pools": {"x": NAMES[:2], "y": NAMES[2:]}}}
for _name in ("locality_band", "nearest", "nearest_two", "bounded_load"):
    OPTIONS[_name] = {"partition": axis_partition(NAMES)}


class FleetMachine(RuleBasedStateMachine):
    """Reserve, release, cancel twice, join, leave and drain in any order."""

    reserved = Bundle("reserved")

    @initialize(policy=st.sampled_from(sorted(POLICIES)), workers=st.integers(0, 4))
    def start(self, policy, workers):
        self.fleet = Fleet(make_policy(policy, **OPTIONS.get(policy, {})), geometry=SMALL)
        self.where = {}
        self.draining = {}
        self.count = 0
        for name in NAMES[:workers]:
            self.join(name)

    @rule(name=st.sampled_from(NAMES))
    def join(self, name):
        if name in self.draining:
            with pytest.raises(ValueError, match=name):
                self.fleet.join(Worker(name))
            return
        self.fleet.join(Worker(name, weight=1.0 + NAMES.index(name)))
        self.draining[name] = False

    @rule(name=st.sampled_from(NAMES), draining=st.booleans())
    def drain(self, name, draining):
        if name not in self.draining:
            with pytest.raises(KeyError):
                self.fleet.drain(name, draining)
            return
        self.fleet.drain(name, draining)
        self.draining[name] = draining

    @rule(name=st.sampled_from(NAMES))
    def leave(self, name):
        if name not in self.draining:
            with pytest.raises(KeyError):
                self.fleet.leave(name)
            return
        lost = {i for i, worker in self.where.items() if worker == name}
        assert set(self.fleet.leave(name)) == lost
        for i in lost:
            del self.where[i]
        del self.draining[name]

    @rule(
        target=reserved,
        which=st.integers(0, len(MADE) - 1),
        exclude=st.sets(st.sampled_from(NAMES), max_size=2),
        label=st.sampled_from([None, "x", "y", "z"]),
    )
    def reserve(self, which, exclude, label):
        self.count += 1
        request = RouteRequest(
            f"r{self.count}", MADE[which], prompt_tokens=which, session=label, domain=label
        )
        allowed = {n for n, draining in self.draining.items() if not draining} - exclude
        if not allowed:
            with pytest.raises(NoWorkerError):
                self.fleet.reserve(request, exclude)
        else:
            decision = self.fleet.reserve(request, exclude)
            assert decision.worker.name in allowed
            assert set(decision.explain()["candidates"]) == allowed
            self.where[request.id] = decision.worker.name
        return request.id

    @rule(request=consumes(reserved))
    def release(self, request):
        assert self.fleet.release(request) is (request in self.where)
        self.where.pop(request, None)
        assert self.fleet.release(request) is False

    @precondition(lambda self: self.where)
    @rule()
    def reserving_twice_changes_nothing(self):
        with pytest.raises(ValueError, match="reserved already"):
            self.fleet.reserve(RouteRequest(next(iter(self.where))))

    @invariant()
    def counters_fit(self):
        if not hasattr(self, "fleet"):
            return
        self.fleet.check_integrity()
        status = {row["name"]: row for row in self.fleet.status()}
        assert {n: row["draining"] for n, row in status.items()} == self.draining
        placed = list(self.where.values())
        assert {n: row["requests"] for n, row in status.items()} == {
            n: placed.count(n) for n in self.draining
        }
        assert self.fleet.running == len(self.where)

    def teardown(self):
        if not hasattr(self, "fleet"):
            return
        for request in list(self.where):
            assert self.fleet.release(request)
        table = self.fleet._table
        assert not table.requests.any()
        assert not table.kv_tokens.any()
        assert not table.experts.load.any()
        assert (table.experts.survival == 255).all()
        assert (table.experts.idle == 255 * SMALL.cells).all()


# 100 runs of up to 100 operations: about 10,000.
FleetMachine.TestCase.settings = settings(
    max_examples=100,
    stateful_step_count=100,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)
TestFleetMachine = FleetMachine.TestCase


def test_ten_thousand_operations_return_exactly_to_the_start():
    rng = np.random.default_rng(7)
    fleet = Fleet(make_policy("marginal_cost"), [Worker(n) for n in NAMES], geometry=SMALL)
    running, done = [], 0
    for i in range(10_000):
        if running and rng.random() < 0.5:
            assert fleet.release(running.pop(int(rng.integers(len(running)))))
            done += 1
        else:
            fleet.reserve(RouteRequest(str(i), MADE[int(rng.integers(len(MADE)))]))
            running.append(str(i))
    assert done > 4000
    for request in running:
        assert fleet.release(request)
    fleet.check_integrity()
    assert not fleet._table.experts.load.any()
