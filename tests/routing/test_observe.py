"""Measured steps and expert use reach the fleet, and prediction stays exactly removable."""

import numpy as np
import pytest

from eldr.routing import Fleet, StepSample, Worker, make_policy
from tests.routing.helpers import SMALL, only, request, signatures


def fleet(trust=1.0):
    workers = [Worker("d0"), Worker("d1")]
    return Fleet(make_policy("marginal_cost"), workers, geometry=SMALL, trust=trust)


def sample(batch):
    return StepSample(100, 1.0, 100.0 * batch, 2000.0)


def test_another_router_s_requests_are_seen():
    f = fleet()
    use = np.full((3, 16), 0.9)
    f.observe("d0", sample(20), use)
    f.check_integrity()
    assert f.reserve(request(0, only(1))).worker.name == "d1"
    assert f.reserve(request(1)).worker.name == "d1"  # least requests counts them too
    f.observe("d0", sample(1), use * 0)
    assert f.status()[0]["experts"] == 0.0


def test_an_idle_worker_forgets_the_others():
    f = fleet()
    f.observe("d0", sample(20), np.full((3, 16), 0.9))
    f.reserve(request(0, only(1)), exclude=["d1"])
    predicted = f.status()[0]["experts"]
    f.observe("d0", StepSample(0, 0.0, 0.0, 0.0))
    assert 0 < f.status()[0]["experts"] < predicted
    f.check_integrity()
    assert f.reserve(request(1)).worker.name == "d1"


def test_measurements_do_not_disturb_exact_removal():
    f = fleet(0.7)
    rng = np.random.default_rng(0)
    for i, signature in enumerate(signatures(60)[0]):
        f.reserve(request(i, signature))
        f.observe(f"d{i % 2}", sample(3), rng.random((3, 16)))
        if i % 3 == 2:
            assert f.release(f"r{i - 1}")
        f.check_integrity()
    for i in range(60):
        f.release(f"r{i}")
    experts = f._table.experts
    np.testing.assert_array_equal(experts.load, experts.other)
    f.check_integrity()


def test_without_trust_predictions_stand():
    f = fleet(0.0)
    f.observe("d0", sample(20), np.ones((3, 16)))
    assert f.status()[0]["experts"] == 0.0
    f.observe("gone", sample(1))
    f.check_integrity()


@pytest.mark.parametrize("use", [np.full(48, 1.5), np.full(48, np.nan), np.zeros(47)])
def test_bad_use_is_refused(use):
    with pytest.raises(ValueError, match="use of d0"):
        fleet().observe("d0", sample(1), use)
