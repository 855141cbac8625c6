import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from eldr.kernels import Centroids, Survival, score, score_ref
from eldr.kernels.score import operands
from tests.kernels import oracles


def reference(counts, scorer, *, tokens=None):
    scores = torch.empty(counts.shape[0], scorer.vectors.shape[0])
    score_ref(counts, *operands(scorer, tokens), scores)
    return scores


def portable(counts, scorer, *, tokens=None):
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("ELDR_CPU", "portable")
        return score(counts, scorer, tokens=tokens)


BACKENDS = {"served": score, "portable": portable, "reference": reference}
SHAPES = st.sampled_from([(1, 1), (3, 60), (4, 512), (9, 128), (17, 61)])  # (L, E)


@pytest.mark.parametrize("backend", BACKENDS)
@settings(max_examples=40, deadline=None, derandomize=True)
@given(
    seed=st.integers(0, 2**32 - 1),
    shape=SHAPES,
    requests=st.sampled_from([0, 1, 2, 17]),
    workers=st.sampled_from([1, 2, 3, 4, 5, 16, 37]),
)
def test_centroids_are_cosine_similarities_of_weighted_counts(
    backend, seed, shape, requests, workers
):
    rng = np.random.default_rng(seed)
    counts = rng.integers(0, 4000, (requests, *shape)).astype(np.int32)
    counts[:1] = 0  # an empty signature scores 0
    weights = rng.random(shape) * (rng.random(shape[0]) < 0.7)[:, None]
    centroids = rng.random((workers, *shape))
    centroids /= np.linalg.norm(centroids.reshape(workers, -1), axis=1)[:, None, None]
    scorer = Centroids.fold(torch.from_numpy(centroids), torch.from_numpy(weights))
    got = BACKENDS[backend](torch.from_numpy(counts), scorer)
    want = oracles.score_centroids(counts, centroids, weights)
    np.testing.assert_allclose(got.numpy(), want, rtol=2e-5, atol=2e-6)


@pytest.mark.parametrize("backend", BACKENDS)
@settings(max_examples=40, deadline=None, derandomize=True)
@given(
    seed=st.integers(0, 2**32 - 1),
    shape=SHAPES,
    workers=st.sampled_from([1, 4, 7, 33]),
    k=st.sampled_from([0.0, 0.5, 64.0]),
)
def test_survival_is_expected_added_experts_of_shrunk_counts(backend, seed, shape, workers, k):
    rng = np.random.default_rng(seed)
    tokens = np.array([0, 1, 100, 30_000], np.int32)
    counts = rng.integers(0, tokens[:, None, None] + 1, (4, *shape)).astype(np.int32)
    survival, mean = rng.random((workers, *shape)), rng.random(shape)
    scorer = Survival.of(torch.from_numpy(survival), torch.from_numpy(mean), k)
    got = BACKENDS[backend](torch.from_numpy(counts), scorer, tokens=torch.from_numpy(tokens))
    want = oracles.score_survival(counts, survival, mean, k, tokens)
    np.testing.assert_allclose(got.numpy(), want, rtol=3e-5, atol=1e-5)


def large(requests: int, workers: int) -> tuple[torch.Tensor, Centroids]:
    generator = torch.Generator().manual_seed(requests + workers)
    counts = torch.randint(0, 3000, (requests, 48, 128), generator=generator, dtype=torch.int32)
    vectors = torch.rand(workers, 48 * 128, generator=generator)
    return counts, Centroids(vectors, torch.rand(48 * 128, generator=generator))


@pytest.mark.parametrize(("requests", "workers"), [(1, 1024), (256, 2)])
def test_the_largest_sizes(requests, workers):
    counts, scorer = large(requests, workers)
    torch.testing.assert_close(
        score(counts, scorer), reference(counts, scorer), rtol=2e-5, atol=1e-5
    )


def test_the_same_bits_for_any_number_of_threads_and_requests_beside():
    counts, scorer = large(9, 37)
    before, results = torch.get_num_threads(), []
    try:
        for threads in (1, 2):
            torch.set_num_threads(threads)
            results.append(score(counts, scorer))
    finally:
        torch.set_num_threads(before)
    alone = torch.cat([score(counts[i : i + 1], scorer) for i in range(9)])
    assert torch.equal(results[0], results[1])
    assert torch.equal(results[0], alone)


def scorers() -> dict[str, Centroids | Survival]:
    return {
        "centroids": Centroids(torch.ones(2, 6), torch.ones(6)),
        "survival": Survival(torch.ones(2, 6), torch.ones(2), 1.0),
    }


COUNTS = torch.ones(3, 2, 3, dtype=torch.int32)
TOKENS = torch.ones(3, dtype=torch.int32)
META = torch.ones(6, device="meta")
BAD = [
    ("centroids", {"counts": COUNTS.long()}, TypeError, "counts: expected int32, got int64"),
    ("centroids", {"counts": COUNTS[0]}, ValueError, r"counts: expected shape \[R, L, E\]"),
    ("centroids", {"counts": COUNTS.mT}, ValueError, "counts: expected a contiguous"),
    ("centroids", {"counts": COUNTS[:, :1].clone()}, ValueError, "vectors have 6 cells, .* have 3"),
    ("centroids", {"tokens": TOKENS}, ValueError, "tokens: needed with Survival and meaningless"),
    ("survival", {"tokens": None}, ValueError, "tokens: needed with Survival"),
    ("survival", {"tokens": TOKENS.long()}, TypeError, "tokens: expected int32, got int64"),
    ("survival", {"tokens": TOKENS[:2]}, ValueError, r"tokens: expected shape \[3\], got \[2\]"),
    ("survival", {"tokens": -TOKENS}, ValueError, r"tokens: -1 at position 0 is not in \[0"),
    ("centroids", {"scores": torch.zeros(3, 3)}, ValueError, r"scores: expected shape \[3, 2\]"),
    ("centroids", {"scores": torch.zeros(3, 2).double()}, TypeError, "scores: .*got float64"),
    ("centroids", {"scores": torch.zeros(3, 2, device="meta")}, ValueError, "scores: on meta, but"),
    (
        "survival",
        {"tokens": TOKENS.to("meta")},
        ValueError,
        "tokens: on meta, but counts is on cpu",
    ),
    ("centroids", {"scorer": "none"}, TypeError, "scorer: expected Centroids or Survival, got str"),
]


@pytest.mark.parametrize(("kind", "change", "error", "message"), BAD)
def test_bad_arguments_are_named(kind, change, error, message):
    call = {"counts": COUNTS, "scorer": scorers()[kind]}
    call |= {"tokens": TOKENS} if kind == "survival" else {}
    with pytest.raises(error, match=message):
        score(**call | change)


@pytest.mark.parametrize(
    ("build", "error", "message"),
    [
        (lambda: Centroids(torch.ones(2, 6).double(), torch.ones(6)), TypeError, "got float64"),
        (lambda: Centroids(torch.ones(2, 6), torch.ones(5)), ValueError, r"squares: .*\[6\]"),
        (lambda: Centroids(torch.ones(0, 6), torch.ones(6)), ValueError, r"0 is not in \[1, 1024"),
        (lambda: Centroids(torch.ones(1025, 1), torch.ones(1)), ValueError, "1025 is not in"),
        (lambda: Survival(torch.ones(2, 6), torch.ones(3), 1.0), ValueError, r"prior: .*\[2\]"),
        (lambda: Survival(torch.ones(2, 6), torch.ones(2), -1.0), ValueError, "shrinkage: -1.0"),
        (
            lambda: Survival(torch.ones(2, 6), torch.ones(2), "1"),
            ValueError,
            "shrinkage: '1' is not",
        ),
        (lambda: Centroids(torch.ones(2, 6), META), ValueError, "squares: on meta, but vectors is"),
        (
            lambda: Centroids.fold(torch.ones(2, 3, 4), torch.ones(4)),
            ValueError,
            r"weights: .*3, 4",
        ),
        (
            lambda: Centroids.fold(torch.ones(2, 3, 4).int(), torch.ones(3, 4)),
            TypeError,
            "got int32",
        ),
        (
            lambda: Survival.of(torch.ones(2, 3, 4), torch.ones(1, 4), 1.0),
            ValueError,
            r"mean: .*3, 4",
        ),
        (
            lambda: Survival.of(torch.ones(2, 3), torch.ones(3), 1.0),
            ValueError,
            r"survival: .*W, L",
        ),
        (lambda: Survival(torch.ones(6, 2).T, torch.ones(2), 1.0), ValueError, "vectors: expected"),
    ],
)
def test_bad_vectors_are_refused_when_built(build, error, message):
    with pytest.raises(error, match=message):
        build()


@pytest.mark.parametrize("kind", ["centroids", "survival"])
def test_opcheck(kind):
    scorer = scorers()[kind]
    tokens = TOKENS if kind == "survival" else None
    call = (COUNTS, *operands(scorer, tokens), torch.empty(3, 2))
    torch.library.opcheck(torch.ops.eldr.score.default, call)
