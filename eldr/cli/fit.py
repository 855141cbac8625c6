"""`eldr fit`: a balanced partition from recorded signatures."""

from __future__ import annotations

import argparse
import json
import sys

from eldr import cli

_EPILOG = """\
examples:
  eldr fit signatures.npz --workers 4 -o partition.safetensors
  eldr fit signatures.npz --worker d0 --worker d1=2 -o partition.safetensors   (d1 twice as large)

exit codes: 0 written, 1 these signatures cannot be clustered so, 2 usage, 3 a file cannot be used
"""


def configure(parser: argparse.ArgumentParser) -> None:
    """Adds the arguments."""
    parser.epilog = _EPILOG
    parser.add_argument(
        "signatures", help="file written by `eldr record`, or a decision log with signatures"
    )
    fleet = parser.add_mutually_exclusive_group(required=True)
    fleet.add_argument("--workers", type=int, metavar="N", help="number of decode workers")
    fleet.add_argument(
        "--worker",
        action="append",
        metavar="NAME[=WEIGHT]",
        help="name of a decode worker and its relative capacity (repeat per worker)",
    )
    parser.add_argument("-o", "--output", required=True, metavar="FILE", help="artefact to write")
    parser.add_argument("--seed", type=int, default=0, help="seed of the K-means seedings")
    parser.add_argument("--restarts", type=int, default=4, help="K-means seedings to try")
    parser.add_argument("--no-idf", action="store_true", help="do not weigh hits by their rarity")
    parser.add_argument(
        "--all-layers",
        action="store_true",
        help="use every layer even if the file has decode counts to select layers by",
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object")


def run(args: argparse.Namespace) -> int:
    """Fits, writes and reports."""
    from eldr.cli.logged import LogError, load_signatures
    from eldr.routing.fit import FitError, fit_partition
    from eldr.routing.recorded import RecordedError

    try:
        names, weights = _workers(args)
    except ValueError as error:
        print(f"eldr fit: {error}", file=sys.stderr)
        return cli.USAGE
    try:
        recorded = load_signatures(args.signatures)
    except (RecordedError, LogError) as error:
        print(f"eldr fit: {error}", file=sys.stderr)
        return cli.CANNOT_TELL
    try:
        partition = fit_partition(
            recorded,
            names,
            weights=weights,
            idf=not args.no_idf,
            select_layers=recorded.decode is not None and not args.all_layers,
            restarts=args.restarts,
            seed=args.seed,
        )
        partition.save(args.output)
    except FitError as error:
        print(f"eldr fit: {error}", file=sys.stderr)
        return cli.NO
    except OSError as error:
        print(f"eldr fit: cannot write {args.output}: {error}", file=sys.stderr)
        return cli.CANNOT_TELL
    summary = {
        "output": args.output,
        "digest": partition.digest,
        "model": partition.model,
        "workers": list(partition.names),
        **partition.metrics,
    }
    print(json.dumps(summary) if args.json else _text(summary))
    return cli.DONE


def _workers(args: argparse.Namespace) -> tuple[list[str], list[float]]:
    if args.worker is None:
        if args.workers < 1:
            raise ValueError(f"--workers must be at least 1, got {args.workers}")
        return [f"worker-{i}" for i in range(args.workers)], [1.0] * args.workers
    names, weights = [], []
    for text in args.worker:
        name, _, weight = text.partition("=")
        try:
            value = float(weight or 1)
        except ValueError:
            value = 0.0
        if not name or not 0 < value < float("inf"):
            raise ValueError(f"--worker {text!r}: expected NAME or NAME=WEIGHT with WEIGHT > 0")
        names.append(name)
        weights.append(value)
    if len(set(names)) != len(names):
        raise ValueError(f"--worker: names must be unique, got {names}")
    return names, weights


def _text(summary: dict[str, object]) -> str:
    lines = [f"wrote {summary.pop('output')} ({summary.pop('digest')})"]
    lines += [f"  {key:16} {value}" for key, value in summary.items()]
    return "\n".join(lines)
