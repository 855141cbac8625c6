"""`python -m eldr.kernels.report`: see the package's docstring.

Exit codes: 0 all bounds hold, 1 a bound is broken, 2 usage, 3 the compilers are missing
or too new for the tools that read their output.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import sys
from collections.abc import Sequence
from datetime import date
from pathlib import Path

from eldr.kernels import backend
from eldr.kernels.report import bounds, cuda_kernels, nvidia, triton_kernels
from eldr.kernels.report.row import Row

DEFAULT = "80,90,100,gfx942"


def _targets(text: str) -> list[str]:
    """`80,gfx942` -> sm_80, gfx942."""
    found = []
    for part in text.split(","):
        name = part.strip().removeprefix("sm_")
        if not name.isdecimal() and not (name.startswith("gfx") and name[3:].isalnum()):
            raise argparse.ArgumentTypeError(f"{part!r}: expected 80, 90, 100, gfx942, ...")
        found.append(f"sm_{name}" if name.isdecimal() else name)
    return found


def _arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m eldr.kernels.report", description=__doc__)
    parser.add_argument("--arch", type=_targets, default=_targets(DEFAULT), help=DEFAULT)
    parser.add_argument("--json", action="store_true", help="one JSON object on stdout")
    parser.add_argument("--output", type=Path, help="write the JSON object to this file as well")
    parser.add_argument(
        "--only", choices=("triton", "cuda"), help="the kernels of one backend, default both"
    )
    return parser.parse_args(argv)


def collect(targets: Sequence[str], only: str | None = None) -> tuple[list[Row], list[str]]:
    """All rows and all problems; progress goes to stderr."""
    rows: list[Row] = []
    problems: list[str] = []
    for target in targets:
        if only != "cuda":
            for recipe in triton_kernels.launches(target):
                row = triton_kernels.row(recipe, target)
                rows.append(row)
                problems += bounds.problems(row, bounds.of_triton(recipe.launch, target))
        if only != "triton" and target.startswith("sm_"):
            for row in sorted(cuda_kernels.rows(target), key=lambda r: r.kernel):
                rows.append(row)
                problems += bounds.problems(row, bounds.of_cuda(row.kernel))
        print(f"{target}: {len(rows)} kernels so far", file=sys.stderr)
    return rows, problems


def _processor() -> str:
    """The CPU's name as Linux tells it, else the architecture."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return platform.machine()
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.machine()


def document(rows: Sequence[Row], problems: Sequence[str], command: str) -> dict[str, object]:
    """The report as JSON data."""
    return {
        "v": 1,
        "command": command,
        "machine": f"{_processor()}, {os.cpu_count()} cores, no GPU needed",
        "date": date.today().isoformat(),
        "problems": list(problems),
        "rows": [row.as_dict() for row in rows],
    }


def table(rows: Sequence[Row]) -> str:
    """The report for people."""
    width = max(len(row.kernel) for row in rows)
    head = f"{'kernel':{width}} {'target':>7} {'regs':>4} {'spill':>5} {'shared':>6} "
    lines = [f"{head}{'128-bit':>7} {'batch':>5} {'loads':>5} {'instr':>5}  compiler"]
    for r in rows:
        lines.append(
            f"{r.kernel:{width}} {r.target:>7} {r.registers:4} {r.spills:5} {r.shared:6} "
            f"{r.wide_loads:7} {r.batch:5} {r.loads:5} {r.instructions:5}  {r.compiler}"
        )
    return "\n".join(lines)


def main(argv: Sequence[str] | None = None) -> int:
    """Returns the exit code."""
    options = _arguments(argv)
    if backend.interpreting():
        print("TRITON_INTERPRET=1 is set: nothing is compiled then; unset it", file=sys.stderr)
        return 3
    try:
        nvidia.tool("cuobjdump")
        rows, problems = collect(options.arch, options.only)
    except (FileNotFoundError, ImportError, nvidia.UnreadableError) as error:
        print(f"cannot tell: {error}", file=sys.stderr)
        return 3
    command = " ".join(["python -m eldr.kernels.report", *(argv or sys.argv[1:])])
    text = json.dumps(document(rows, problems, command), indent=1)
    if options.output:
        options.output.write_text(text + "\n", encoding="utf-8")
    print(text if options.json else table(rows))
    for problem in problems:
        print(problem, file=sys.stderr)
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
