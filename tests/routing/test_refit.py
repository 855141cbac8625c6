"""Drift, refit with worker identities kept, joins and leaves, and the background thread."""

import threading

import numpy as np
import pytest

from eldr.routing import fit_partition, make_policy
from eldr.routing.refit import Window, align, measure_drift, refit, remap
from eldr.routing.refitter import Refitter
from eldr.signature import Signature
from tests.routing.helpers import SMALL, axis_partition, only, recorded, signatures

NAMES = ["a", "b", "c", "d"]


def window(made, size=1024):
    held = Window(SMALL, size)
    for signature in made:
        held.add(signature)
    return held


@pytest.fixture(scope="module")
def fitted():
    return fit_partition(recorded(80), NAMES)


def test_the_window_forgets_the_oldest():
    held = window([only(i % 16) for i in range(10)], size=4)
    assert len(held) == 4
    assert held.counts()[:, 0].argmax(axis=1).tolist() == [6, 7, 8, 9]


def test_same_traffic_is_no_drift_and_other_traffic_is(fitted):
    calm = measure_drift(fitted, window(signatures(80)[0]))
    assert not calm.drifted
    assert calm.gain > 0
    assert calm.imbalance < 0.1
    other = measure_drift(fitted, window(signatures(80, seed=9)[0]))
    assert other.drifted
    assert other.similarity < calm.similarity
    crowd = measure_drift(fitted, window(signatures(80, domains=4)[0][::4]))
    assert crowd.imbalance > 0.7
    assert crowd.drifted


def test_drift_needs_signatures(fitted):
    with pytest.raises(ValueError, match="window"):
        measure_drift(fitted, Window(SMALL))


def test_align_gives_every_worker_its_own_centroid_back():
    old = axis_partition(NAMES)
    order = np.array([2, 0, 3, 1])
    shuffled = axis_partition(NAMES)
    shuffled.centroids[:] = old.centroids[order]
    np.testing.assert_array_equal(align(shuffled, old).centroids, old.centroids)
    with pytest.raises(ValueError, match="other workers"):
        align(axis_partition(["x"]), old)


def test_refit_follows_the_traffic_and_keeps_identities(fitted):
    same = refit(fitted, window(signatures(80)[0]))
    close = np.einsum("wle,wle->w", same.centroids, fitted.centroids)
    assert (close > 0.99).all()
    moved = window(signatures(80, seed=9)[0])
    after = refit(fitted, moved)
    assert not measure_drift(after, moved).drifted
    assert after.metrics["refits"] == 1
    np.testing.assert_array_equal(after.idf, fitted.idf)


def test_remap_moves_nobody_who_stays(fitted):
    fewer = remap(fitted, ["a", "c"])
    np.testing.assert_array_equal(fewer.centroids, fitted.centroids[[0, 2]])
    crowd = window(signatures(40)[0][::4])
    more = remap(fitted, [*NAMES, "new"], crowd)
    np.testing.assert_array_equal(more.centroids[:4], fitted.centroids)
    busy = int(np.bincount(
        (crowd.counts().reshape(10, -1) * fitted.weights.reshape(-1)
         @ fitted.centroids.reshape(4, -1).T).argmax(axis=1), minlength=4
    ).argmax())  # fmt: skip
    np.testing.assert_array_equal(more.centroids[4], fitted.centroids[busy])
    swapped = remap(fitted, ["b", "x", "y"])
    np.testing.assert_array_equal(swapped.centroids[0], fitted.centroids[1])
    with pytest.raises(ValueError, match="no workers"):
        remap(fitted, [])


def test_the_refitter_replaces_pauses_and_survives_failures(fitted):
    policy = make_policy("locality_band", partition=fitted)
    held = window(signatures(30)[0])
    refitter = Refitter(policy, held, least=40)
    assert not refitter.step()  # too few
    for signature in signatures(80, seed=9)[0]:
        held.add(signature)
    assert refitter.step()
    assert refitter.refits == 1
    assert policy.partition is not fitted
    assert policy.partition.names == fitted.names
    assert not policy.paused
    assert refitter.last.gain >= 0
    kept = policy.partition
    assert not refitter.step()  # no drift any more
    for _ in range(1024):
        held.add(Signature(np.zeros((3, 16), np.uint32), 5))
    assert not refitter.step()
    assert (refitter.refits, refitter.failures) == (1, 1)
    assert policy.partition is kept


def test_load_decides_while_no_partition_promises_a_gain(fitted):
    """Every request alike: whoever is nearest to them would serve all of them alone."""
    policy = make_policy("locality_band", partition=fitted)
    held = window([only(3)] * 80)
    refitter = Refitter(policy, held)
    assert not refitter.step()
    assert policy.partition is fitted
    assert policy.paused
    assert refitter.last.gain < 0
    for signature in signatures(1024)[0]:
        held.add(signature)
    assert not refitter.step()  # what it was fitted to is back
    assert not policy.paused


def test_the_thread_stops_when_told(fitted):
    policy = make_policy("locality_band", partition=fitted)
    refitter = Refitter(policy, window(signatures(80, seed=9)[0]), least=10)
    stepped = threading.Event()
    step = refitter.step
    refitter.step = lambda: (step(), stepped.set())[0]
    refitter.start(interval=0.001)
    assert stepped.wait(30)
    with pytest.raises(RuntimeError, match="started"):
        refitter.start()
    refitter.stop()
    assert refitter.refits >= 1
