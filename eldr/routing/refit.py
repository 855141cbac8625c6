"""A partition that follows its traffic: drift, refit without a restart, joins and leaves."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from eldr.geometry import Geometry
from eldr.routing.assignment import assign, capacities
from eldr.routing.clustering import refine
from eldr.routing.cost import StepCost
from eldr.routing.fit import normalise
from eldr.routing.partition import Partition
from eldr.routing.step_fit import prior
from eldr.signature import Signature


class Window:
    """The last signatures that were routed; adding one costs a reference."""

    def __init__(self, geometry: Geometry, size: int = 1024) -> None:
        if size < 2:
            raise ValueError(f"window: size must be >= 2, got {size}")
        self.geometry = geometry
        self._held: deque[Signature] = deque(maxlen=size)

    def __len__(self) -> int:
        return len(self._held)

    def add(self, signature: Signature) -> None:
        """Appends; the oldest goes when the window is full."""
        self._held.append(signature)

    def signatures(self) -> list[Signature]:
        """What it holds, the oldest first."""
        return list(self._held)

    def counts(self) -> npt.NDArray[np.uint32]:
        """A copy, uint32 [N, L, E]."""
        held = self.signatures()
        shape = (len(held), self.geometry.layers, self.geometry.experts)
        return np.stack([s.counts for s in held]) if held else np.zeros(shape, np.uint32)

    def activation(self) -> npt.NDArray[np.float64]:
        """Share of a prompt's tokens that use each expert, float64 [N, L*E]."""
        held = self.signatures()
        flat = self.counts().reshape(len(held), -1).astype(np.float64)
        covered = np.array([max(s.covered, 1.0) for s in held])
        return np.asarray(flat / covered[:, None])


@dataclass(frozen=True, slots=True)
class Drift:
    """How far served traffic is from what a partition was fitted to.

    Attributes:
        similarity: mean similarity of served signatures to their nearest centroid.
        fitted: the same at the fit (to their own centroid), nan if unknown.
        imbalance: total variation distance, in [0, 1], between the shares of nearest centroids and
            equal shares of capacity; what balancing has to undo at run time.
        gain: estimated change of step time against mixing all requests, negative = worse.
        drifted: whether to refit.
    """

    similarity: float
    fitted: float
    imbalance: float
    gain: float
    drifted: bool


def measure_drift(
    partition: Partition, window: Window, *, batch: float = 16.0, cost: StepCost | None = None
) -> Drift:
    """Compares the window with the fit.

    The estimated gain takes every request to its nearest centroid: a worker with share s of the
    requests runs batch * W * s of them, all drawn from its own ones. That is pessimistic about
    load, which a band balances, and optimistic about similarity, which it gives up for balance.

    Args:
        partition: in use.
        window: recent signatures, at least one.
        batch: mean running requests per worker.
        cost: of a step; `prior` by default.

    Raises:
        ValueError: an empty window, or one of another geometry.
    """
    if len(window) == 0 or window.geometry != partition.geometry:
        raise ValueError("drift: needs a window of signatures of the partition's geometry")
    points = _points(window.counts(), partition)
    similarity = points @ partition.centroids.reshape(partition.workers, -1).T
    home = similarity.argmax(axis=1)
    share = np.bincount(home, minlength=partition.workers) / len(home)
    nearest = float(similarity.max(axis=1).mean())
    fitted = float(partition.metrics.get("similarity_own", np.nan))
    other = float(partition.metrics.get("similarity_other", 0.0))
    imbalance = float(np.abs(share - 1.0 / partition.workers).sum() / 2.0)
    gain = _gain(window.activation(), home, share, batch, cost or prior(window.geometry.cells))
    # A quarter of the fit's contrast lost, or a third of the requests crowding in.
    lost = np.isfinite(fitted) and nearest < fitted - 0.25 * max(fitted - other, 0.0)
    return Drift(nearest, fitted, imbalance, gain, bool(lost or imbalance > 1 / 3 or gain < 0))


def _points(counts: npt.NDArray[np.uint32], partition: Partition) -> npt.NDArray[np.float32]:
    weighted = (counts * partition.weights).reshape(len(counts), -1)
    norm = np.linalg.norm(weighted, axis=1, keepdims=True)
    return np.asarray(weighted / np.maximum(norm, 1e-12), np.float32)


def _gain(
    use: npt.NDArray[np.float64],
    home: npt.NDArray[np.intp],
    share: npt.NDArray[np.float64],
    batch: float,
    cost: StepCost,
) -> float:
    def seconds(rows: npt.NDArray[np.float64], n: float) -> float:
        idle = np.log1p(-np.minimum(rows.mean(axis=0), 1 - 1e-9))
        return cost.seconds(float(-np.expm1(n * idle).sum()), 0.0, n)

    mixed = seconds(use, batch)
    workers = len(share)
    own = sum(
        share[w] * seconds(use[home == w], batch * workers * share[w])
        for w in np.flatnonzero(share)
    )
    return float(1.0 - own / mixed)


def align(new: Partition, old: Partition) -> Partition:
    """The new centroids, given to the workers whose old centroid is most similar (Hungarian).

    Raises:
        ValueError: other workers or another geometry.
    """
    if set(new.names) != set(old.names) or new.geometry != old.geometry:
        raise ValueError("align: the partitions are of other workers or another geometry")
    count = new.workers
    flat = new.centroids.reshape(count, -1)
    cost = (1.0 - flat @ old.centroids.reshape(count, -1).T).astype(np.float32)
    home = assign(cost, np.ones(count, np.int64), method="exact").home
    return replace(new, centroids=new.centroids[np.argsort(home)], names=old.names)


def refit(old: Partition, window: Window, *, weights: Sequence[float] | None = None) -> Partition:
    """Continues from the old centroids on the window's signatures; IDF and mask stay.

    Raises:
        FitError: a signature without hits.
        ValueError: fewer signatures than workers.
    """
    points = normalise(window.counts(), old.weights)
    capacity = capacities(len(points), weights or [1.0] * old.workers)
    clusters = refine(points, old.centroids.reshape(old.workers, -1), capacity)
    similarity = points @ clusters.centroids.T
    own = similarity[np.arange(len(points)), clusters.home]
    rest = (similarity.sum() - own.sum()) / max(1, similarity.size - len(own))
    metrics = {
        **old.metrics,
        "signatures": len(points),
        "objective": clusters.objective,
        "similarity_own": float(own.mean()),
        "similarity_other": float(rest),
        "refits": int(old.metrics.get("refits", 0)) + 1,
    }
    centroids = np.ascontiguousarray(clusters.centroids.reshape(old.centroids.shape), np.float32)
    return align(replace(old, centroids=centroids, metrics=metrics), old)


def remap(old: Partition, names: Sequence[str], window: Window | None = None) -> Partition:
    """The partition for another set of workers, moving no centroid of a worker that stays.

    A worker that left takes its centroid along; its requests go to their next nearest. A worker
    that joined shares the centroid of the worker with the most requests per centroid in the window
    (or the next in order without one), and the next refit tells the two apart.

    Raises:
        ValueError: no workers.
    """
    if not names:
        raise ValueError("remap: no workers")
    kept = {name: row for row, name in enumerate(old.names) if name in set(names)}
    demand = np.ones(old.workers)
    if window is not None and len(window):
        points = _points(window.counts(), old)
        nearest = (points @ old.centroids.reshape(old.workers, -1).T).argmax(axis=1)
        demand += np.bincount(nearest, minlength=old.workers)
    sharing = np.array([1.0 if name in kept else 0.0 for name in old.names])
    rows = []
    for name in names:
        row = kept.get(name)
        if row is None:
            row = int(np.argmax(demand / np.maximum(sharing, 0.5)))
            sharing[row] += 1.0
        rows.append(row)
    return replace(old, names=tuple(names), centroids=old.centroids[rows])
