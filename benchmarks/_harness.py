"""Timing on busy machines: peers in interleaved rounds, medians, ratios within one run.

On a CPU two clocks run at once: wall time, and the processor time of this process, which other
processes do not inflate. Ratios are taken on the clock that --clock names. On a GPU each function
is captured in a CUDA graph, replayed in batches and timed with CUDA events; a function that cannot
be captured, because it synchronises, is timed by events around plain calls.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch

from benchmarks.machine import cpu_name

Function = Callable[[], object]


@dataclass(frozen=True, slots=True)
class Case:
    """One line of a benchmark: the product's function, its peers, and the bytes that must move."""

    name: str
    ours: Function
    peers: Mapping[str, Function]
    bytes: int
    threads: int = 1
    extra: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Result:
    """Median microseconds by the chosen clock, of ours and of its peers; peer / ours."""

    name: str
    threads: int
    clock: str
    us: float
    gb_per_s: float
    peers_us: dict[str, float]
    ratios: dict[str, float]
    wall_us: float
    extra: dict[str, Any]


def arguments(description: str) -> argparse.Namespace:
    """--json, --rounds, --quick, --device, --out: the same for every benchmark."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--json", action="store_true", help="one JSON object on stdout")
    parser.add_argument("--rounds", type=int, default=9, help="interleaved rounds per case")
    parser.add_argument("--quick", action="store_true", help="small shapes, few rounds")
    parser.add_argument(
        "--clock",
        choices=("wall", "cpu"),
        default="wall",
        help="cpu: processor time of this process, for busy machines",
    )
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--out", type=Path, help="also write the JSON object to this file")
    args = parser.parse_args()
    if args.rounds < 1:
        parser.error(f"--rounds: {args.rounds} is not positive")
    if args.quick:
        args.rounds = min(args.rounds, 3)
    return args


def measure(case: Case, args: argparse.Namespace) -> Result:
    """Runs ours and the peers in turn, `args.rounds` times, and takes medians."""
    functions: dict[str, Function] = {"ours": case.ours, **case.peers}
    before = torch.get_num_threads()
    torch.set_num_threads(case.threads)
    try:
        timers = {name: _timer(function, args.device) for name, function in functions.items()}
        samples: dict[str, list[Sample]] = {name: [] for name in functions}
        for _ in range(args.rounds):
            for name, timer in timers.items():
                samples[name].append(timer())
    finally:
        torch.set_num_threads(before)
    clock = "gpu" if args.device == "cuda" else args.clock
    us = {name: _median(taken, clock) for name, taken in samples.items()}
    ours = us.pop("ours")
    return Result(
        case.name,
        case.threads,
        clock,
        round(ours, 2),
        round(case.bytes / ours / 1e3, 2),
        {name: round(value, 1) for name, value in us.items()},
        {name: round(value / ours, 2) for name, value in us.items()},
        round(_median(samples["ours"], "wall"), 2),
        dict(case.extra),
    )


# Seconds of one call: by the wall clock or the GPU's events, and of this process's processors.
Sample = tuple[float, float]


def _median(samples: list[Sample], clock: str) -> float:
    return statistics.median(s[1] if clock == "cpu" else s[0] for s in samples) * 1e6


def _timer(function: Function, device: str) -> Callable[[], Sample]:
    function()  # builds, allocates, touches memory
    return _cuda_timer(function) if device == "cuda" else lambda: _host_time(function)


def _host_time(function: Function) -> Sample:
    function()  # untimed: each finds the caches as its own last call left them, not a neighbour's
    cpu, wall = time.process_time(), time.perf_counter()
    function()
    return time.perf_counter() - wall, time.process_time() - cpu


def _cuda_timer(function: Function, replays: int = 50) -> Callable[[], Sample]:
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    try:
        with torch.cuda.graph(graph):
            function()
        launch: Function = graph.replay
    except RuntimeError:  # the function synchronises: a peer's way, not ours
        torch.cuda.synchronize()
        launch, replays = function, 5

    def timer() -> Sample:
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
        start.record()
        for _ in range(replays):
            launch()
        end.record()
        end.synchronize()
        seconds = float(start.elapsed_time(end)) / 1e3 / replays
        return seconds, seconds

    return timer


def thread_scaling(function: Function, rounds: int = 300) -> float:
    """Best wall time on one thread over best on two, rounds interleaved.

    The best, not the median: on a busy machine two cores are rarely free together.
    """
    before, best = torch.get_num_threads(), {1: float("inf"), 2: float("inf")}
    try:
        for _ in range(rounds):
            for threads in best:
                torch.set_num_threads(threads)
                best[threads] = min(best[threads], _host_time(function)[0])
    finally:
        torch.set_num_threads(before)
    return round(best[1] / best[2], 2)


def conditions(device: str) -> dict[str, Any]:
    """Where and when: what a reader needs to judge the figures."""
    return {
        "command": " ".join(
            ["python", "-m", f"benchmarks.{Path(sys.argv[0]).stem}", *sys.argv[1:]]
        ),
        "date": datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC"),
        "cpu": cpu_name(),
        "cores": os.cpu_count(),
        "load": round(os.getloadavg()[0], 1),
        "nice": os.nice(0),
        "torch": torch.__version__,
        "python": platform.python_version(),
        "gpu": torch.cuda.get_device_name() if device == "cuda" else None,
    }


def report(args: argparse.Namespace, results: list[Result], bars: Mapping[str, Any]) -> None:
    """One line per case, or one JSON object with --json; --out writes the object to a file."""
    rows = [{slot: getattr(result, slot) for slot in Result.__slots__} for result in results]
    whole = {"conditions": conditions(args.device), "results": rows, "bars": dict(bars)}
    text = json.dumps(whole, indent=1)
    if args.out:
        args.out.parent.mkdir(parents=True, exist_ok=True)
        args.out.write_text(text + "\n")
    if args.json:
        print(text)
        return
    for r in results:
        peers = "  ".join(f"{name} {ratio:.1f}x" for name, ratio in r.ratios.items())
        print(
            f"{r.name:40s} {r.clock} {r.threads}t {r.us:10.1f} us {r.gb_per_s:8.2f} GB/s  {peers}"
        )
    for name, value in bars.items():
        print(f"{name}: {value}")
