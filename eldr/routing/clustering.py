"""Spherical balanced K-means: every worker's cluster has exactly its share of the points."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from eldr.routing.assignment import Assignment, assign
from eldr.routing.points import Points, as_points


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
    points: Any,
    capacity: npt.NDArray[np.int64],
    *,
    restarts: int = 4,
    iterations: int = 50,
    seed: int = 0,
    method: str = "auto",
) -> Clusters:
    """The best of several restarts by objective; reproducible for a seed.

    Args:
        points: float32 [N, D], unit rows: NumPy, a torch tensor on any device, or CuPy.
        capacity: int64 [W], sums to N.
        restarts: seedings to try, >= 1.
        iterations: at most per restart, >= 1.
        seed: of the seedings.
        method: of `assign`.
    """
    if restarts < 1 or iterations < 1:
        raise ValueError("balanced_kmeans: restarts and iterations must be >= 1")
    held = as_points(points)
    runs = (
        _run(held, capacity, _seed(held, len(capacity), seed + i), iterations, method)
        for i in range(restarts)
    )
    return min(runs, key=lambda clusters: clusters.objective)


def refine(
    points: Any,
    centroids: npt.NDArray[np.float32],
    capacity: npt.NDArray[np.int64],
    *,
    iterations: int = 20,
    method: str = "auto",
) -> Clusters:
    """Continues from given centroids, e.g. yesterday's."""
    return _run(as_points(points), capacity, centroids, iterations, method)


def _seed(points: Points, count: int, seed: int) -> npt.NDArray[np.float32]:
    from sklearn.cluster import kmeans_plusplus

    chosen: Any = kmeans_plusplus(points.sample(seed), count, random_state=seed)[0]
    return np.array(chosen, np.float32)


def _run(
    points: Points,
    capacity: npt.NDArray[np.int64],
    centroids: npt.NDArray[np.float32],
    iterations: int,
    method: str,
) -> Clusters:
    last: Assignment | None = None
    for iteration in range(1, iterations + 1):  # noqa: B007
        prices = None if last is None else last.prices
        now = assign(points.cost(centroids), capacity, method=method, prices=prices)
        same = last is not None and np.array_equal(now.home, last.home)
        worse = last is not None and now.objective >= last.objective
        if same or worse:
            break
        last = now
        centroids = _means(points.sums(now.home, len(centroids)), centroids)
    assert last is not None  # iterations >= 1
    return Clusters(centroids, last.home, last.objective, last.gap, iteration, bool(same or worse))


def _means(
    sums: npt.NDArray[np.float64], former: npt.NDArray[np.float32]
) -> npt.NDArray[np.float32]:
    """Renormalised mean of every cluster; one without points or direction keeps its centroid."""
    length = np.linalg.norm(sums, axis=1, keepdims=True)
    means = sums / np.where(length > 0, length, 1.0)
    return np.asarray(np.where(length > 0, means, former), np.float32)
