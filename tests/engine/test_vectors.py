import numpy as np
import pytest

torch = pytest.importorskip("torch")

from eldr.engine import vectors  # noqa: E402
from eldr.engine.cache import SignatureCache  # noqa: E402
from eldr.engine.layout import BlockLayout  # noqa: E402
from eldr.engine.step import PromptEnd  # noqa: E402
from eldr.geometry import Geometry  # noqa: E402

GEOMETRY = Geometry(2, 8, 3)
CPU = torch.device("cpu")


def centroids(workers=3, digest="d1", geometry=GEOMETRY):
    rng = np.random.default_rng(workers)
    shape = (geometry.layers, geometry.experts)
    made = {
        "centroids": rng.random((workers, *shape), np.float32),
        "weights": rng.random(shape, np.float32),
    }
    return made, vectors.pack("centroids", digest, geometry, made)


def survival(workers=2, digest="s1"):
    rng = np.random.default_rng(9)
    shape = (GEOMETRY.layers, GEOMETRY.experts)
    made = {
        "survival": rng.random((workers, *shape), np.float32),
        "mean": rng.random(shape, np.float32),
        "shrinkage": np.array([16.0], np.float32),
    }
    return made, vectors.pack("survival", digest, GEOMETRY, made)


def gathered(cache):
    ids = torch.rand(6, GEOMETRY.layers, GEOMETRY.experts).topk(GEOMETRY.top_k).indices.int()
    cache.accumulate(ids, torch.arange(4, 10))
    found = cache.gather([PromptEnd("r", (1, 2), (4, 2), 6)])
    found.enqueue_copy()
    return found.result()["r"]


def test_scores_are_the_cosine_of_weighted_counts_and_name_their_version():
    cache = SignatureCache(BlockLayout(0, 4, 5), GEOMETRY, CPU)
    assert gathered(cache).scores is None
    for digest, workers in (("d1", 3), ("d2", 5)):
        made, data = centroids(workers, digest)
        cache.vectors = vectors.load(data, GEOMETRY, CPU)
        found = gathered(cache)
        q = found.counts * made["weights"]
        expected = (made["centroids"] * made["weights"] * found.counts).sum((1, 2))
        expected = expected / np.linalg.norm(q)
        assert found.scores.digest == digest
        np.testing.assert_allclose(found.scores.values, expected, rtol=1e-5)


def test_survival_scores_are_the_expected_experts_added():
    cache = SignatureCache(BlockLayout(0, 4, 5), GEOMETRY, CPU)
    made, data = survival()
    cache.vectors = vectors.load(data, GEOMETRY, CPU)
    found = gathered(cache)
    p = (found.counts + 16.0 * made["mean"]) / (6 + 16.0)
    np.testing.assert_allclose(found.scores.values, (made["survival"] * p).sum((1, 2)), rtol=1e-5)


def test_files_that_cannot_be_used_are_refused_with_the_reason():
    _, data = centroids(geometry=Geometry(2, 16, 3))
    with pytest.raises(vectors.VectorsError, match="but this model has"):
        vectors.load(data, GEOMETRY, CPU)
    _, data = centroids()
    for broken in (b"", b"{}", data[:40], data[:-5], b"\xff" * 64):
        with pytest.raises(vectors.VectorsError):
            vectors.load(broken, GEOMETRY, CPU)
    made, _ = centroids()
    made["weights"][0, 0] = np.nan
    with pytest.raises(vectors.VectorsError, match="not finite"):
        vectors.load(vectors.pack("centroids", "d", GEOMETRY, made), GEOMETRY, CPU)
    made["weights"] = made["weights"][:1]
    with pytest.raises(vectors.VectorsError, match="expected float32"):
        vectors.load(vectors.pack("centroids", "d", GEOMETRY, made), GEOMETRY, CPU)
    with pytest.raises(vectors.VectorsError, match="needs"):
        vectors.pack("centroids", "d", GEOMETRY, {})
