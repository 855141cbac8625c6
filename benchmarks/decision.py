"""What one routing decision costs, from a decoded signature to a committed choice.

    python -m benchmarks.decision --json

Fleets in steady state (20 running requests per worker), one thread. Every decision is timed alone;
the release that keeps the fleet steady is timed apart.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import platform
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np

from eldr.geometry import Geometry
from eldr.routing import Fleet, Partition, RouteRequest, Worker, fixed, make_policy
from eldr.signature import Signature

GEOMETRY = Geometry(48, 128, 8)  # Qwen3-30B-A3B: L * E = 6,144
LIMITS_US = {16: 40.0, 1024: 1000.0}
POLICIES = ("least_requests", "locality_band", "marginal_cost")


def machine() -> str:
    """CPU model and cores."""
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    model = next((x.partition(":")[2].strip() for x in lines if x.startswith("model name")), "")
    return f"{model or platform.processor()}, {os.cpu_count()} cores"


def signatures(count: int, seed: int = 0) -> list[Signature]:
    """Signatures of 64 to 1,024 prompt tokens in eight domains."""
    rng = np.random.default_rng(seed)
    g = GEOMETRY
    taste = rng.dirichlet(np.full(g.experts, 0.3), (8, g.layers))
    made = []
    for i in range(count):
        tokens = int(rng.integers(64, 1025))
        hits = np.stack([rng.multinomial(tokens * g.top_k, p) for p in taste[i % 8]])
        made.append(Signature(np.minimum(hits, tokens).astype(np.uint32), tokens))
    return made


def partition(names: list[str], made: list[Signature]) -> Partition:
    """Centroids that are signatures: the arithmetic is the same as for fitted ones."""
    g = GEOMETRY
    rows = np.stack([made[i % len(made)].counts for i in range(len(names))]).astype(np.float32)
    rows /= np.linalg.norm(rows.reshape(len(rows), -1), axis=1)[:, None, None]
    ones = np.ones((g.layers, g.experts), np.float32)
    return Partition(g, tuple(names), rows, ones, np.ones(g.layers, np.bool_))


def measure(policy: str, workers: int, decisions: int, made: list[Signature]) -> dict[str, Any]:
    """Quantiles of reserve and release, in microseconds."""
    names = [f"d{i}" for i in range(workers)]
    options = {"partition": partition(names, made)} if policy == "locality_band" else {}
    fleet = Fleet(make_policy(policy, **options), [Worker(n) for n in names], geometry=GEOMETRY)
    rng = np.random.default_rng(1)
    running = []
    # 20 each, but no more than memory comfortably holds (12 KiB per running request).
    for i in range(min(20 * workers, 4096)):
        running.append(f"warm-{i}")
        fleet.reserve(RouteRequest(running[-1], made[int(rng.integers(len(made)))]))
    reserve, release = np.empty(decisions), np.empty(decisions)
    for i in range(decisions):
        request = RouteRequest(str(i), made[int(rng.integers(len(made)))])
        start = time.perf_counter()
        fleet.reserve(request)
        middle = time.perf_counter()
        fleet.release(running.pop(int(rng.integers(len(running)))))
        release[i], reserve[i] = time.perf_counter() - middle, middle - start
        running.append(str(i))
    fleet.check_integrity()
    quantiles = {q: 1e6 * float(np.percentile(reserve, p)) for q, p in (("p50", 50), ("p99", 99))}
    return {
        "policy": policy,
        "workers": workers,
        "decisions": decisions,
        "reserve_us": quantiles,
        "release_us": {"p50": 1e6 * float(np.median(release))},
        "limit_us": LIMITS_US.get(workers),
        "within": quantiles["p50"] <= LIMITS_US.get(workers, np.inf),
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--workers", type=int, action="append")
    parser.add_argument("--decisions", type=int, default=2000)
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    load = os.getloadavg()[0]
    made = signatures(256)
    rows = [
        measure(policy, workers, args.decisions, made)
        for workers in args.workers or [16, 1024]
        for policy in POLICIES
    ]
    report = {
        "command": "python -m benchmarks.decision --json",
        "machine": machine(),
        "load_average": round(load, 1),
        "date": datetime.date.today().isoformat(),
        "geometry": str(GEOMETRY),
        **fixed.describe(),
        "rows": rows,
    }
    if args.json:
        print(json.dumps(report))
    else:
        for row in rows:
            reserve = row["reserve_us"]
            print(
                f"{row['workers']:5d} {row['policy']:15} p50 {reserve['p50']:7.1f} us  "
                f"p99 {reserve['p99']:7.1f} us  release {row['release_us']['p50']:6.1f} us"
            )
    return 0 if all(row["within"] for row in rows) else 1


if __name__ == "__main__":
    sys.exit(main())
