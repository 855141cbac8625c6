"""`eldr assess`: would expert-locality routing pay on this traffic and fleet?"""

from __future__ import annotations

import argparse
import json
import sys
from typing import TYPE_CHECKING, Any

from eldr import cli

if TYPE_CHECKING:
    from eldr.routing.cost import StepCost

_EPILOG = """\
The step cost is base + (expert bytes of the distinct experts) / bandwidth. Without these three
options, expert reads are assumed to be two thirds of a busy step.

examples:
  eldr assess signatures.npz --workers 8 --batch 32 --expert-mb 9.4 --bandwidth-gb 3600 --base-ms 3

exit codes: 0 deploy, 1 not worth it, 2 usage, 3 needs more data, or the file cannot be read
"""


def configure(parser: argparse.ArgumentParser) -> None:
    """Adds the arguments."""
    parser.epilog = _EPILOG
    parser.add_argument(
        "signatures", help="file written by `eldr record`, or a decision log with signatures"
    )
    parser.add_argument("--workers", type=int, required=True, help="decode workers")
    parser.add_argument("--batch", type=int, default=16, help="running requests per worker")
    parser.add_argument("--expert-mb", type=float, help="megabytes of one expert of one layer")
    parser.add_argument("--bandwidth-gb", type=float, help="achieved GB/s of a decode worker")
    parser.add_argument("--base-ms", type=float, help="step time without expert reads")
    parser.add_argument(
        "--worthwhile", type=float, default=2.0, metavar="PCT", help="least TPOT saving, percent"
    )
    parser.add_argument("--rounds", type=int, default=5, help="independent repetitions")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", action="store_true", help="print one JSON object")


def run(args: argparse.Namespace) -> int:
    """Assesses and reports."""
    from eldr.cli.logged import LogError, load_signatures
    from eldr.routing.assess import Plan, assess
    from eldr.routing.recorded import RecordedError

    try:
        recorded = load_signatures(args.signatures)
    except (RecordedError, LogError) as error:
        print(f"eldr assess: {error}", file=sys.stderr)
        return cli.CANNOT_TELL
    try:
        cost = _cost(args, recorded.geometry.cells)
        plan = Plan(
            args.workers,
            args.batch,
            cost,
            worthwhile=args.worthwhile / 100,
            rounds=args.rounds,
            seed=args.seed,
        )
        report = assess(recorded, plan)
    except ValueError as error:
        print(f"eldr assess: {error}", file=sys.stderr)
        return cli.USAGE
    print(json.dumps(report) if args.json else _text(report))
    return {"deploy": cli.DONE, "not worth it": cli.NO}.get(report["verdict"], cli.CANNOT_TELL)


def _cost(args: argparse.Namespace, cells: int) -> StepCost:
    from eldr.routing.cost import StepCost
    from eldr.routing.step_fit import prior

    given = (args.expert_mb, args.bandwidth_gb, args.base_ms)
    if all(value is None for value in given):
        return prior(cells)
    if any(value is None or not value > 0 for value in given):
        raise ValueError("give --expert-mb, --bandwidth-gb and --base-ms together, all positive")
    return StepCost(args.base_ms * 1e-3, args.expert_mb * 1e6 / (args.bandwidth_gb * 1e9))


def _text(report: dict[str, Any]) -> str:
    lines = [
        f"{report['verdict']}: {report['why']}",
        f"  {report['signatures']} signatures, {report['geometry']}, truth: {report['truth']}",
        f"  {'policy':15} {'experts/layer':>13} {'step ms':>8} {'TPOT saved':>11}  95 % interval",
    ]
    for name, row in report["policies"].items():
        low, high = row["interval"]
        lines.append(
            f"  {name:15} {row['distinct_per_layer']:13.1f} {row['step_ms']:8.2f} "
            f"{row['tpot_reduction']:11.1%}  {low:.1%} to {high:.1%}"
        )
    return "\n".join(lines)
