"""How large a fleet the simulator takes, and what routing costs there.

    python -m benchmarks.simulation_scale --json > results/simulation_scale.json

Parts, each in a process of its own: `discrete` (16 workers x 20,000 requests x 5 policies, every
token replayed), `expected` (4,096 workers, 1M requests, marginal_cost, one router),
`expected_split` (the same, the fleet split among 16 routers), `expected_base` (the same,
least_requests), `decision` (time and state per decision against fleet size), `routers` (what is
lost when several routers split a fleet, or share it blindly).
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import resource
import sys
import time
import tracemalloc
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from multiprocessing import get_context
from typing import Any

import numpy as np

from benchmarks import simulation_docs
from benchmarks.machine import cpu_name
from eldr.geometry import Geometry
from eldr.routing.fleet import Fleet
from eldr.routing.policies import make_policy
from eldr.routing.request import RouteRequest
from eldr.routing.worker import Worker
from eldr.signature import Signature
from eldr.simulation import report
from eldr.simulation.cells import ArrivalSpec, Case, Cell
from eldr.simulation.cost import study_cost
from eldr.simulation.traffic import Mix
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


def expected(
    workers: int = 4096,
    requests: int = 1_000_000,
    routers: int = 1,
    policy: str = "marginal_cost",
) -> dict[str, Any]:
    def work() -> dict[str, Any]:
        case = Case(cell(workers, requests, expected=True, routers=routers), 0)
        outcome = case.run(policy, lambda n: show(n, requests))
        return report.summarise(outcome, case.trace.geometry.layers)

    figures, cost = timed(work)
    head = {"workers": workers, "requests": requests, "routers": routers, "policy": policy, **cost}
    kept = ("tpot_ms", "distinct_per_layer", "batch", "max_over_mean_load", "fallbacks")
    return head | {k: figures[k] for k in kept}


def show(done: int, total: int) -> None:
    if done % 65_536 < 1024:
        print(f"{done} of {total}", file=sys.stderr, flush=True)


def signatures_of(geometry: Geometry, count: int = 64, tokens: int = 192) -> list[Signature]:
    """Signatures with a skewed taste of their own, for timing."""
    rng = np.random.default_rng(0)
    made = []
    for _ in range(count):
        share = rng.gamma(0.5, size=(geometry.layers, geometry.experts))
        share *= geometry.top_k / share.sum(axis=1, keepdims=True)
        counts = np.minimum(rng.poisson(tokens * share), tokens)
        made.append(Signature(counts.astype(np.uint32), tokens))
    return made


def decision(
    sizes: tuple[int, ...] = (16, 64, 256, 1024, 4096), timings: int = 300
) -> list[dict[str, Any]]:
    """Median time of reserve and of release, and bytes of state, by geometry and fleet size."""
    rows = []
    for geometry in (Geometry(4, 64, 4), Geometry(48, 128, 8)):
        known = signatures_of(geometry)
        rows += [_decision(geometry, known, workers, timings) for workers in sizes]
    return rows


def _decision(
    geometry: Geometry, known: list[Signature], workers: int, timings: int
) -> dict[str, Any]:
    tracemalloc.start()
    fleet = Fleet(
        make_policy("marginal_cost"),
        [Worker(f"w{i}") for i in range(workers)],
        geometry=geometry,
    )
    empty = tracemalloc.get_traced_memory()[0]
    running = min(30 * workers, 2000)
    for i in range(running):
        fleet.reserve(RouteRequest(str(i), known[i % len(known)]))
    per_request = (tracemalloc.get_traced_memory()[0] - empty) / running
    tracemalloc.stop()
    reserve, release = [], []
    for i in range(timings):
        request = RouteRequest(f"x{i}", known[i % len(known)])
        a = time.perf_counter()
        fleet.reserve(request)
        b = time.perf_counter()
        fleet.release(request.id)
        reserve.append(b - a)
        release.append(time.perf_counter() - b)
    return {
        "workers": workers,
        "geometry": str(geometry),
        "reserve_us": float(np.median(reserve) * 1e6),
        "release_us": float(np.median(release) * 1e6),
        "worker_state_mb": empty / 2**20,
        "request_state_kb": per_request / 2**10,
    }


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
    "expected_split": partial(expected, routers=16),
    "expected_base": partial(expected, policy="least_requests"),
    "decision": decision,
    "routers": routers,
}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--part", action="append", choices=PARTS, help="default: all")
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    out: dict[str, Any] = {
        "command": "python -m benchmarks.simulation_scale " + " ".join(sys.argv[1:]),
        "machine": {
            "cores": os.cpu_count(),
            "cpu": cpu_name(),
            "python": platform.python_version(),
        },
        "date": time.strftime("%Y-%m-%d"),
        "simulated": True,
        "load_average": os.getloadavg()[1],
    }
    for part in args.part or PARTS:
        with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as alone:
            out[part] = alone.submit(PARTS[part]).result()
    print(json.dumps(out) if args.json else tables(out))
    return 0


def tables(out: dict[str, Any]) -> str:
    """The tables of docs/scale.md for the parts that were run."""
    shown = [simulation_docs.runs(out)]
    if "decision" in out:
        shown.append(simulation_docs.decisions(out))
    if "routers" in out:
        shown.append(simulation_docs.routers(out))
    return "\n\n".join(shown)


if __name__ == "__main__":
    sys.exit(main())
