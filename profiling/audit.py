"""Does ELDR copy to the host, make it wait, or cost more than 1 %? A verdict from a capture.

    python -m profiling.audit CAPTURE.sqlite [--baseline UNPATCHED.sqlite] [--json]

exit codes: 0 PASS, 1 FAIL, 2 usage, 3 CANNOT TELL
"""

from __future__ import annotations

import argparse
import json
import sqlite3
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from eldr import tracing
from profiling import compare, rules
from profiling.export import Export, ExportError
from profiling.facts import Facts
from profiling.ranges import Ranges, eldr_ranges, matching_ranges, whole_capture
from profiling.scan import scan
from profiling.steps import PATTERN, find
from profiling.verdict import CANNOT_TELL, EXIT_CODES, Check, Verdict, judge

LIMITS = (
    "a kernel that writes into mapped host memory is not a copy and is not seen",
    "Nsight skips some API calls (CUDA_SKIP_SOME_API_CALLS); canaries bound what that hides",
)
EXPECTED = (tracing.ACCUMULATE,)


@dataclass(frozen=True, slots=True)
class Options:
    """What to audit.

    Attributes:
        ranges: glob of range names of any domain, instead of ELDR's own.
        whole: everything in the capture, as one range.
        steps: glob of the ranges that are engine steps.
        expected: range names that must occur.
    """

    ranges: str | None = None
    whole: bool = False
    steps: str = PATTERN
    expected: tuple[str, ...] = EXPECTED


def collect(export: Export, options: Options) -> Facts:
    """Reads a capture."""
    return scan(export, _ranges(export, options), find(export, options.steps))


def _ranges(export: Export, options: Options) -> Ranges:
    if options.whole:
        return whole_capture(export)
    if options.ranges:
        return matching_ranges(export, options.ranges)
    return eldr_ranges(export)


def audit(export: Export, baseline: Export | None, options: Options) -> tuple[Verdict, Facts]:
    """The verdict on a capture, and what it rests on."""
    facts = collect(export, options)
    if export.gaps:  # what is missing can hide or feign anything
        return Verdict((rules.capture(export, facts, options.expected),)), facts
    if options.whole or options.ranges:
        return Verdict((rules.everything(export, facts),)), facts
    checks = [
        rules.capture(export, facts, options.expected),
        rules.canary(facts),
        rules.copies_and_waits(facts),
        rules.graphs(export, facts),
        rules.share(facts),
        rules.overlap(facts),
    ]
    if baseline is not None:
        checks.append(_compare(facts, baseline, options))
    return Verdict(tuple(checks)), facts


def _compare(facts: Facts, baseline: Export, options: Options) -> Check:
    if baseline.gaps:
        return judge("against-baseline", [], [f"baseline: {gap}" for gap in baseline.gaps], [])
    return compare.against_baseline(facts, collect(baseline, options))


def as_json(path: Path, verdict: Verdict, facts: Facts) -> dict[str, Any]:
    """The verdict as one JSON object."""
    return {
        "export": str(path),
        "verdict": verdict.overall,
        "checks": [
            {"name": c.name, "verdict": c.verdict, "reasons": list(c.reasons)}
            for c in verdict.checks
        ],
        "findings": [
            {
                "kind": hit.kind,
                "range": hit.range,
                "api": hit.api,
                "bytes": hit.bytes,
                "start_ns": hit.start,
                "duration_ns": hit.duration,
            }
            for hit in facts.hits
            if hit.range != tracing.CANARY
        ],
        "capture": {"copies_to_host": facts.total_copies, "host_waits": facts.total_waits},
        "limits": list(LIMITS),
    }


def as_text(path: Path, verdict: Verdict, facts: Facts) -> str:
    """The verdict for people."""
    lines = [f"{path}: {verdict.overall}"]
    for check in verdict.checks:
        lines.append(f"  {check.name:<18} {check.verdict}")
        lines += [f"    {reason}" for reason in check.reasons]
    lines.append(
        f"  in the whole capture: {facts.total_copies} copies to the host, "
        f"{facts.total_waits} host waits"
    )
    return "\n".join([*lines, *(f"  limit: {limit}" for limit in LIMITS)])


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m profiling.audit",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("export", type=Path, help="sqlite export of the capture")
    parser.add_argument("--baseline", type=Path, help="the same load on the engine without ELDR")
    scope = parser.add_mutually_exclusive_group()
    scope.add_argument("--ranges", metavar="GLOB", help="audit these ranges of any domain instead")
    scope.add_argument("--whole", action="store_true", help="audit the whole capture instead")
    parser.add_argument("--steps", default=PATTERN, metavar="GLOB", help="ranges that are steps")
    parser.add_argument(
        "--expect",
        default=",".join(EXPECTED),
        metavar="NAMES",
        help="range names that must occur, comma-separated (default: %(default)s)",
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    return parser


def main(argv: list[str] | None = None) -> int:
    """Audits one capture; returns the exit code."""
    args = _parser().parse_args(argv)
    expected = tuple(name for name in args.expect.split(",") if name)
    options = Options(args.ranges, args.whole, args.steps, expected)
    try:
        export = Export(args.export)
        baseline = Export(args.baseline) if args.baseline else None
        verdict, facts = audit(export, baseline, options)
    except (ExportError, sqlite3.DatabaseError) as error:
        print(f"profiling.audit: {error}", file=sys.stderr)
        if args.json:
            print(json.dumps({"verdict": CANNOT_TELL, "error": str(error)}))
        return EXIT_CODES[CANNOT_TELL]
    if args.json:
        print(json.dumps(as_json(args.export, verdict, facts)))
    else:
        print(as_text(args.export, verdict, facts))
    return verdict.exit_code


if __name__ == "__main__":
    raise SystemExit(main())
