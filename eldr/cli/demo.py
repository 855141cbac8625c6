"""`eldr demo`: the whole chain on this machine, with the bundled model."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

_EPILOG = """\
Starts one prefill and three decode workers (real vLLM on the CPU, NIXL), records and fits a
partition, replays held-out requests once per policy and compares the experts that the decode
workers read. Needs the patched engine that `make setup` installs.

examples:
  eldr demo                                    the default run
  eldr demo --policies least_requests,locality_band --requests 120

exit codes: 0 done and every check holds, 1 a check or a process failed, 2 usage, 130 interrupted
"""


def configure(parser: argparse.ArgumentParser) -> None:
    """Adds the command's options."""
    parser.epilog = _EPILOG
    parser.add_argument("--out", type=Path, default=Path("demo-out"), help="output folder")
    parser.add_argument("--requests", type=int, default=240, help="requests per policy (240)")
    parser.add_argument("--concurrency", type=int, default=48, help="requests in flight (48)")
    parser.add_argument(
        "--policies",
        default="round_robin,least_requests,locality_band,marginal_cost",
        help="comma-separated router policies, in the order to run them",
    )
    parser.add_argument("--tau", type=float, default=0.1, help="locality band width (0.1)")
    parser.add_argument("--seed", type=int, default=1, help="of order, lengths and sampling (1)")
    parser.add_argument("--json", action="store_true", help="print summary.json instead of a table")


def run(args: argparse.Namespace) -> int:
    """Runs the demo; 0 done, 1 a check or a process failed, 2 usage, 130 interrupted."""
    from eldr.demo.config import DemoConfig
    from eldr.demo.outcome import conclude
    from eldr.demo.run import run_demo

    try:
        config = DemoConfig(
            out=args.out,
            requests=args.requests,
            concurrency=args.concurrency,
            policies=tuple(p.strip() for p in args.policies.split(",") if p.strip()),
            tau=args.tau,
            seed=args.seed,
        )
    except ValueError as error:
        print(f"eldr demo: {error}", file=sys.stderr)
        return 2
    return conclude(lambda console: run_demo(config, console), as_json=args.json)
