"""`eldr simulate`: what a fleet would do with a policy, from recorded expert routing."""

from __future__ import annotations

import argparse
import itertools
import json
import math
import sys
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from eldr import cli

if TYPE_CHECKING:
    from eldr.simulation.cells import Cell
    from eldr.simulation.study import Result

_EPILOG = """\
examples:
  eldr simulate                             the bundled trace, 8 workers, default policies
  eldr simulate --mix drift --workers 16 --policy least_requests --policy marginal_cost --json
  eldr simulate --trace t.npz --model gpt-oss-120b --hardware mi300x --load 0.7 --plot out/
  eldr simulate --arrivals AzureLLMInferenceTrace_conv.csv --rate 40 --prefill-workers 8

A policy is written name or name:option=value,..., e.g. locality_band:tau=0.2. Half of the trace's
requests calibrate (partitions are fitted on them), the other half is served. Gains are against the
best of random, round_robin, least_requests and power_of_two. Simulated figures rest on assumed
constants: --sensitivity shows how much.

exit codes: 0 done, 2 usage, 3 a package that the option needs is not installed
"""
DEFAULT_POLICIES = (
    "random",
    "round_robin",
    "least_requests",
    "power_of_two",
    "locality_band:tau=0.1",
    "marginal_cost",
)


def configure(parser: argparse.ArgumentParser) -> None:
    """Adds the arguments."""
    parser.epilog = _EPILOG
    add = parser.add_argument
    add("--trace", action="append", metavar="FILE", help="expert trace (repeat), default: bundled")
    add("--mix", action="append", choices=("same", "even", "skewed", "drift"),
        help="kind of traffic (repeat), default same")  # fmt: skip
    add("--workers", action="append", type=int, metavar="W",
        help="decode workers (repeat), default 8")  # fmt: skip
    add("--policy", action="append", metavar="P", help="policy (repeat)")
    add("--requests", type=int, metavar="N", help="requests of a run, default 1000 per worker")
    add("--seeds", type=int, default=1, metavar="K", help="runs per cell, default 1")
    rate = parser.add_mutually_exclusive_group()
    rate.add_argument("--rate", type=float, metavar="R", help="requests per second")
    rate.add_argument("--load", type=float, metavar="F", help="rate as a share of the capacity")
    rate.add_argument("--batch", type=float, metavar="B",
                      help="rate that keeps B requests running per worker, default 32")  # fmt: skip
    add("--json", action="store_true", help="print one JSON object")
    add("--plot", metavar="DIR", help="write TPOT CDF, gain over time and Pareto plots there")
    add("--sensitivity", action="store_true", help="also vary every assumed constant")
    _hardware(parser.add_argument_group("model and hardware"))
    _traffic(parser.add_argument_group("traffic"))
    _scale(parser.add_argument_group("scale"))


def _hardware(group: argparse._ArgumentGroup) -> None:
    add = group.add_argument
    add("--model", default="qwen3-30b-a3b", help="default qwen3-30b-a3b")
    add("--hardware", default="h200", help="h200, mi300x, b200 or cpu; default h200")
    add("--tensor-parallel", type=int, default=1, metavar="T", help="GPUs of a worker")
    add("--expert-parallel", action="store_true",
        help="experts live on one GPU each; the slowest counts")  # fmt: skip
    add("--placement", default="linear", choices=("linear", "round_robin", "spread", "clusters"),
        help="with --expert-parallel: vLLM's linear or round_robin, ranks levelled for the traffic "
        "(spread), or per worker for its cluster's (clusters)")  # fmt: skip
    add("--max-batch", type=int, default=256, help="most requests in a decode step")
    add("--calibration", metavar="FILE",
        help="measured: a result of `make gpu-check`, a log of /eldr/decode (.jsonl), or "
        "coefficients {base, expert, kv, request} in seconds")  # fmt: skip


def _traffic(group: argparse._ArgumentGroup) -> None:
    add = group.add_argument
    add("--arrivals", metavar="FILE[:NAME]", default="",
        help="Azure .csv, Mooncake or decision log .jsonl, .npz:name; default Poisson")  # fmt: skip
    add("--output-tokens", type=int, metavar="N", help="fixed output length")
    add("--prefill-workers", type=int, default=0, metavar="P",
        help="model the prefill pool and the KV transfer; default: both take no time")  # fmt: skip
    add("--cached", type=float, default=0.0, metavar="F",
        help="share of every prompt found in the prefix cache")  # fmt: skip
    add("--events", metavar="FILE", help="JSON lines of workers that join, leave or fail")
    add("--slo-ttft-ms", type=float, default=1000.0, help="goodput: time to first token")
    add("--slo-tpot-ms", type=float, default=50.0, help="goodput: time per output token")


def _scale(group: argparse._ArgumentGroup) -> None:
    add = group.add_argument
    add("--expected", action="store_true",
        help="expected distinct experts, not counted ones: for thousands of workers")  # fmt: skip
    add("--routers", type=int, default=1, metavar="R", help="routers in front of the fleet")
    add("--shared", action="store_true",
        help="every router uses every worker, knowing only its own requests")  # fmt: skip
    add("--know-length", action="store_true", help="tell policies how long each answer will be")
    add("--telemetry", type=float, default=0.0, metavar="S",
        help="routers read the workers' counters every S seconds and learn the step cost; "
        "default: they are told it")  # fmt: skip
    add("--trust", type=float, default=0.0, metavar="F",
        help="how far routers believe them against their own predictions, 0 to 1")  # fmt: skip
    add("--first-seed", type=int, default=0, help=argparse.SUPPRESS)
    add("--processes", type=int, default=2, help="processes to use, default 2")


def run(args: argparse.Namespace) -> int:
    """Simulates, prints, plots."""
    from eldr.simulation.progress import Progress
    from eldr.simulation.study import study

    policies = list(dict.fromkeys(args.policy or DEFAULT_POLICIES))
    seeds = range(args.first_seed, args.first_seed + args.seeds)
    try:
        cells = _cells(args)
        with Progress("simulating") as progress:
            processes = min(max(args.processes, 1), len(cells) * len(seeds))
            results = study(cells, policies, seeds, processes=processes, progress=progress)
        extra = _extra(args, cells, results, policies, seeds)
    except (ValueError, OSError, ImportError) as error:
        print(f"eldr simulate: {error}", file=sys.stderr)
        return cli.CANNOT_TELL if isinstance(error, ImportError) else cli.USAGE
    for result in results:
        if result.saturated:
            print(
                f"eldr simulate: {result.rate:.1f} requests/s is {result.load:.1f} times what "
                f"{result.cell.workers} workers can serve; queues grow without end",
                file=sys.stderr,
            )
    summary = _summary(results) | extra
    print(json.dumps(_finite(summary), allow_nan=False) if args.json else _text(results, extra))
    return cli.DONE


def _cells(args: argparse.Namespace) -> list[Cell]:
    from eldr.simulation.calibration import from_gpu_check, is_gpu_check
    from eldr.simulation.cells import Cell
    from eldr.simulation.cost import deployment
    from eldr.simulation.events import load_events
    from eldr.simulation.report import Objective
    from eldr.simulation.traffic import Mix
    from eldr.workload.tiny import TRACE_PATH

    if args.seeds < 1:
        raise ValueError(f"--seeds must be positive, got {args.seeds}")
    batch = 32.0 if args.rate is None and args.load is None and args.batch is None else args.batch
    expert = args.tensor_parallel if args.expert_parallel else 1
    deployed = deployment(args.model, args.hardware, args.tensor_parallel, expert)
    if args.calibration and args.sensitivity:
        raise ValueError("--sensitivity varies assumed constants; leave --calibration out")
    if args.calibration and is_gpu_check(args.calibration):
        measured = from_gpu_check(args.calibration, deployed.hardware, args.model)
        deployed, args.calibration = replace(deployed, hardware=measured), None
    made = []
    for path, mix, workers in itertools.product(
        args.trace or [str(TRACE_PATH)], args.mix or ["same"], args.workers or [8]
    ):
        made.append(
            Cell(
                trace=path,
                mix=Mix(mix),
                workers=workers,
                cost=_cost(args, deployed, path),
                requests=args.requests or 1000 * workers,
                rate=args.rate,
                load=args.load,
                batch=batch,
                arrivals=_arrivals(args),
                prefill=deployed.prefill(args.prefill_workers, args.cached)
                if args.prefill_workers
                else deployed.instant(),
                events=load_events(args.events, workers) if args.events else (),
                max_batch=args.max_batch,
                kv_tokens=deployed.kv_tokens,
                expert_ranks=expert,
                placement=args.placement,
                expected=args.expected,
                routers=args.routers,
                shared=args.shared,
                know_length=args.know_length,
                telemetry=args.telemetry,
                trust=args.trust,
                objective=Objective(args.slo_ttft_ms / 1e3, args.slo_tpot_ms / 1e3),
            )
        )
    return made


def _cost(args: argparse.Namespace, deployed: Any, path: str) -> Any:
    from eldr.simulation.calibration import load_cost
    from eldr.workload.traces import load

    geometry = load(path).geometry
    return load_cost(args.calibration) if args.calibration else deployed.step_cost(geometry)


def _arrivals(args: argparse.Namespace) -> Any:
    from eldr.simulation.cells import ArrivalSpec

    path, _, name = args.arrivals.partition(":")
    if path.endswith(".npz") and not name:
        raise ValueError(f"--arrivals {path}: name the array, as in {path}:azure_conv")
    return ArrivalSpec(path, name, args.output_tokens)


def _extra(
    args: argparse.Namespace,
    cells: list[Cell],
    results: list[Result],
    policies: list[str],
    seeds: range,
) -> dict[str, Any]:
    """What was asked for beside the figures: plots of the first seed, the sensitivity table."""
    extra: dict[str, Any] = {}
    if args.plot:
        from eldr.simulation import plots
        from eldr.simulation.cells import Case

        extra["plots"] = []
        for cell, result in zip(cells, results, strict=True):
            case = Case(cell, seeds[0])
            outcomes = {p: case.run(p) for p in policies}
            name = result.name.replace("/", "-")
            title = f"{cell.trace_name}, {cell.mix} mix, {cell.workers} workers ({args.model} on "
            title += f"{args.hardware}, simulated)"
            written = plots.draw(outcomes, result.figures, title, Path(args.plot) / name)
            extra["plots"] += [str(p) for p in written]
    if args.sensitivity:
        from eldr.simulation.sensitivity import sensitivity

        expert = args.tensor_parallel if args.expert_parallel else 1
        extra["sensitivity"] = sensitivity(
            cells[0],
            policies,
            seeds,
            args.model,
            args.hardware,
            args.tensor_parallel,
            expert,
            args.prefill_workers,
        )
    return extra


def _summary(results: list[Result]) -> dict[str, Any]:
    """The JSON contract; gains are means over the cells."""
    gains: dict[str, dict[str, float]] = {}
    for policy in results[0].gains:
        gains[policy] = {
            q: sum(r.gains[policy][q] for r in results) / len(results) for q in ("p50", "p99")
        }
    return {
        "cells": [row for result in results for row in result.rows()],
        "best_load_balancer": {result.name: result.best for result in results},
        "gain_pct": gains,
    }


def _finite(value: Any) -> Any:
    """NaN is no JSON: null."""
    if isinstance(value, dict):
        return {k: _finite(v) for k, v in value.items()}
    if isinstance(value, list):
        return [_finite(v) for v in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value


def _text(results: list[Result], extra: dict[str, Any]) -> str:
    head = (
        "policy                      TPOT p50     p99    mean  TTFT p50  experts  max/mean   gain %"
    )
    lines = []
    for result in results:
        lines += ["", f"{result.name}: {result.rate:.1f} requests/s", head]
        for policy, f in result.figures.items():
            tpot, gain = f["tpot_ms"], result.gains.get(policy)
            shown = f"{gain['p50']:+.1f} / {gain['p99']:+.1f}" if gain else ""
            lines.append(
                f"{policy:26s} {tpot['p50']:9.2f} {tpot['p99']:7.2f} {tpot['mean']:7.2f} "
                f"{f['ttft_ms']['p50']:9.1f} {f['distinct_per_layer']:8.1f} "
                f"{f['max_over_mean_load']:9.2f}   {shown}"
            )
    for row in extra.get("sensitivity", []):
        each = [f"{p} {g['p50']:+.1f}/{g['p99']:+.1f}" for p, g in row["gain_pct"].items()]
        lines.append(f"{row['constant']} x {row['factor']:g}: {', '.join(each)}")
    lines += [f"wrote {path}" for path in extra.get("plots", [])]
    lines.append("gain: TPOT p50 / p99 against the best of four load balancers, in %")
    return "\n".join(lines[1:])
