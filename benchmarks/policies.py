"""The policy study: 20 cells of traffic, every policy against the best of four load balancers.

    python -m benchmarks.policies --json > results/policies.json

Two traces (the tiny MoE, DeepSeek-V2-Lite) x 8 and 16 workers x five kinds of traffic: the four
mixes with Poisson arrivals, and the trace's own mix in the bursts of a public production trace.
Partitions are fitted on requests that are not served. The step cost is `study_cost`.
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
from eldr.simulation.cells import ArrivalSpec, Cell
from eldr.simulation.cost import study_cost
from eldr.simulation.report import LOAD_BALANCERS
from eldr.simulation.study import Result, study
from eldr.simulation.traffic import Mix
from eldr.workload.traces import load

TAUS = ("0", "0.05", "0.1", "0.15", "0.2", "0.3")
CLIP = (16, 400)  # output tokens


def shared_data() -> Path:
    """Where the large traces are: ELDR_SHARED_DATA, or ../shared/data beside the project."""
    default = Path(__file__).resolve().parents[2] / "shared" / "data"
    return Path(os.environ.get("ELDR_SHARED_DATA", default))


def cells(
    traces: Sequence[Path],
    bursts: Path,
    workers: Sequence[int],
    per_worker: int,
    batch: float,
    know_length: bool = False,
) -> list[Cell]:
    """The study's cells; the fifth kind of traffic is skipped when `bursts` is not there."""
    made = []
    for path in traces:
        cost = study_cost(load(path).geometry)
        for count in workers:
            kinds = [(mix, ArrivalSpec(clip=CLIP)) for mix in Mix]
            if bursts.exists():
                kinds.append(
                    (Mix.SAME, ArrivalSpec(str(bursts), "mooncake_conversation", clip=CLIP))
                )
            made += [
                Cell(
                    str(path),
                    mix,
                    count,
                    cost,
                    per_worker * count,
                    batch=batch,
                    arrivals=spec,
                    know_length=know_length,
                )
                for mix, spec in kinds
            ]
    return made


def score(gain: dict[str, float]) -> float:
    """The mean of the P50 and P99 gains."""
    return (gain["p50"] + gain["p99"]) / 2


def best_published(result: Result) -> str | None:
    """The published rule at the tau that is best in this very cell."""
    ran = [p for p in result.gains if p.startswith("locality_band")]
    return max(ran, key=lambda p: score(result.gains[p]), default=None)


def table(results: Sequence[Result], ours: Sequence[str]) -> str:
    """Markdown: one row per cell, P50 / P99 gains in %."""
    columns = ["locality_band:tau=0.1", "best tau", *ours]
    lines = [
        "| trace, workers | traffic | " + " | ".join(columns) + " |",
        "|" + "---|" * (len(columns) + 2),
    ]
    for r in results:
        row = r.rows()[0]
        kind = row["mix"] if row["arrivals"] == "poisson" else f"{row['mix']}, bursts"
        best = best_published(r)
        named = {**r.gains, **({"best tau": r.gains[best]} if best else {})}
        shown = [
            f"{named[c]['p50']:+.1f} / {named[c]['p99']:+.1f}" if c in named else "-"
            for c in columns
        ]
        lines.append(f"| {row['trace']}, {row['workers']} | {kind} | " + " | ".join(shown) + " |")
    return "\n".join(lines)


def verdict(results: Sequence[Result], policy: str) -> dict[str, Any]:
    """How a policy does over all cells: wins over the published rule, mean gains per trace."""
    wins = [score(r.gains[policy]) > score(r.gains[b]) for r in results if (b := best_published(r))]
    out: dict[str, Any] = {"cells": len(results), "beats_published_at_best_tau": sum(wins)}
    out["worst_p99_gain"] = min(r.gains[policy]["p99"] for r in results)
    for trace in dict.fromkeys(r.cell.trace for r in results):
        mine = [r.gains[policy] for r in results if r.cell.trace == trace]
        out[Path(trace).stem] = {
            q: float(np.mean([g[q] for g in mine])) for q in ("p50", "p99")
        } | {"min_p50": min(g["p50"] for g in mine), "max_p50": max(g["p50"] for g in mine)}
    return out


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--trace", action="append", type=Path, help="expert trace (repeatable)")
    parser.add_argument("--policy", action="append", help="beside the load balancers (repeatable)")
    parser.add_argument("--workers", action="append", type=int)
    parser.add_argument("--seeds", type=int, default=4)
    parser.add_argument("--first-seed", type=int, default=0)
    parser.add_argument("--requests-per-worker", type=int, default=1000)
    parser.add_argument("--batch", type=float, default=30.0)
    parser.add_argument(
        "--know-length", action="store_true", help="tell policies how long requests decode"
    )
    parser.add_argument("--processes", type=int, default=min(2, os.cpu_count() or 1))
    parser.add_argument("--tau", action="append", help=f"of locality_band, default {TAUS}")
    parser.add_argument("--no-published", action="store_true", help="leave locality_band out")
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    data = shared_data()
    traces = args.trace or [data / "tiny_traces.npz", data / "deepseek_v2_lite_topk.npz"]
    if missing := [str(t) for t in traces if not t.exists()]:
        print(f"policies: no trace {', '.join(missing)}; set ELDR_SHARED_DATA", file=sys.stderr)
        return 3
    ours = tuple(args.policy or ["marginal_cost"])
    taus = () if args.no_published else tuple(args.tau or TAUS)
    chosen = (*LOAD_BALANCERS, *(f"locality_band:tau={tau}" for tau in taus), *ours)
    grid = cells(
        traces,
        data / "arrivals.npz",
        args.workers or [8, 16],
        args.requests_per_worker,
        args.batch,
        args.know_length,
    )
    started = time.time()
    results = study(
        grid,
        chosen,
        range(args.first_seed, args.first_seed + args.seeds),
        processes=args.processes,
        progress=lambda done, of: print(f"\r{done}/{of}", end="", file=sys.stderr, flush=True),
    )
    print(file=sys.stderr)
    summary = {p: verdict(results, p) for p in ours}
    if args.json:
        print(
            json.dumps(
                {
                    "command": "python -m benchmarks.policies " + " ".join(sys.argv[1:]),
                    "machine": {"cores": os.cpu_count(), "cpu": cpu_name()},
                    "date": time.strftime("%Y-%m-%d"),
                    "simulated": True,
                    "cells": [row for r in results for row in r.rows()],
                    "summary": summary,
                    "table": table(results, ours),
                    "seconds": time.time() - started,
                }
            )
        )
    else:
        print(table(results, ours))
        print(json.dumps(summary, indent=1))
        print(f"{time.time() - started:.0f} s")
    return 0


if __name__ == "__main__":
    sys.exit(main())
