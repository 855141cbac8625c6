"""Signature and clustering variants that the paper compares, for studies only."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import numpy.typing as npt

from eldr.routing.fit import fit_partition, inverse_document_frequency, normalise
from eldr.routing.partition import Partition
from eldr.routing.recorded import Recorded
from eldr.signature import Signature
from eldr.workload.traces import ExpertTrace

Counts = npt.NDArray[np.uint32]
_FEW = 32  # tokens of the short signatures
_SQRT_SCALE = 16.0  # square roots are stored as integers


def _binary(trace: ExpertTrace) -> Counts:
    return (trace.prompt_counts > 0).astype(np.uint32)


def _sqrt(trace: ExpertTrace) -> Counts:
    return np.rint(_SQRT_SCALE * np.sqrt(trace.prompt_counts)).astype(np.uint32)


def _first(trace: ExpertTrace) -> Counts:
    return trace.counts(trace.offsets[:-1], np.minimum(trace.offsets[:-1] + _FEW, trace.cuts))


def _last(trace: ExpertTrace) -> Counts:
    return trace.counts(np.maximum(trace.cuts - _FEW, trace.offsets[:-1]), trace.cuts)


# Name -> uint32 [N, L, E] in place of the exact prompt counts.
SIGNATURES: dict[str, Callable[[ExpertTrace], Counts]] = {
    "count": lambda trace: trace.prompt_counts,
    "binary": _binary,
    "sqrt": _sqrt,
    "first32": _first,
    "last32": _last,
}


def signatures(trace: ExpertTrace, variant: str = "count") -> list[Signature]:
    """The prompt signature of every recorded request.

    Raises:
        ValueError: unknown variant.
    """
    if variant not in SIGNATURES:
        raise ValueError(f"unknown signature {variant!r}; there are {', '.join(SIGNATURES)}")
    counts = SIGNATURES[variant](trace)
    # Tokens that explain the counts: a variant's sums are not those of the whole prompt.
    most = counts.sum(axis=2, dtype=np.int64).max(axis=1)
    tokens = np.maximum(1, -(-most // trace.geometry.top_k))
    tokens = np.maximum(tokens, counts.max(axis=(1, 2)))
    return [Signature(c, int(n)) for c, n in zip(counts, tokens, strict=True)]


def plain_partition(recorded: Recorded, workers: Sequence[str], seed: int) -> Partition:
    """Spherical K-means without capacities: the paper's control for balanced clustering."""
    from sklearn.cluster import KMeans

    idf = inverse_document_frequency(recorded.counts)
    if not ((recorded.counts > 0) & (idf > 0)).any(axis=(1, 2)).all():
        idf = np.ones_like(idf)
    points = normalise(recorded.counts, idf)
    fitted = KMeans(len(workers), n_init=4, random_state=seed).fit(points)
    centroids = np.maximum(fitted.cluster_centers_, 0.0)  # rounding leaves traces below zero
    centroids = centroids / np.maximum(np.linalg.norm(centroids, axis=1, keepdims=True), 1e-12)
    geometry = recorded.geometry
    return Partition(
        geometry,
        tuple(workers),
        np.ascontiguousarray(
            centroids.reshape(len(workers), geometry.layers, geometry.experts), np.float32
        ),
        idf,
        np.ones(geometry.layers, np.bool_),
        recorded.model,
    )


def balanced_partition(
    recorded: Recorded, workers: Sequence[str], seed: int, idf: bool
) -> Partition:
    """The published fit."""
    return fit_partition(recorded, list(workers), seed=seed, idf=idf)
