"""A real TPOT on a CPU: real vLLM decode steps of the batches that each policy would have made.

    python -m benchmarks.cpu_tpot --json > results/cpu_tpot.json

The demo model's experts are widened with zero-weight units (the function stays the same) until
reading them dominates a step. Then, with one real vLLM engine on one thread:

1. A sweep, batches of one domain and of all, of 2 to 32 requests, gives the step cost of this
   machine (`eldr.simulation.calibration.fit`, as for a worker's counters).
2. The simulator, with that cost, runs the same requests through a fleet under every policy. At the
   same moments the batch of every worker is taken.
3. The engine decodes these batches, one after another, policies in turn within each worker and
   moment, all of it in several rounds of different order, with another sweep in between. So a slow
   moment of the machine falls on all policies, and a drift does not look like a slope.

Prompts come from the prefix cache; only steps in which every request decodes one token are timed,
and a batch counts with its median step. A running request's TPOT at a moment is the step time of
its batch. Intervals: 95 %, from resampling the moments.

Two clocks: `wall`, and `cpu`, the processor time of the engine's process, which does not count what
a busy machine gives to others (it still feels their traffic on the memory bus). `waited` in the
output is the share of the wall time that the process did not run: above some percent, the machine
was not quiet and the wall clock says little.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import random
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.cpu_tpot_engine import CLOCKS, Batch, Engine, Measured, measure
from benchmarks.machine import cpu_name
from eldr.routing.cost import StepCost
from eldr.simulation import calibration
from eldr.simulation.cells import ArrivalSpec, Case, Cell
from eldr.simulation.run import Outcome
from eldr.simulation.traffic import Mix
from eldr.workload.tiny import MODEL_DIR, TRACE_PATH
from eldr.workload.traces import ExpertTrace, load

SWEEP = "sweep"
SWEEP_SIZES = (2, 4, 8, 16, 32)
BASE = "least_requests"
# power=1 minimises the sum of step times itself: what a machine bound by experts alone asks for.
POLICIES = (BASE, "locality_band:tau=0.1", "marginal_cost", "marginal_cost:power=1")
OURS = POLICIES[1:]
MOST = 128  # requests in a batch that the engine takes


def sweep(trace: ExpertTrace, seed: int) -> list[Batch]:
    """Batches of one domain and of all domains, small to large, shuffled."""
    rng = np.random.default_rng(seed)
    made = []
    for size in SWEEP_SIZES:
        one = np.flatnonzero(trace.domain == rng.integers(len(trace.domains)))
        for pool in (one, np.arange(len(trace))):
            rows = rng.choice(pool, size, replace=False)
            made.append(Batch(-1, seed, SWEEP, tuple(int(r) for r in rows)))
    rng.shuffle(made)
    return made


def schedule(
    cost: StepCost, workers: int, load_: float, moments: int, seed: int
) -> tuple[list[Batch], dict[str, dict[str, float]]]:
    """Every worker's running requests at equally spaced moments, and the simulated TPOT in ms."""
    arrivals = ArrivalSpec(clip=(16, 400))
    cell = Cell(
        str(TRACE_PATH), Mix.SAME, workers, cost, 400 * workers, batch=load_, arrivals=arrivals
    )
    case = Case(cell, seed)
    outcomes = {p: case.run(p) for p in POLICIES}
    span = case.traffic.arrivals.times[-1]
    made, expected = [], {}
    for policy, outcome in outcomes.items():
        times = 1e3 * outcome.tpot[np.isfinite(outcome.tpot)]
        expected[policy] = {f"p{q}": float(np.percentile(times, q)) for q in (50, 99)}
        for moment in range(moments):
            now = span * (0.2 + 0.7 * (moment + 0.5) / moments)
            for worker in range(workers):
                if rows := running(outcome, worker, now):
                    made.append(Batch(moment, worker, policy, rows))
    return made, expected


def running(outcome: Outcome, worker: int, now: float) -> tuple[int, ...]:
    """Rows of the requests that decode on a worker at a moment."""
    here = (outcome.worker == worker) & (outcome.first_token <= now) & (outcome.end > now)
    return tuple(int(r) for r in outcome.traffic.rows[here])


def interleaved(work: Sequence[Batch], extra: Sequence[Batch], seed: int) -> list[Batch]:
    """Moments and workers in random order, a worker's policies side by side, `extra` in between."""
    rng = random.Random(seed)
    turns: dict[tuple[int, int], list[Batch]] = {}
    for batch in work:
        turns.setdefault((batch.moment, batch.worker), []).append(batch)
    order = list(turns.values())
    rng.shuffle(order)
    for turn in order:
        rng.shuffle(turn)
    out = [batch for turn in order for batch in turn]
    for i, batch in enumerate(extra):
        out.insert((i * len(work)) // max(1, len(extra)) + i, batch)
    return out


def fit(rows: Sequence[Measured], clock: str) -> dict[str, Any]:
    """Step time against distinct experts alone, and with the batch size; ms."""
    times = np.array([r.ms(clock) for r in rows])
    distinct = np.array([np.mean(r.distinct) for r in rows])
    size = np.array([float(r.requests) for r in rows])
    out: dict[str, Any] = {}
    for name, columns in (("distinct", [distinct]), ("distinct_and_batch", [distinct, size])):
        a = np.stack([np.ones_like(times), *columns], axis=1)
        solution, *_ = np.linalg.lstsq(a, times, rcond=None)
        residual = times - a @ solution
        out[name] = {
            "r2": float(1 - residual.var() / times.var()),
            "ms": dict(zip(["base", "expert", "request"], solution.tolist(), strict=False)),
        }
    return out


def fits(rows: Sequence[Measured], clock: str) -> dict[str, Any]:
    """`fit` of all batches, and of the sweep's alone, which spread evenly from few experts to many.

    R^2 grows with that spread: the policies' batches are alike, so noise is more of their variance.
    """
    swept = [r for r in rows if r.batch.policy == SWEEP]
    return {"all": fit(rows, clock), "sweep": fit(swept, clock)}


def smooth(rows: Sequence[Measured], clock: str) -> dict[Batch, float]:
    """Step times in ms as the fit gives them, from the counted experts and the batch size."""
    known = fit(rows, clock)["distinct_and_batch"]["ms"]
    return {
        r.batch: known["base"]
        + known["expert"] * float(np.mean(r.distinct))
        + known["request"] * r.requests
        for r in rows
    }


def tpot(
    rows: Sequence[Measured], times: dict[Batch, float], moments: Sequence[int]
) -> dict[str, Any]:
    """Over the running requests of these moments, the median and mean of their step time in ms."""
    out = {}
    for policy in POLICIES:
        mine = [r for m in moments for r in rows if (r.batch.policy, r.batch.moment) == (policy, m)]
        values = np.repeat([times[r.batch] for r in mine], [r.requests for r in mine])
        out[policy] = {"p50": float(np.median(values)), "mean": float(values.mean())}
    return out


def ratios(rows: Sequence[Measured], clock: str, seed: int = 0) -> dict[str, Any]:
    """TPOT of every policy over that of least_requests; 95 % interval by resampling moments.

    `fitted_ratio` is the ratio of medians with every step time replaced by the fit's, which leaves
    the machine's noise out.
    """
    moments = sorted({r.batch.moment for r in rows if r.batch.policy != SWEEP})
    times = {r.batch: r.ms(clock) for r in rows}
    whole, fitted = (tpot(rows, t, moments) for t in (times, smooth(rows, clock)))
    rng = np.random.default_rng(seed)
    drawn = [tpot(rows, times, rng.choice(moments, len(moments)).tolist()) for _ in range(1000)]
    out = {}
    for policy in whole:
        mine = [r for r in rows if r.batch.policy == policy]
        low, high = np.percentile([d[policy]["p50"] / d[BASE]["p50"] for d in drawn], (2.5, 97.5))
        out[policy] = {
            "tpot_ms": whole[policy]["p50"],
            "ratio": whole[policy]["p50"] / whole[BASE]["p50"],
            "interval": [float(low), float(high)],
            "mean_ratio": whole[policy]["mean"] / whole[BASE]["mean"],
            "fitted_ratio": fitted[policy]["p50"] / fitted[BASE]["p50"],
            "distinct": float(np.mean([np.mean(r.distinct) for r in mine])),
            "batch": float(np.mean([r.requests for r in mine])),
        }
    return out


def waited(rows: Sequence[Measured]) -> float:
    """Share of the wall time of the timed steps in which the process did not run."""
    wall, cpu = (sum(sum(getattr(r, c)) for r in rows) for c in CLOCKS)
    return max(0.0, 1.0 - cpu / wall)


def run(args: argparse.Namespace, model: Path, trace: ExpertTrace) -> dict[str, Any]:
    """Calibrates, simulates, measures."""
    engine = Engine(model, MOST, trace)
    layers = trace.geometry.layers
    first = [sweep(trace, args.seed), sweep(trace, args.seed + 1)]
    measure(engine, first[:1], 2, "warm-up")
    swept = measure(engine, first, args.steps, "calibration")
    known = calibration.fit([r.sample(args.clock, layers) for r in swept])
    made, expected = schedule(known.cost, args.workers, args.batch, args.moments, args.seed)
    extra = sweep(trace, args.seed + 2)
    work = [interleaved(made, extra, args.seed + r) for r in range(args.rounds)]
    rows = measure(engine, work, args.steps, "schedule")
    cost = known.cost
    return {
        "clock": args.clock,
        "waited": waited(rows),
        "calibration": {
            "r2": known.r2,
            "ms": {"base": 1e3 * cost.base, "expert": 1e3 * cost.expert * layers,
                   "request": 1e3 * cost.request},
        },
        "simulated": {p: {**e, "ratio": e["p50"] / expected[BASE]["p50"]}
                      for p, e in expected.items()},
        "fit": {clock: fits(rows + swept, clock) for clock in CLOCKS},
        "policies": {clock: ratios(rows, clock) for clock in CLOCKS},
        "batches": [
            {"moment": r.batch.moment, "worker": r.batch.worker, "policy": r.batch.policy,
             "requests": r.requests, "distinct": float(np.mean(r.distinct)),
             "wall_ms": r.ms("wall"), "cpu_ms": r.ms("cpu")}
            for r in rows + swept
        ],
    }  # fmt: skip


def verdict(found: dict[str, Any]) -> dict[str, Any]:
    """The bars: R^2 of the fit of all batches, and the better of our policies.

    `r2_distinct` is that of the distinct experts without the batch size, for all and for the sweep.
    """
    clock = found["clock"]
    policies = found["policies"][clock]
    best = min(OURS, key=lambda p: float(policies[p]["ratio"]))
    fitted = found["fit"][clock]
    r2 = fitted["all"]["distinct_and_batch"]["r2"]
    ratio, interval = policies[best]["ratio"], policies[best]["interval"]
    return {
        "r2": r2,
        "r2_distinct": {which: f["distinct"]["r2"] for which, f in fitted.items()},
        "best": best,
        "ratio": ratio,
        "interval": interval,
        "bars_met": bool(r2 >= 0.9 and ratio <= 0.9),
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--width", type=int, default=4096, help="units of an expert")
    parser.add_argument("--workers", type=int, default=8)
    parser.add_argument("--batch", type=float, default=16.0, help="mean batch of a worker")
    parser.add_argument("--moments", type=int, default=12)
    parser.add_argument("--steps", type=int, default=8, help="timed steps of a batch in a round")
    parser.add_argument("--rounds", type=int, default=2, help="times that every batch is measured")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--clock", choices=CLOCKS, default="wall")
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    os.environ.setdefault("VLLM_LOGGING_STREAM", "ext://sys.stderr")  # stdout is the report's
    try:
        import vllm  # noqa: F401
    except ImportError:
        print("cpu_tpot: needs the patched vLLM (make setup)", file=sys.stderr)
        return 3
    from eldr.workload.widen import widen_experts

    started = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        wide = widen_experts(MODEL_DIR, Path(folder) / "wide", args.width)
        found = run(args, wide.path, load(TRACE_PATH))
    summary = {
        "command": "python -m benchmarks.cpu_tpot " + " ".join(sys.argv[1:]),
        "machine": {
            "cores": os.cpu_count(),
            "cpu": cpu_name(),
            "python": platform.python_version(),
        },
        "date": time.strftime("%Y-%m-%d"),
        "load_average": os.getloadavg()[1],
        "parameters": {
            name: getattr(args, name)
            for name in ("width", "workers", "batch", "moments", "steps", "rounds", "seed")
        },
        "weights_mb": wide.total_bytes / 1e6,
        "seconds": time.monotonic() - started,
        "verdict": verdict(found),
        **found,
    }
    print(json.dumps(summary if args.json else {**summary, "batches": len(found["batches"])}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
