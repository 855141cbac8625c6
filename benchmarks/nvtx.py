"""Cost of an NVTX site, ns: off (the bar is 50), and with the package but no profiler attached.

    python -m benchmarks.nvtx [--json]

CPU time of a loop with the site minus that of the same loop without it. Short loops, interleaved;
the fastest of each kind counts, because a shared machine only ever adds time.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import platform
import time
from collections.abc import Callable

from benchmarks.machine import cpu_name
from eldr import tracing

LOOPS, ROUNDS = 5_000, 801
BAR_NS = 50.0


def bare(loops: int) -> None:
    for _ in range(loops):
        pass


def site(loops: int) -> None:
    for _ in range(loops):
        if tracing.ON:
            tracing.push(tracing.ACCUMULATE, loops)
        if tracing.ON:
            tracing.pop()


def unguarded(loops: int) -> None:
    for _ in range(loops):
        tracing.push(tracing.ACCUMULATE, loops)
        tracing.pop()


def _time(function: Callable[[int], None]) -> float:
    start = time.thread_time_ns()
    function(LOOPS)
    return (time.thread_time_ns() - start) / LOOPS


def cost(function: Callable[[int], None]) -> float:
    """Extra ns per pass over an empty loop."""
    pairs = [(_time(bare), _time(function)) for _ in range(ROUNDS)]
    base, loaded = (min(times) for times in zip(*pairs, strict=True))
    return round(loaded - base, 1)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    args = parser.parse_args()
    if tracing.ON:
        raise SystemExit("benchmarks.nvtx measures sites that are off: unset ELDR_NVTX")
    off = cost(site)
    result = {
        "command": "python -m benchmarks.nvtx --json",
        "date": datetime.date.today().isoformat(),
        "machine": {
            "cpu": cpu_name(),
            "cores": os.cpu_count(),
            "python": platform.python_version(),
        },
        "ns_per_site": {"off": off, "off_without_guard": cost(unguarded)},
        "bar_ns": BAR_NS,
        "holds": off <= BAR_NS,
    }
    print(json.dumps(result, indent=None if args.json else 2))
    return 0 if result["holds"] else 1


if __name__ == "__main__":
    raise SystemExit(main())
