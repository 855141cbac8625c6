"""The long fuzz: generated requests and worker answers; none may raise what nobody foresaw.

    python -m benchmarks.fuzz [--cases 210000] [--seed 0] [--json]

Rounds of a few thousand cases, since hypothesis slows down with the cases that it remembers. One
case is one generated request body, worker answer, byte stream of a client or worker, Authorization
header, or a whole request through a running router between misbehaving workers. Exit code 1 when
something does not hold: then hypothesis prints the smallest such case.
"""

from __future__ import annotations

import argparse
import asyncio
import datetime
import json
import os
import resource
import sys
import traceback
from collections import Counter

from benchmarks.machine import cpu_name
from tests.serving.fuzzing import PROPERTIES, run, through_a_router

# Whole requests are one part.
_PARTS = 1 + sum(prop.weight for prop in PROPERTIES)
_ROUND = 4000


def fuzz(cases: int, seed: int, done: Counter[str]) -> None:
    """Checks at least so many cases and counts them by kind; raises what a case raised."""
    number = seed
    while done.total() < cases:
        for prop in PROPERTIES:
            done[prop.check.__name__] += run(prop, _ROUND * prop.weight // _PARTS, number)
        whole = _ROUND // _PARTS
        asyncio.run(through_a_router(number, whole))
        done[through_a_router.__name__] += whole
        number += 1
        print(f"{done.total()} cases", file=sys.stderr, flush=True)


def main() -> int:
    """Runs and prints."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--cases", type=int, default=210_000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    args = parser.parse_args()
    done: Counter[str] = Counter()
    failed = None
    try:
        fuzz(args.cases, args.seed, done)
    except Exception:
        failed = traceback.format_exc()
    used = resource.getrusage(resource.RUSAGE_SELF)
    result = {
        "cases": done.total(),
        "by_kind": dict(done),
        "failed": failed,
        "cpu_seconds": round(used.ru_utime + used.ru_stime, 1),
        "machine": {"cores": os.cpu_count(), "cpu": cpu_name()},
        "date": datetime.date.today().isoformat(),
        "command": f"python -m benchmarks.fuzz --cases {args.cases} --seed {args.seed} --json",
    }
    print(json.dumps(result, indent=1 if args.json else None))
    return 0 if failed is None else 1


if __name__ == "__main__":
    sys.exit(main())
