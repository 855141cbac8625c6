"""What several proxies in front of one decode pool lose, and what the workers' counters give back.

    python -m benchmarks.ray_consistency --json > results/ray_consistency.json

Each proxy of `eldr.serving.ray` decides on its own account and sees every decode replica's counters
once per `measure_interval`; `trust` says how far they correct the account. The simulator runs that
arrangement with the fleet, policy and telemetry that serve: requests go to the proxies in turn, all
proxies use all replicas. Gains are reductions of the time per output token against the best of four
load balancers that one router runs on the same requests.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.machine import cpu_name
from benchmarks.several_routers import even_mix
from eldr.simulation.cells import run_case
from eldr.simulation.report import LOAD_BALANCERS, average, best_load_balancer
from eldr.workload.tiny import TRACE_PATH

POLICY = "marginal_cost"
# Proxies, interval in seconds, trust. The first is what one router does without counters.
SETTINGS = (
    (1, 0.0, 0.0),
    (1, 0.25, 0.5),
    (2, 0.0, 0.0),
    (2, 0.25, 0.5),
    (4, 0.0, 0.0),
    (4, 0.25, 0.5),
    (4, 1.0, 0.5),
    (8, 0.25, 0.5),
)


def gain(base: dict[str, Any], figures: dict[str, Any]) -> dict[str, float]:
    """Reduction of the TPOT in %, against the best load balancer for each quantile."""
    best = best_load_balancer(base)
    return {
        q: round(100 * (1 - figures["tpot_ms"][q] / base[best[q]]["tpot_ms"][q]), 2)
        for q in ("p50", "p99")
    }


def run(trace: Path, workers: int, per_worker: int, seeds: Sequence[int]) -> list[dict[str, Any]]:
    """One row per setting: mean gains over the seeds."""
    rows: list[dict[str, Any]] = []
    base = {
        seed: run_case(even_mix(trace, workers, per_worker, poll=0.0), seed, LOAD_BALANCERS)
        for seed in seeds
    }
    for proxies, interval, trust in SETTINGS:
        if proxies > workers:
            continue
        cell = even_mix(trace, workers, per_worker, routers=proxies, poll=interval, trust=trust)
        found = []
        for seed in seeds:
            figures = run_case(cell, seed, [POLICY])["policies"][POLICY]
            found.append(gain(base[seed]["policies"], figures))
            print(f"{proxies} proxies, seed {seed}: {found[-1]}", file=sys.stderr)
        rows.append(
            {"proxies": proxies, "interval_s": interval, "trust": trust, "gain": average(found)}
        )
    return rows


def main() -> int:
    """Runs and prints."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--trace", type=Path, default=TRACE_PATH)
    parser.add_argument("--workers", type=int, default=8)
    parser.add_argument("--requests-per-worker", type=int, default=400)
    parser.add_argument("--seeds", type=int, default=4)
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    args = parser.parse_args()
    rows = run(args.trace, args.workers, args.requests_per_worker, range(args.seeds))
    if args.json:
        result = {
            "policy": POLICY,
            "trace": args.trace.name,
            "workers": args.workers,
            "requests_per_worker": args.requests_per_worker,
            "seeds": args.seeds,
            "rows": rows,
            "machine": {"cores": os.cpu_count(), "cpu": cpu_name()},
            "date": datetime.date.today().isoformat(),
            "command": "python -m benchmarks.ray_consistency --json",
        }
        print(json.dumps(result, indent=1))
        return 0
    print("| proxies | interval s | trust | P50 / P99 gain % |\n|---|---|---|---|")
    for r in rows:
        shown = f"{r['gain']['p50']:+.1f} / {r['gain']['p99']:+.1f}"
        print(f"| {r['proxies']} | {r['interval_s']:g} | {r['trust']:g} | {shown} |")
    return 0


if __name__ == "__main__":
    sys.exit(main())
