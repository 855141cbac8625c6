"""Recorded files, normalisations and the fit: results, and clear refusals."""

import dataclasses

import numpy as np
import pytest

from eldr.routing import FitError, Recorded, RecordedError, fit_partition, load_recorded
from eldr.routing.clustering import balanced_kmeans
from eldr.routing.fit import inverse_document_frequency, normalise, purity
from tests.routing.helpers import SMALL, recorded

NAMES = ["a", "b", "c", "d"]


def test_the_fit_finds_the_domains():
    partition = fit_partition(recorded(120), NAMES)
    metrics = partition.metrics
    assert metrics["purity"] == 1.0
    assert metrics["adjusted_rand"] == 1.0
    assert metrics["sizes"] == [30] * 4
    assert metrics["gap"] < 1e-5
    assert metrics["similarity_own"] > metrics["similarity_other"] + 0.2
    lengths = np.linalg.norm(partition.centroids.reshape(4, -1), axis=1)
    np.testing.assert_allclose(lengths, 1, rtol=1e-5)
    assert partition.model == "test-model"


def test_the_fit_is_reproducible_and_restarts_never_hurt():
    data = recorded(90, domains=7)
    first, again = fit_partition(data, NAMES, seed=3), fit_partition(data, NAMES, seed=3)
    np.testing.assert_array_equal(first.centroids, again.centroids)
    assert first.digest == again.digest
    one = fit_partition(data, NAMES, seed=3, restarts=1)
    assert first.metrics["objective"] <= one.metrics["objective"] + 1e-9


def test_capacities_follow_weights():
    partition = fit_partition(recorded(100), NAMES, weights=[2, 1, 1, 1])
    assert partition.metrics["sizes"] == [40, 20, 20, 20]


def test_as_many_signatures_as_workers():
    assert fit_partition(recorded(4), NAMES).metrics["sizes"] == [1] * 4


@pytest.mark.parametrize(
    ("count", "names", "message"),
    [
        (3, NAMES, "3 signatures for 4 workers"),
        (9, [], "unique and not empty"),
        (9, ["a", "a"], "unique"),
    ],
)
def test_impossible_fits(count, names, message):
    with pytest.raises(FitError, match=message):
        fit_partition(recorded(count), names)


def test_signatures_without_hits_are_named():
    data = recorded(9)
    data.counts[5] = 0
    with pytest.raises(FitError, match="1 signatures have no hits, the first is 5"):
        fit_partition(data, NAMES)


def test_idf_follows_the_paper_and_gives_way_when_it_says_nothing():
    data = recorded(20)
    idf = inverse_document_frequency(data.counts)
    seen = int((data.counts[:, 1, 4] > 0).sum())
    assert idf[1, 4] == pytest.approx(np.log(21 / (seen + 1)))
    everywhere = dataclasses.replace(
        data, counts=np.maximum(data.counts, 1), tokens=data.tokens * 9
    )
    partition = fit_partition(everywhere, NAMES)
    assert partition.metrics["idf"] is False
    assert (partition.idf == 1).all()


def test_a_layer_mask_zeroes_the_other_layers():
    partition = fit_partition(recorded(60), NAMES, mask=np.array([True, False, True]))
    assert not partition.centroids[:, 1].any()
    assert partition.mask.tolist() == [True, False, True]


def test_empty_clusters_keep_their_centroid():
    points = np.eye(4, dtype=np.float32)
    clusters = balanced_kmeans(points, np.array([4, 0]), restarts=1)
    assert np.isfinite(clusters.centroids).all()
    np.testing.assert_allclose(np.linalg.norm(clusters.centroids, axis=1), 1, rtol=1e-5)


def test_purity():
    assert purity(np.array([0, 0, 1, 1]), np.array(["x", "x", "y", "x"])) == 0.75


def test_recorded_round_trip(tmp_path):
    data = dataclasses.replace(recorded(10), decode=recorded(10).counts)
    data.save(tmp_path / "s.any")
    loaded = load_recorded(tmp_path / "s.any")
    for name in ("counts", "tokens", "coverage", "labels", "decode"):
        np.testing.assert_array_equal(getattr(loaded, name), getattr(data, name))
    assert (loaded.geometry, loaded.model) == (SMALL, "test-model")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"counts": None}, "lacks the key 'counts'"),
        ({"model": None}, "lacks the key 'model'"),
        ({"counts": np.zeros((10, 3, 16), np.float32)}, "counts: expected"),
        ({"counts": np.zeros((10, 3, 15), np.uint16)}, "counts: expected"),
        ({"counts": np.full((10, 3, 16), 60_000, np.uint16)}, "more hits"),
        ({"tokens": np.zeros(10, np.int32)}, "tokens"),
        ({"coverage": np.zeros(10, np.float32)}, "coverage"),
        ({"coverage": np.full(10, np.nan, np.float32)}, "coverage"),
        ({"coverage": np.full(10, 1.5, np.float32)}, "coverage"),
        ({"geometry": np.array([3, 16])}, "not enough values"),
        ({"geometry": np.array([3, 16, 17])}, "top_k"),
        ({"labels": np.array(["x"])}, "labels"),
        ({"decode": np.zeros((1, 3, 16), np.uint16)}, "decode: expected"),
    ],
)
def test_malformed_recordings(tmp_path, changes, message):
    recorded(10).save(tmp_path / "good")
    with np.load(tmp_path / "good") as file:
        arrays = {**{k: file[k] for k in file.files}, **changes}
    with open(tmp_path / "bad", "wb") as out:
        np.savez(out, **{k: v for k, v in arrays.items() if v is not None})
    with pytest.raises(RecordedError, match=message):
        load_recorded(tmp_path / "bad")


def test_unreadable_recordings(tmp_path):
    for content in (b"", b"hello", b"PK\x03\x04broken"):
        (tmp_path / "x").write_bytes(content)
        with pytest.raises(RecordedError, match="cannot read"):
            load_recorded(tmp_path / "x")
    with pytest.raises(RecordedError, match="cannot read"):
        load_recorded(tmp_path / "absent")
    with open(tmp_path / "pickle", "wb") as out:
        np.savez(out, counts=np.array([{}], object))
    with pytest.raises(RecordedError, match="cannot read"):
        load_recorded(tmp_path / "pickle")


def test_recorded_is_checked_on_construction():
    good = recorded(4)
    with pytest.raises(RecordedError, match="counts: expected"):
        Recorded(good.counts[:2], good.tokens, good.coverage, SMALL)


def test_device_points_cluster_like_host_points():
    torch = pytest.importorskip("torch")
    points = normalise(recorded(80, domains=6).counts, np.ones((3, 16), np.float32))
    capacity = np.full(4, 20)
    host = balanced_kmeans(points, capacity)
    for array in (torch.from_numpy(points), Dlpack(torch.from_numpy(points))):
        device = balanced_kmeans(array, capacity)
        np.testing.assert_array_equal(device.home, host.home)
        np.testing.assert_allclose(device.centroids, host.centroids, atol=1e-5)
    with pytest.raises(ValueError, match="float32"):
        balanced_kmeans(torch.zeros(4, 4, dtype=torch.float64), capacity)


class Dlpack:
    """An array of another library, as torch sees it."""

    def __init__(self, tensor):
        self._tensor = tensor

    def __dlpack__(self, **options):
        return self._tensor.__dlpack__(**options)

    def __dlpack_device__(self):
        return self._tensor.__dlpack_device__()


def test_layers_are_selected_by_decode_counts():
    data = dataclasses.replace(recorded(60), decode=recorded(60).counts)
    partition = fit_partition(data, NAMES, select_layers=True)
    assert partition.metrics["layers_used"] == partition.mask.sum() >= 1
    assert 0 < partition.metrics["rho"] <= 1
    with pytest.raises(FitError, match="decode counts"):
        fit_partition(recorded(60), NAMES, select_layers=True)
