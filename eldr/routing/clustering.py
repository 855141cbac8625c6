"""Spherical balanced K-means: every worker's cluster has exactly its share of the points."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from eldr.routing.assignment import Assignment, assign


@dataclass(frozen=True, slots=True, eq=False)
class Clusters:
    """A clustering of N unit vectors.

    Attributes:
        centroids: float32 [W, D], unit length.
        home: int32 [N].
        objective: sum of 1 - cosine over the points.
        gap: of the last assignment, 0 if exact.
        iterations: of the best restart.
        converged: the assignment repeated before `iterations` ran out.
    """

    centroids: npt.NDArray[np.float32]
    home: npt.NDArray[np.int32]
    objective: float
    gap: float
    iterations: int
    converged: bool


def balanced_kmeans(
    points: npt.NDArray[np.float32],
    capacity: npt.NDArray[np.int64],
    *,
    restarts: int = 4,
    iterations: int = 50,
    seed: int = 0,
    method: str = "auto",
) -> Clusters:
    """The best of several restarts by objective; reproducible for a seed.

    Args:
        points: float32 [N, D], unit rows.
        capacity: int64 [W], sums to N.
        restarts: seedings to try, >= 1.
        iterations: at most per restart, >= 1.
        seed: of the seedings.
        method: of `assign`.
    """
    if restarts < 1 or iterations < 1:
        raise ValueError("balanced_kmeans: restarts and iterations must be >= 1")
    runs = (
        _run(points, capacity, _seed(points, len(capacity), seed + i), iterations, method)
        for i in range(restarts)
    )
    return min(runs, key=lambda clusters: clusters.objective)


def refine(
    points: npt.NDArray[np.float32],
    centroids: npt.NDArray[np.float32],
    capacity: npt.NDArray[np.int64],
    *,
    iterations: int = 20,
    method: str = "auto",
) -> Clusters:
    """Continues from given centroids, e.g. yesterday's."""
    return _run(points, capacity, centroids, iterations, method)


def _seed(points: npt.NDArray[np.float32], count: int, seed: int) -> npt.NDArray[np.float32]:
    from sklearn.cluster import kmeans_plusplus

    chosen: Any = kmeans_plusplus(points, count, random_state=seed)[0]
    return np.array(chosen, np.float32)


def _run(
    points: npt.NDArray[np.float32],
    capacity: npt.NDArray[np.int64],
    centroids: npt.NDArray[np.float32],
    iterations: int,
    method: str,
) -> Clusters:
    last: Assignment | None = None
    for iteration in range(1, iterations + 1):  # noqa: B007
        cost = 1.0 - points @ centroids.T
        now = assign(cost, capacity, method=method, prices=None if last is None else last.prices)
        same = last is not None and np.array_equal(now.home, last.home)
        worse = last is not None and now.objective >= last.objective
        if same or worse:
            break
        last = now
        centroids = _means(points, now.home, centroids)
    assert last is not None  # iterations >= 1
    return Clusters(centroids, last.home, last.objective, last.gap, iteration, bool(same or worse))


def _means(
    points: npt.NDArray[np.float32],
    home: npt.NDArray[np.int32],
    former: npt.NDArray[np.float32],
) -> npt.NDArray[np.float32]:
    """Renormalised mean of every cluster; one without points or direction keeps its centroid."""
    order = np.argsort(home, kind="stable")
    starts = np.searchsorted(home[order], np.arange(len(former) + 1))
    centroids = former.copy()
    for w in range(len(former)):
        total = points[order[starts[w] : starts[w + 1]]].sum(axis=0, dtype=np.float64)
        length = float(np.linalg.norm(total))
        if length > 0:
            centroids[w] = total / length
    return centroids
