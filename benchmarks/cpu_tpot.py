"""A real TPOT on a CPU: real vLLM decode steps of the batches that each policy would have made.

    python -m benchmarks.cpu_tpot --json > results/cpu_tpot.json

The demo model's experts are widened with zero-weight units (the function stays the same) until
reading them dominates a step. The simulator runs the same requests through a fleet under every
policy; at the same moments, the batch of every worker is taken and decoded by one real vLLM engine,
policies in turn, so that a slow moment of the machine falls on all of them. A sweep of batches of
one domain and of all, of 2 to 32 requests, goes with them: the fit of step time against distinct
experts is over everything. Prompts come from the prefix cache; only steps in which every request
decodes one token are timed.

Two clocks: `wall`, and `cpu`, the processor time of the engine's process, which does not count what
a busy machine gives to others (it still feels their traffic on the memory bus). `clock` in the
output says which one the verdict uses.
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
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.machine import cpu_name
from eldr.simulation.cells import ArrivalSpec, Case, Cell
from eldr.simulation.cost import study_cost
from eldr.simulation.run import Outcome
from eldr.simulation.traffic import Mix
from eldr.workload.tiny import MODEL_DIR, TRACE_PATH
from eldr.workload.traces import ExpertTrace, load

SWEEP = "sweep"
SWEEP_SIZES = (2, 4, 8, 16, 32)
BASE = "least_requests"
POLICIES = (BASE, "locality_band:tau=0.1", "marginal_cost")
OURS = POLICIES[1:]


@dataclass(frozen=True, slots=True)
class Batch:
    """What one worker ran at one moment under one policy: requests, as rows of the trace."""

    moment: int
    worker: int
    policy: str
    rows: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Measured:
    """Means over the timed steps of a batch."""

    moment: int
    worker: int
    policy: str
    requests: int
    distinct: float
    wall_ms: float
    cpu_ms: float


def batches(
    workers: int, load_: float, moments: int, seed: int, policies: Sequence[str]
) -> list[Batch]:
    """Every worker's running requests at equally spaced moments, policies interleaved."""
    cost = study_cost(load(TRACE_PATH).geometry)
    arrivals = ArrivalSpec(clip=(16, 400))
    cell = Cell(
        str(TRACE_PATH), Mix.SAME, workers, cost, 400 * workers, batch=load_, arrivals=arrivals
    )
    case = Case(cell, seed)
    outcomes = {p: case.run(p) for p in policies}
    span = case.traffic.arrivals.times[-1]
    rng = random.Random(seed)
    made = []
    for moment in range(moments):
        now = span * (0.2 + 0.7 * (moment + 0.5) / moments)
        for worker in range(workers):
            turn = [
                Batch(moment, worker, p, rows)
                for p, o in outcomes.items()
                if (rows := running(o, worker, now))
            ]
            rng.shuffle(turn)
            made += turn
    return made


def sweep(trace: ExpertTrace, seed: int) -> list[Batch]:
    """Batches of one domain and of all domains, small to large."""
    rng = np.random.default_rng(seed)
    made = []
    for size in SWEEP_SIZES:
        one = np.flatnonzero(trace.domain == rng.integers(len(trace.domains)))
        for pool in (one, np.arange(len(trace))):
            rows = rng.choice(pool, size, replace=False)
            made.append(Batch(-1, -1, SWEEP, tuple(int(r) for r in rows)))
    return made


def spread(work: Sequence[Batch], extra: Sequence[Batch]) -> list[Batch]:
    """`extra` laid in between, evenly: a drift of the machine must not look like a slope."""
    out = list(work)
    for i, batch in enumerate(extra):
        out.insert((i * len(work)) // max(1, len(extra)) + i, batch)
    return out


def running(outcome: Outcome, worker: int, now: float) -> tuple[int, ...]:
    """Rows of the requests that decode on a worker at a moment."""
    here = (outcome.worker == worker) & (outcome.first_token <= now) & (outcome.end > now)
    return tuple(int(r) for r in outcome.traffic.rows[here])


class Engine:
    """One real vLLM engine in this process, counting the experts that its decode steps read."""

    def __init__(self, model: Path, most: int, trace: ExpertTrace) -> None:
        from eldr.engine.testing import inprocess

        self._llm = inprocess.start(
            str(model),
            max_num_seqs=most,
            max_model_len=512,
            enable_prefix_caching=True,
            additional_config={"eldr": {"role": "decode"}},
        )
        self._hook = inprocess.worker(self._llm).model_runner.eldr
        self._trace = trace
        self._sent = 0

    def decode(self, rows: Sequence[int], steps: int) -> list[tuple[float, float, float]]:
        """Decodes the requests together; (wall s, CPU s, distinct experts per layer) per step."""
        from vllm import SamplingParams

        engine = self._llm.llm_engine
        for row in rows:
            start = self._trace.offsets[row]
            prompt = self._trace.tokens[start : self._trace.cuts[row]].tolist()
            self._sent += 1
            params = SamplingParams(
                temperature=0.8, seed=row, max_tokens=steps + 8, ignore_eos=True, detokenize=False
            )
            engine.add_request(f"r{self._sent}", {"prompt_token_ids": prompt}, params)
        timed: list[tuple[float, float, float]] = []
        while engine.has_unfinished_requests():
            before, wall, cpu = self._hook.decode(), time.perf_counter(), time.process_time()
            engine.step()
            wall, cpu = time.perf_counter() - wall, time.process_time() - cpu
            after = self._hook.decode()
            whole = after["tokens"] - before["tokens"] == len(rows)
            if after["steps"] - before["steps"] == 1 and whole and len(timed) < steps:
                distinct = sum(after["distinct"]) - sum(before["distinct"])
                timed.append((wall, cpu, distinct / len(after["distinct"])))
        return timed


def measure(engine: Engine, work: Sequence[Batch], steps: int) -> list[Measured]:
    rows = []
    for i, batch in enumerate(work):
        # The median step: a page fault or a context switch is not the policy's.
        wall, cpu, distinct = np.array(engine.decode(batch.rows, steps)).T
        rows.append(
            Measured(
                batch.moment, batch.worker, batch.policy, len(batch.rows), float(distinct.mean()),
                float(np.median(wall) * 1e3), float(np.median(cpu) * 1e3),
            )
        )  # fmt: skip
        print(f"{i + 1} of {len(work)}: {rows[-1]}", file=sys.stderr, flush=True)
    return rows


def fit(rows: Sequence[Measured], clock: str) -> dict[str, Any]:
    """Step time against distinct experts alone, and with the batch size."""
    times = np.array([getattr(r, f"{clock}_ms") for r in rows])
    distinct = np.array([r.distinct for r in rows])
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


def tpot(rows: Sequence[Measured], clock: str, moments: Sequence[int]) -> dict[str, float]:
    """Median over the running requests of these moments of their step time, per policy."""
    out = {}
    for policy in dict.fromkeys(r.policy for r in rows if r.policy != SWEEP):
        mine = [r for m in moments for r in rows if r.policy == policy and r.moment == m]
        values = np.repeat([getattr(r, f"{clock}_ms") for r in mine], [r.requests for r in mine])
        out[policy] = float(np.median(values))
    return out


def ratios(rows: Sequence[Measured], clock: str, seed: int = 0) -> dict[str, Any]:
    """TPOT of every policy over that of least_requests; 95 % interval by resampling moments."""
    moments = sorted({r.moment for r in rows if r.policy != SWEEP})
    whole = tpot(rows, clock, moments)
    rng = np.random.default_rng(seed)
    drawn = [tpot(rows, clock, rng.choice(moments, len(moments)).tolist()) for _ in range(400)]
    out = {}
    for policy in whole:
        values = [d[policy] / d[BASE] for d in drawn]
        low, high = np.percentile(values, (2.5, 97.5))
        out[policy] = {
            "tpot_ms": whole[policy],
            "ratio": whole[policy] / whole[BASE],
            "interval": [float(low), float(high)],
            "distinct": float(np.mean([r.distinct for r in rows if r.policy == policy])),
        }
    return out


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--width", type=int, default=4096, help="units of an expert")
    parser.add_argument("--workers", type=int, default=8)
    parser.add_argument("--batch", type=float, default=16.0, help="mean batch of a worker")
    parser.add_argument("--moments", type=int, default=3)
    parser.add_argument("--steps", type=int, default=16, help="timed steps of a batch")
    parser.add_argument("--rounds", type=int, default=1, help="times that every batch is measured")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--clock", choices=("wall", "cpu"), default="wall")
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    os.environ.setdefault("VLLM_LOGGING_STREAM", "ext://sys.stderr")  # stdout is the report's
    try:
        import vllm  # noqa: F401
    except ImportError:
        print("cpu_tpot: needs the patched vLLM (make setup)", file=sys.stderr)
        return 3
    from eldr.workload.widen import widen_experts

    trace = load(TRACE_PATH)
    made = batches(args.workers, args.batch, args.moments, args.seed, POLICIES)
    work = spread(made, sweep(trace, args.seed)) * args.rounds
    with tempfile.TemporaryDirectory() as folder:
        wide = widen_experts(MODEL_DIR, Path(folder) / "wide", args.width)
        most = max(len(b.rows) for b in work)
        engine = Engine(wide.path, most, trace)
        engine.decode(work[0].rows, args.steps)  # warm-up
        rows = measure(engine, work, args.steps)
    summary = {
        "command": "python -m benchmarks.cpu_tpot " + " ".join(sys.argv[1:]),
        "machine": {
            "cores": os.cpu_count(),
            "cpu": cpu_name(),
            "python": platform.python_version(),
        },
        "date": time.strftime("%Y-%m-%d"),
        "load_average": os.getloadavg()[1],
        "weights_mb": wide.total_bytes / 1e6,
        "clock": args.clock,
        "fit": {clock: fit(rows, clock) for clock in ("wall", "cpu")},
        "policies": {clock: ratios(rows, clock) for clock in ("wall", "cpu")},
        "batches": [asdict(r) for r in rows],
    }
    best = min(OURS, key=lambda p: summary["policies"][args.clock][p]["ratio"])
    summary["verdict"] = {
        "r2": summary["fit"][args.clock]["distinct_and_batch"]["r2"],
        "best": best,
        "ratio": summary["policies"][args.clock][best]["ratio"],
    }
    print(json.dumps(summary if args.json else {**summary, "batches": len(rows)}, indent=None))
    return 0


if __name__ == "__main__":
    sys.exit(main())
