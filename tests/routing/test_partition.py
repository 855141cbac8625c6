"""The artefact: round trip, binding, and every way to be unusable."""

import json

import numpy as np
import pytest
from safetensors.numpy import save_file

from eldr.geometry import Geometry
from eldr.routing import Partition, PartitionError, fit_partition, load_partition
from tests.routing.helpers import SMALL, axis_partition, recorded

NAMES = ["a", "b", "c"]


@pytest.fixture(scope="module")
def fitted():
    return fit_partition(recorded(60), NAMES)


@pytest.fixture
def path(fitted, tmp_path):
    fitted.save(tmp_path / "p.safetensors")
    return tmp_path / "p.safetensors"


def parts(fitted, **changes):
    metadata = {
        "format": "eldr-partition",
        "version": "1",
        "geometry": json.dumps([3, 16, 2]),
        "geometry_digest": SMALL.digest,
        "model": "m",
        "workers": json.dumps(NAMES),
        "metrics": "{}",
    }
    tensors = {
        "centroids": fitted.centroids,
        "idf": fitted.idf,
        "mask": fitted.mask.astype(np.uint8),
    }
    for key, value in changes.items():
        target = tensors if key in tensors else metadata
        if value is None:
            del target[key]
        else:
            target[key] = value
    return tensors, metadata


def test_round_trip(fitted, path):
    loaded = load_partition(path, geometry=SMALL, workers=NAMES)
    np.testing.assert_array_equal(loaded.centroids, fitted.centroids)
    np.testing.assert_array_equal(loaded.weights, fitted.weights)
    assert loaded.names == fitted.names
    assert loaded.metrics == fitted.metrics
    assert loaded.digest == fitted.digest
    assert [p.name for p in path.parent.iterdir()] == [path.name]


def test_another_fleet_or_geometry_is_refused(path):
    with pytest.raises(PartitionError, match="3 workers, but the fleet has 2"):
        load_partition(path, workers=["a", "b"])
    with pytest.raises(PartitionError, match="3 layers"):
        load_partition(path, geometry=Geometry(4, 16, 2))
    assert load_partition(path, workers=["x", "y", "z"]).names == ("x", "y", "z")
    assert load_partition(path, workers=["c", "b", "a"]).names == ("a", "b", "c")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"version": "2"}, "version 2"),
        ({"version": "x"}, "version 'x'"),
        ({"format": "other"}, "not a partition"),
        ({"geometry": None}, "lacks 'geometry'"),
        ({"centroids": None}, "lacks 'centroids'"),
        ({"idf": np.zeros((3, 15), np.float32)}, "idf must be"),
        ({"idf": np.zeros((3, 16), np.float32)}, "every weight is zero"),
        ({"idf": np.full((3, 16), np.nan, np.float32)}, "not finite"),
        ({"mask": np.zeros(3, np.uint8)}, "every weight is zero"),
        ({"workers": '["a", "a", "b"]'}, "unique"),
        ({"workers": "["}, "malformed"),
        ({"geometry": "[3, 16]"}, "malformed"),
        ({"geometry": "[3, 16, 99]"}, "malformed"),
        ({"geometry_digest": "0" * 16}, "digest disagree"),
    ],
)
def test_malformed_files_are_refused(fitted, tmp_path, changes, message):
    tensors, metadata = parts(fitted, **changes)
    save_file(tensors, tmp_path / "bad", metadata)
    with pytest.raises(PartitionError, match=message):
        load_partition(tmp_path / "bad")


def test_unreadable_files_are_refused(tmp_path):
    with pytest.raises(PartitionError, match="cannot read"):
        load_partition(tmp_path / "absent")
    (tmp_path / "text").write_text("hello")
    with pytest.raises(PartitionError, match="cannot read"):
        load_partition(tmp_path / "text")


def test_negative_centroids_are_refused():
    good = axis_partition(NAMES)
    with pytest.raises(PartitionError, match="negative"):
        Partition(SMALL, good.names, -good.centroids, good.idf, good.mask)


def test_a_failed_save_leaves_the_old_file(fitted, path, monkeypatch):
    before = path.read_bytes()
    monkeypatch.setattr("pathlib.Path.replace", lambda *_: (_ for _ in ()).throw(OSError("full")))
    with pytest.raises(OSError, match="full"):
        fitted.save(path)
    assert path.read_bytes() == before
    assert len(list(path.parent.iterdir())) == 1
