"""Several routers in front of one fleet, without shared memory: what measured expert use is worth.

    python -m benchmarks.several_routers --json > results/several_routers.json

Requests go to the routers in turn; every router uses all workers and knows only its own requests.
With `trust` it also reads the workers' counters (batch sizes, expert use) every quarter of a
second. Gains are over the best load balancer of a single router that sees everything.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.machine import cpu_name
from benchmarks.policies import CLIP, shared_data
from eldr.simulation.cells import ArrivalSpec, Cell, run_case
from eldr.simulation.cost import study_cost
from eldr.simulation.report import LOAD_BALANCERS, QUANTILES
from eldr.simulation.traffic import Mix
from eldr.workload.traces import load

# routers, trust
SETTINGS = ((1, 0.0), (1, 0.5), (2, 0.0), (2, 0.5), (3, 0.5), (4, 0.0), (4, 0.5), (4, 1.0))
POLL = 0.25  # seconds
Gains = dict[str, float]


def even_mix(
    trace: Path,
    workers: int,
    per_worker: int,
    *,
    routers: int = 1,
    poll: float = POLL,
    trust: float = 0.0,
) -> Cell:
    """Requests of all kinds, evenly, through so many routers that all use all workers.

    Args:
        trace: expert trace.
        workers: decode workers.
        per_worker: requests per worker.
        routers: one of them sees everything.
        poll: seconds between two looks at the workers' counters, 0 = never.
        trust: how far the counters correct a router's account.
    """
    return Cell(
        str(trace),
        Mix.EVEN,
        workers,
        study_cost(load(trace).geometry),
        per_worker * workers,
        batch=30.0,
        arrivals=ArrivalSpec(clip=CLIP),
        routers=routers,
        shared=routers > 1,
        telemetry=poll,
        trust=trust,
    )


def measure(
    trace: Path, workers: int, per_worker: int, seeds: Sequence[int]
) -> list[dict[str, Any]]:
    """One row per setting and policy: gains in %, mean over seeds, and their standard error."""
    gains: dict[tuple[int, float, str], list[Gains]] = {}
    single = even_mix(trace, workers, per_worker)
    for seed in seeds:
        alone = run_case(single, seed, LOAD_BALANCERS)["policies"]
        best = {q: min(alone[p]["tpot_ms"][q] for p in LOAD_BALANCERS) for q in QUANTILES}
        for routers, trust in SETTINGS:
            policies = ["marginal_cost", *(["least_requests"] if routers > 1 else [])]
            cell = even_mix(trace, workers, per_worker, routers=routers, trust=trust)
            ran = run_case(cell, seed, policies)["policies"]
            for policy in policies:
                gain = {q: 100 * (1 - ran[policy]["tpot_ms"][q] / best[q]) for q in QUANTILES}
                gains.setdefault((routers, trust, policy), []).append(gain)
    return [
        {
            "trace": single.trace_name,
            "routers": routers,
            "trust": trust,
            "policy": policy,
            "gain_pct": {q: float(np.mean([g[q] for g in found])) for q in QUANTILES},
            "error": {
                q: float(np.std([g[q] for g in found], ddof=1) / len(found) ** 0.5)
                if len(found) > 1
                else None
                for q in QUANTILES
            },
        }
        for (routers, trust, policy), found in gains.items()
    ]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--trace", action="append", type=Path, help="expert trace (repeatable)")
    parser.add_argument("--workers", type=int, default=8)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--first-seed", type=int, default=40)
    parser.add_argument("--requests-per-worker", type=int, default=300)
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    data = shared_data()
    traces = args.trace or [data / "tiny_traces.npz", data / "deepseek_v2_lite_topk.npz"]
    if missing := [str(t) for t in traces if not t.exists()]:
        print(f"several_routers: no trace {', '.join(missing)}; set ELDR_SHARED_DATA",
              file=sys.stderr)  # fmt: skip
        return 3
    seeds = range(args.first_seed, args.first_seed + args.seeds)
    rows = [
        row
        for trace in traces
        for row in measure(trace, args.workers, args.requests_per_worker, seeds)
    ]
    if args.json:
        report = {
            "command": " ".join(["python -m benchmarks.several_routers", *sys.argv[1:]]),
            "machine": {"cores": os.cpu_count(), "cpu": cpu_name()},
            "date": time.strftime("%Y-%m-%d"),
            "simulated": True,
            "workers": args.workers,
            "mix": "even",
            "poll_seconds": POLL,
            "rows": rows,
        }
        print(json.dumps(report))
    else:
        for r in rows:
            gain = " / ".join(f"{r['gain_pct'][q]:+.1f}" for q in QUANTILES)
            print(f"{r['trace']:24} {r['routers']} routers  trust {r['trust']:.1f}  "
                  f"{r['policy']:15} {gain}")  # fmt: skip
    return 0


if __name__ == "__main__":
    sys.exit(main())
