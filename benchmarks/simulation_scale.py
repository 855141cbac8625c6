"""How large a fleet the simulator takes, and what routing costs there.

    python -m benchmarks.simulation_scale --json > results/simulation_scale.json

Four parts: `discrete` (16 workers x 20,000 requests x 5 policies, every token replayed), `expected`
(4,096 workers, 1M requests, one policy), `decision` (time and state per decision against fleet
size), `routers` (what is lost when several routers split the fleet, or share it blindly).
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import resource
import sys
import time
from collections.abc import Callable
from typing import Any

import numpy as np

from benchmarks.machine import cpu_name
from eldr.routing.fleet import Fleet
from eldr.routing.policies import make_policy
from eldr.routing.request import RouteRequest
from eldr.routing.worker import Worker
from eldr.simulation import report
from eldr.simulation.cells import ArrivalSpec, Case, Cell
from eldr.simulation.cost import study_cost
from eldr.simulation.traffic import Mix
from eldr.simulation.variants import signatures
from eldr.workload.tiny import TRACE_PATH
from eldr.workload.traces import load

CLIP = (16, 400)
POLICIES = ("random", "least_requests", "power_of_two", "locality_band:tau=0.1", "marginal_cost")


def cell(workers: int, requests: int, **changes: Any) -> Cell:
    cost = study_cost(load(TRACE_PATH).geometry)
    arrivals = ArrivalSpec(clip=CLIP)
    return Cell(
        str(TRACE_PATH), Mix.SAME, workers, cost, requests, batch=30.0, arrivals=arrivals, **changes
    )


def timed(work: Callable[[], Any]) -> tuple[Any, dict[str, float]]:
    """The result, wall and CPU seconds, and the peak memory of the process so far."""
    wall, cpu = time.perf_counter(), time.process_time()
    result = work()
    return result, {
        "wall_s": time.perf_counter() - wall,
        "cpu_s": time.process_time() - cpu,
        "peak_gb": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20,
    }


def discrete(workers: int = 16, requests: int = 20_000) -> dict[str, Any]:
    def work() -> dict[str, Any]:
        case = Case(cell(workers, requests), 0)
        layers = case.trace.geometry.layers
        return {p: report.summarise(case.run(p), layers) for p in POLICIES}

    figures, cost = timed(work)
    return {"workers": workers, "requests": requests, "policies": list(POLICIES), **cost} | {
        "tpot_ms": {p: f["tpot_ms"] for p, f in figures.items()}
    }


def expected(workers: int = 4096, requests: int = 1_000_000, routers: int = 1) -> dict[str, Any]:
    def work() -> dict[str, Any]:
        case = Case(cell(workers, requests, expected=True, routers=routers), 0)
        outcome = case.run("marginal_cost", lambda n: show(n, requests))
        return report.summarise(outcome, case.trace.geometry.layers)

    figures, cost = timed(work)
    head = {"workers": workers, "requests": requests, "routers": routers, **cost}
    return head | {
        "tpot_ms": figures["tpot_ms"],
        "distinct_per_layer": figures["distinct_per_layer"],
    }


def show(done: int, total: int) -> None:
    if done % 65_536 < 1024:
        print(f"{done} of {total}", file=sys.stderr, flush=True)


def decision(sizes: tuple[int, ...] = (16, 64, 256, 1024, 4096)) -> list[dict[str, Any]]:
    """Median time of reserve and of release, and bytes of state, with 30 requests per worker."""
    trace = load(TRACE_PATH)
    known = signatures(trace)
    rows = []
    for workers in sizes:
        fleet = Fleet(
            make_policy("marginal_cost"),
            [Worker(f"w{i}") for i in range(workers)],
            geometry=trace.geometry,
        )
        for i in range(min(30 * workers, 20_000)):
            fleet.reserve(RouteRequest(str(i), known[i % len(known)]))
        reserve, release = [], []
        for i in range(300):
            request = RouteRequest(f"x{i}", known[i % len(known)])
            a = time.perf_counter()
            fleet.reserve(request)
            b = time.perf_counter()
            fleet.release(request.id)
            reserve.append(b - a)
            release.append(time.perf_counter() - b)
        cells = trace.geometry.cells
        rows.append(
            {
                "workers": workers,
                "cells": cells,
                "reserve_us": float(np.median(reserve) * 1e6),
                "release_us": float(np.median(release) * 1e6),
                # Per worker: int32 load and uint8 survival of every cell, and a row of counters;
                # per running request: int16 activation of every cell.
                "worker_state_mb": workers * (5 * cells + 48) / 2**20,
                "request_state_mb": 30 * workers * 2 * cells / 2**20,
            }
        )
    return rows


def routers(workers: int = 256, per_worker: int = 150) -> list[dict[str, Any]]:
    """TPOT with the fleet split among several routers, shared blindly, or shared with telemetry.

    With telemetry every router reads the workers' counters each half second and believes them.
    """
    kinds = [(1, "one")]
    kinds += [(n, kind) for n in (4, 16) for kind in ("split", "blind", "telemetry")]
    base = Case(cell(workers, per_worker * workers, expected=True), 0).run("least_requests")
    reference = report.summarise(base, load(TRACE_PATH).geometry.layers)["tpot_ms"]
    rows = []
    for count, kind in kinds:
        heard = {"telemetry": 0.5, "trust": 1.0} if kind == "telemetry" else {}
        shared = kind in ("blind", "telemetry")
        case = Case(
            cell(
                workers,
                per_worker * workers,
                expected=True,
                routers=count,
                shared=shared,
                **heard,
            ),
            0,
        )
        figures = report.summarise(case.run("marginal_cost"), case.trace.geometry.layers)
        gain = {q: 100 * (1 - figures["tpot_ms"][q] / reference[q]) for q in ("p50", "p99")}
        rows.append(
            {"routers": count, "fleet": kind, "workers": workers, "tpot_ms": figures["tpot_ms"]}
            | {"gain_pct": gain, "distinct_per_layer": figures["distinct_per_layer"]}
        )
    return rows


PARTS: dict[str, Callable[[], Any]] = {
    "discrete": discrete,
    "expected": expected,
    "expected_split": lambda: expected(routers=16),
    "decision": decision,
    "routers": routers,
}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--part", action="append", choices=PARTS, help="default: all")
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    out: dict[str, Any] = {
        "command": "python -m benchmarks.simulation_scale",
        "machine": {
            "cores": os.cpu_count(),
            "cpu": cpu_name(),
            "python": platform.python_version(),
        },
        "date": time.strftime("%Y-%m-%d"),
        "load_average": os.getloadavg()[0],
    }
    for part in args.part or PARTS:
        out[part] = PARTS[part]()
        if not args.json:
            print(part, json.dumps(out[part], indent=1))
    if args.json:
        print(json.dumps(out))
    return 0


if __name__ == "__main__":
    sys.exit(main())
