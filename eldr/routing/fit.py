"""Fits a partition to recorded signatures."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from eldr.routing.assignment import capacities
from eldr.routing.clustering import Clusters, balanced_kmeans
from eldr.routing.layers import layer_mask
from eldr.routing.partition import Partition
from eldr.routing.recorded import Recorded


class FitError(ValueError):
    """Signatures that no partition can be fitted to; the message says what to record."""


def inverse_document_frequency(counts: npt.NDArray[Any]) -> npt.NDArray[np.float32]:
    """log((N + 1) / (df + 1)) of counts [N, L, E], float32 [L, E]; df = requests with a hit.

    arXiv 2607.00466, section 4.2.
    """
    seen = (counts > 0).sum(axis=0)
    idf: npt.NDArray[np.float32] = np.log((len(counts) + 1) / (seen + 1)).astype(np.float32)
    return idf


def fit_partition(
    recorded: Recorded,
    workers: Sequence[str],
    *,
    weights: Sequence[float] | None = None,
    idf: bool = True,
    mask: npt.NDArray[np.bool_] | None = None,
    select_layers: bool = False,
    restarts: int = 4,
    seed: int = 0,
    method: str = "auto",
) -> Partition:
    """Balanced spherical K-means with one centroid per worker.

    Args:
        recorded: at least one signature per worker.
        workers: names, one centroid each.
        weights: relative capacities, all 1 by default.
        idf: weigh hits by inverse document frequency, as published. Experts that every recorded
            request used weigh nothing then; if that leaves a request empty, the fit goes without.
        mask: bool [L], layers to use, all by default.
        select_layers: choose the mask by `eldr.routing.layers`; needs decode counts.
        restarts: K-means seedings.
        seed: of the seedings.
        method: of the assignment: "auto", "exact" or "approximate".

    Raises:
        FitError: no workers, fewer signatures than workers, signatures without hits, or layers to
            be selected without decode counts.
    """
    if select_layers and (recorded.decode is None or len(recorded) < 3):
        raise FitError("fit: layers can only be selected by decode counts of 3 requests or more")
    if len(workers) == 0 or len(set(workers)) != len(workers):
        raise FitError(f"fit: worker names must be unique and not empty, got {list(workers)}")
    if len(recorded) < len(workers):
        raise FitError(
            f"fit: {len(recorded)} signatures for {len(workers)} workers; record at least "
            f"{len(workers)}, better 50 per worker"
        )
    geometry = recorded.geometry
    layers = np.ones(geometry.layers, np.bool_) if mask is None else mask.astype(np.bool_)
    extra: dict[str, Any] = {}
    if select_layers:
        layers, extra["rho"] = layer_mask(recorded, _scale(recorded, layers, idf)[0])
    scale, used_idf = _scale(recorded, layers, idf)
    extra["layers_used"] = int(layers.sum())
    points = normalise(recorded.counts, scale * layers[:, None])
    capacity = capacities(len(recorded), weights or [1.0] * len(workers))
    clusters = balanced_kmeans(points, capacity, restarts=restarts, seed=seed, method=method)
    shape = (len(workers), geometry.layers, geometry.experts)
    return Partition(
        geometry,
        tuple(workers),
        np.ascontiguousarray(clusters.centroids.reshape(shape), np.float32),
        scale,
        layers,
        recorded.model,
        {**_metrics(recorded, points, clusters, used_idf), **extra},
    )


def normalise(
    counts: npt.NDArray[Any], weights: npt.NDArray[np.float32]
) -> npt.NDArray[np.float32]:
    """Weighted counts with one global L2 norm, float32 [N, L*E].

    Raises:
        FitError: a signature has no weighted hits.
    """
    points = counts.reshape(len(counts), -1).astype(np.float32)
    points *= weights.reshape(-1)
    norms = np.linalg.norm(points, axis=1)
    empty = np.flatnonzero(norms == 0)
    if len(empty):
        raise FitError(f"fit: {len(empty)} signatures have no hits, the first is {empty[0]}")
    points /= norms[:, None]
    return points


def _scale(
    recorded: Recorded, layers: npt.NDArray[np.bool_], idf: bool
) -> tuple[npt.NDArray[np.float32], bool]:
    if idf:
        scale = inverse_document_frequency(recorded.counts)
        hits = (recorded.counts > 0) & ((scale > 0) & layers[:, None])
        if hits.any(axis=(1, 2)).all():
            return scale, True
    return np.ones((recorded.geometry.layers, recorded.geometry.experts), np.float32), False


def _metrics(
    recorded: Recorded, points: npt.NDArray[np.float32], clusters: Clusters, idf: bool
) -> dict[str, Any]:
    similarity = points @ clusters.centroids.T
    own = similarity[np.arange(len(points)), clusters.home]
    metrics: dict[str, Any] = {
        "signatures": len(recorded),
        "idf": idf,
        "objective": clusters.objective,
        "gap": clusters.gap,
        "iterations": clusters.iterations,
        "converged": clusters.converged,
        "similarity_own": float(own.mean()),
        "similarity_other": float(
            (similarity.sum() - own.sum()) / max(1, similarity.size - len(own))
        ),
        "nearest_share": float((similarity.argmax(axis=1) == clusters.home).mean()),
        "sizes": np.bincount(clusters.home, minlength=len(clusters.centroids)).tolist(),
    }
    if recorded.labels is not None:
        metrics["purity"] = purity(clusters.home, recorded.labels)
        metrics["adjusted_rand"] = _adjusted_rand(clusters.home, recorded.labels)
    return metrics


def purity(home: npt.NDArray[np.int32], labels: npt.NDArray[np.str_]) -> float:
    """Share of points whose label is their cluster's most frequent one."""
    codes = np.unique(labels, return_inverse=True)[1]
    hits = sum(np.bincount(codes[home == w]).max() for w in np.unique(home))
    return float(hits / len(home))


def _adjusted_rand(home: npt.NDArray[np.int32], labels: npt.NDArray[np.str_]) -> float:
    from sklearn.metrics import adjusted_rand_score

    return float(adjusted_rand_score(labels, home))
