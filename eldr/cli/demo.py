"""`eldr demo`: the whole chain on this machine, with the bundled model."""

from __future__ import annotations

import argparse
import json
import signal
import sys
from pathlib import Path
from types import FrameType

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
    from eldr.demo.console import Console
    from eldr.demo.processes import ProcessFailed
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
    signal.signal(signal.SIGTERM, _interrupt)
    console = Console()
    try:
        result = run_demo(config, console)
    except KeyboardInterrupt:
        console.say("interrupted: everything that was started has been stopped")
        return 130
    except (ProcessFailed, RuntimeError, ValueError, OSError) as error:
        console.say(f"failed: {error}")
        return 1
    table = result.pop("table")
    print(json.dumps(result) if args.json else f"\n{table}\n\n{result['conclusion']}")
    return 0 if _checks_hold(result["checks"]) else 1


def _interrupt(number: int, frame: FrameType | None) -> None:
    """SIGTERM stops the children the way Ctrl-C does."""
    raise KeyboardInterrupt


def _checks_hold(checks: dict[str, int]) -> bool:
    return (
        bool(checks["outputs_equal"])
        and checks["prompt_tokens_recomputed"] == 0
        and checks["prompt_tokens_transferred"] > 0
        and checks["signature_mismatches"] == 0
    )
