"""`make demo-ray`: the demo through Ray Serve instead of `eldr serve`.

    python -m eldr.demo.ray_run [--requests 120] [--policies A,B] [--out DIR]

The same engines, prompts, checks and figures as `eldr demo`; the application is one Ray with a
proxy, a prefill pool and a decode pool. Exit codes: 0 done and every check holds, 1 a check or a
process failed, 2 usage, 130 interrupted.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from eldr.demo.config import DemoConfig
from eldr.demo.outcome import conclude

_POLICIES = "least_requests,locality_band,marginal_cost"
_USAGE = 2


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the demo and returns the exit code."""
    parser = argparse.ArgumentParser(prog="python -m eldr.demo.ray_run", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--out", type=Path, default=Path("demo-out/ray"), help="output folder")
    parser.add_argument("--requests", type=int, default=120, help="requests per policy (120)")
    parser.add_argument("--concurrency", type=int, default=48, help="requests in flight (48)")
    parser.add_argument("--decode", type=int, default=3, help="decode replicas (3)")
    parser.add_argument("--policies", default=_POLICIES, help="comma-separated, in order")
    parser.add_argument("--json", action="store_true", help="print summary.json, not a table")
    args = parser.parse_args(argv)
    try:
        config = DemoConfig(
            out=args.out,
            requests=args.requests,
            concurrency=args.concurrency,
            decode_workers=args.decode,
            policies=tuple(p.strip() for p in args.policies.split(",") if p.strip()),
        )
    except ValueError as error:
        print(f"demo-ray: {error}", file=sys.stderr)
        return _USAGE
    from eldr.demo.ray_fleet import ray_fleet
    from eldr.demo.run import run_demo

    return conclude(lambda console: run_demo(config, console, ray_fleet), as_json=args.json)


if __name__ == "__main__":
    sys.exit(main())
