"""Capacity-constrained assignment: exact against scipy's Hungarian, a full fit, and a large case.

    python -m benchmarks.assignment --json

Synthetic Zipf topics, as in the comparison of peers: every point mixes two of the topics.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import sys
import time
from typing import Any

import numpy as np
import numpy.typing as npt

from benchmarks.decision import machine
from eldr.routing import fixed
from eldr.routing.assignment import assign, capacities
from eldr.routing.clustering import balanced_kmeans

Points = npt.NDArray[np.float32]


def topics(count: int, cells: int, topics: int = 24, seed: int = 0) -> Points:
    """Unit vectors float32 [count, cells] whose topics have Zipf shares."""
    rng = np.random.default_rng(seed)
    width = min(128, cells)
    base = rng.dirichlet(np.full(width, 0.3), (topics, cells // width))
    base = base.reshape(topics, -1).astype(np.float32)
    share = 1 / np.arange(1, topics + 1)
    first = rng.choice(topics, count, p=share / share.sum())
    mix = rng.beta(6, 2, count).astype(np.float32)
    second = rng.integers(topics, size=count)
    points = np.empty((count, base.shape[1]), np.float32)
    for start in range(0, count, 2048):
        part = slice(start, start + 2048)
        m = mix[part, None]
        points[part] = (m * base[first[part]] + (1 - m) * base[second[part]]) * 16384
        noise = rng.standard_normal(points[part].shape, dtype=np.float32)
        points[part] += np.sqrt(points[part]) * noise
    points /= np.linalg.norm(points, axis=1, keepdims=True)
    return points


def costs(points: Points, workers: int, seed: int = 1) -> Points:
    """1 - cosine to `workers` centroids after three unconstrained Lloyd steps."""
    rng = np.random.default_rng(seed)
    centroids = points[rng.choice(len(points), workers, replace=False)].copy()
    for _ in range(3):
        home = (points @ centroids.T).argmax(axis=1)
        for w in np.unique(home):
            centroids[w] = points[home == w].mean(axis=0)
        centroids /= np.linalg.norm(centroids, axis=1, keepdims=True)
    return np.asarray(1.0 - points @ centroids.T, np.float32)


def timed(call: Any) -> tuple[Any, float, float]:
    """Result, wall seconds and process CPU seconds."""
    wall, cpu = time.perf_counter(), time.process_time()
    result = call()
    return result, time.perf_counter() - wall, time.process_time() - cpu


def against_hungarian(count: int, workers: int, cells: int) -> dict[str, Any]:
    """The same problem, exact and Hungarian, one after the other."""
    from scipy.optimize import linear_sum_assignment

    cost = costs(topics(count, cells), workers)
    capacity = capacities(count, [1.0] * workers)
    ours, wall, cpu = timed(lambda: assign(cost, capacity, method="exact"))
    columns = np.repeat(np.arange(workers), capacity)
    tiled = cost[:, columns]
    (rows, chosen), h_wall, h_cpu = timed(lambda: linear_sum_assignment(tiled))
    theirs = float(cost[rows, columns[chosen]].sum(dtype=np.float64))
    relative = abs(ours.objective - theirs) / abs(theirs)
    return {
        "case": "exact against Hungarian",
        "points": count,
        "workers": workers,
        "cells": cells,
        "seconds": wall,
        "cpu_seconds": cpu,
        "hungarian_seconds": h_wall,
        "hungarian_cpu_seconds": h_cpu,
        "speedup_cpu": h_cpu / cpu,
        "objective": ours.objective,
        "relative_difference": relative,
        "within": relative <= 1e-6 and h_cpu / cpu >= 100,
    }


def full_fit(count: int, workers: int, cells: int) -> dict[str, Any]:
    """Seeding, assignment and centroids until nothing changes."""
    points = topics(count, cells)
    capacity = capacities(count, [1.0] * workers)
    clusters, wall, cpu = timed(lambda: balanced_kmeans(points, capacity, restarts=1))
    return {
        "case": "full fit",
        "points": count,
        "workers": workers,
        "cells": cells,
        "seconds": wall,
        "cpu_seconds": cpu,
        "iterations": clusters.iterations,
        "converged": clusters.converged,
        "objective": clusters.objective,
        "within": wall <= 60,
    }


def large(count: int, workers: int, cells: int) -> dict[str, Any]:
    """One approximate assignment and its certified gap."""
    cost = costs(topics(count, cells, topics=300), workers)
    capacity = capacities(count, [1.0] * workers)
    result, wall, cpu = timed(lambda: assign(cost, capacity))
    return {
        "case": "approximate",
        "points": count,
        "workers": workers,
        "cells": cells,
        "seconds": wall,
        "cpu_seconds": cpu,
        "objective": result.objective,
        "gap": result.gap,
        "within": result.gap <= 1e-3,
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--part", choices=("hungarian", "fit", "large"), action="append")
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    parts = args.part or ["hungarian", "fit", "large"]
    rows = []
    if "hungarian" in parts:
        rows.append(against_hungarian(5_000, 16, 6_144))
    if "fit" in parts:
        rows.append(full_fit(20_000, 16, 6_144))
    if "large" in parts:
        rows.append(large(100_000, 256, 256))
    report = {
        "command": " ".join(["python -m benchmarks.assignment", *sys.argv[1:]]),
        "machine": machine(),
        "date": datetime.date.today().isoformat(),
        "load_average": os.getloadavg()[0],
        **fixed.describe(),
        "rows": rows,
    }
    if args.json:
        print(json.dumps(report))
    else:
        for row in rows:
            print("  ".join(f"{k} {v:.4g}" if isinstance(v, float) else f"{k} {v}"
                            for k, v in row.items()))  # fmt: skip
    return 0 if all(row["within"] for row in rows) else 1


if __name__ == "__main__":
    sys.exit(main())
