"""Line coverage of eldr/ by all tests, subprocesses included: sums up coverage.py's report.

    make coverage      # runs every test under coverage.py, then this; 1.5 to 2 times `make test`

Nothing is left out. Lines of Triton kernels count as missed although tests run them: Triton's
interpreter runs a rewritten copy, and a GPU a compiled one; `in_triton_kernels` says how many.
"""

from __future__ import annotations

import argparse
import ast
import datetime
import json
import os
import sys
from collections import Counter
from pathlib import Path
from typing import Any

from benchmarks.machine import cpu_name

ROOT = Path(__file__).resolve().parent.parent
LEAST_PERCENT = 90.0
_NAMED_BELOW = 80.0
_COMPILED = ("jit", "DeviceFunction", "device_kernel")  # decorators of Triton functions


def triton_lines(source: str) -> set[int]:
    """Lines of the bodies of functions that Triton compiles."""
    lines: set[int] = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.FunctionDef) and any(
            any(mark in ast.unparse(decorator) for mark in _COMPILED)
            for decorator in node.decorator_list
        ):
            lines |= set(range(node.lineno + 1, (node.end_lineno or node.lineno) + 1))
    return lines


def summary(report: dict[str, Any]) -> dict[str, Any]:
    """The committed result, from `coverage json`."""
    rooms: Counter[str] = Counter()
    missed: Counter[str] = Counter()
    low, in_triton = {}, 0
    for name, found in sorted(report["files"].items()):
        path = name[name.rindex("eldr/") :] if not name.startswith("eldr/") else name
        parts = path.split("/")
        room = parts[1] if len(parts) > 2 else "eldr"
        totals, lines = found["summary"], found["missing_lines"]
        rooms[room] += totals["num_statements"]
        missed[room] += len(lines)
        kernels = triton_lines((ROOT / path).read_text("utf-8")) if room == "kernels" else set()
        in_triton += len(kernels & set(lines))
        if totals["percent_covered"] < _NAMED_BELOW:
            low[path] = {"percent": round(totals["percent_covered"], 1), "missing": _ranges(lines)}
    every, gone = sum(rooms.values()), sum(missed.values())
    return {
        "statements": every,
        "missed": gone,
        "percent": round(100 * (1 - gone / every), 2),
        "in_triton_kernels": in_triton,
        "rooms": {r: round(100 * (1 - missed[r] / n), 1) for r, n in sorted(rooms.items())},
        f"files_below_{_NAMED_BELOW:.0f}": low,
    }


def _ranges(lines: list[int]) -> str:
    """1, 2, 3, 7 as `1-3, 7`."""
    parts: list[list[int]] = []
    for line in lines:
        if parts and line == parts[-1][1] + 1:
            parts[-1][1] = line
        else:
            parts.append([line, line])
    return ", ".join(str(a) if a == b else f"{a}-{b}" for a, b in parts)


def main() -> int:
    """Writes results/coverage.json; 1 if the bar is missed."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.coverage", description=__doc__)
    parser.add_argument("report", help="what `coverage json` wrote")
    parser.add_argument("-o", "--output", default=str(ROOT / "results/coverage.json"))
    parser.add_argument("--note", default="", help="what a reader has to know about this run")
    args = parser.parse_args()
    found = summary(json.loads(Path(args.report).read_text("utf-8")))
    about = {
        "command": "make coverage",
        "machine": {"cores": os.cpu_count(), "cpu": cpu_name()},
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
        "note": args.note,
    }
    Path(args.output).write_text(json.dumps(about | found, indent=2) + "\n", encoding="utf-8")
    print(f"{found['percent']} % of {found['statements']} statements; wrote {args.output}")
    return int(found["percent"] < LEAST_PERCENT)


if __name__ == "__main__":
    sys.exit(main())
