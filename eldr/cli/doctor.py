"""`eldr doctor`: looks at this machine and at workers, with a fix for each finding."""

from __future__ import annotations

import argparse
import json
from collections import Counter
from dataclasses import asdict
from typing import Any

from eldr.cli import CANNOT_TELL, DONE, NO
from eldr.cli.explain import safe
from eldr.cli.findings import OK, PROBLEM, UNKNOWN, Finding

_EPILOG = """\
Changes nothing, and imports neither torch nor vLLM. A worker's key comes from
ELDR_SERVE_WORKER_KEY.

examples:
  eldr doctor
  eldr doctor --port 8000 --port 29000
  eldr doctor --prefill http://p0:8100 --decode http://d0:8200 http://d1:8200

exit codes: 0 no problem, 1 problems, 2 usage, 3 no problem seen but something could not be told
"""


def configure(parser: argparse.ArgumentParser) -> None:
    """Adds the options."""
    parser.epilog = _EPILOG
    many: dict[str, Any] = {"action": "extend", "nargs": "+", "default": []}
    parser.add_argument("--port", type=_port, metavar="N", help="must be free", **many)
    parser.add_argument("--prefill", metavar="URL", help="prefill workers", **many)
    parser.add_argument("--decode", metavar="URL", help="decode workers", **many)
    parser.add_argument("--json", action="store_true", help="print one JSON object on stdout")


def _port(text: str) -> int:
    number = int(text) if text.isascii() and text.isdigit() else 0
    if not 0 < number < 65536:
        raise argparse.ArgumentTypeError(f"expected a port from 1 to 65535, got {text!r}")
    return number


def run(args: argparse.Namespace) -> int:
    """Looks, and prints what it found."""
    from eldr.cli.doctor_machine import machine
    from eldr.cli.doctor_workers import workers

    found = [*machine(args.port), *workers(args.prefill, args.decode)]
    code = exit_code(found)
    if args.json:
        print(json.dumps({"v": 1, "exit": code, "findings": [asdict(f) for f in found]}))
    else:
        print(text(found))
    return code


def exit_code(found: list[Finding]) -> int:
    """0, 1 with a problem, 3 with something unknown."""
    statuses = {finding.status for finding in found}
    return NO if PROBLEM in statuses else CANNOT_TELL if UNKNOWN in statuses else DONE


def text(found: list[Finding]) -> str:
    """One line per finding, and one more with its fix."""
    width = min(44, max(len(finding.check) for finding in found))
    lines = []
    for f in found:
        lines.append(f"{f.status:8s} {safe(f.check):{width}s}  {safe(f.detail)}")
        if f.status != OK:
            lines.append(f"{'':8s} {'':{width}s}  -> {safe(f.fix)}")
    counts = Counter(finding.status for finding in found)
    summary = ", ".join(f"{n} {status}" for status, n in counts.items())
    return "\n".join([*lines, summary])
