"""`python -m profiling.gpu_check`: see the package's docstring.

Exit codes: 0 every check holds, 1 one does not, 2 usage, 3 there is no CUDA device to check.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import sys
from collections.abc import Sequence
from datetime import date
from pathlib import Path
from typing import TYPE_CHECKING

from profiling.gpu_check import building
from profiling.gpu_check.clock import Budget

if TYPE_CHECKING:
    from profiling.gpu_check.results import Results

ROOT = Path(__file__).resolve().parents[2]
SECONDS = 450.0
STAGES = ("build", "checks", "times", "experts", "captures")


def _seconds(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0 < value <= 3600:
        raise argparse.ArgumentTypeError(f"{text!r}: expected seconds in (0, 3600]")
    return value


def _name(text: str) -> str:
    if not text.replace("-", "").replace("_", "").isalnum():
        raise argparse.ArgumentTypeError(f"{text!r}: expected letters, digits, - and _")
    return text


def arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    """Parsed and checked."""
    parser = argparse.ArgumentParser(prog="python -m profiling.gpu_check", description=__doc__)
    parser.add_argument("--name", type=_name, help="of the result files, default: the device's")
    parser.add_argument("--output", type=Path, default=ROOT / "results/gpu", help="their folder")
    parser.add_argument(
        "--seconds", type=_seconds, default=SECONDS,
        help="budget; what does not fit is left out and listed (default %(default)s)",
    )  # fmt: skip
    parser.add_argument(
        "--only", action="append", choices=STAGES, help="a stage; repeatable, default all"
    )
    parser.add_argument("--json", action="store_true", help="one JSON object on stdout")
    return parser.parse_args(argv)


def why_not() -> str | None:
    """The reason that nothing can be checked here, or None."""
    if importlib.util.find_spec("torch") is None:
        return "torch is not installed"
    import torch

    if torch.version.cuda is None and torch.version.hip is None:
        return f"torch {torch.__version__} is a CPU build; install one with CUDA"
    if not torch.cuda.is_available():
        return "torch finds no GPU"
    return None


def machine() -> dict[str, object]:
    """What the figures depend on."""
    import torch

    properties = torch.cuda.get_device_properties(0)
    installed = importlib.util.find_spec("triton") is not None
    return {
        "device": properties.name,
        "capability": f"{properties.major}.{properties.minor}",
        "memory": f"{properties.total_memory / 2**30:.0f} GiB",
        "cores": os.cpu_count(),
        "torch": torch.__version__,
        "cuda": torch.version.cuda or torch.version.hip,
        "triton": __import__("triton").__version__ if installed else "not installed",
    }


def write(results: Results, folder: Path, name: str) -> list[Path]:
    """NAME.json and NAME.md."""
    from profiling.gpu_check.results import markdown

    folder.mkdir(parents=True, exist_ok=True)
    texts = {
        folder / f"{name}.json": json.dumps(results.as_dict(), indent=1) + "\n",
        folder / f"{name}.md": markdown(results),
    }
    for path, text in texts.items():
        path.write_text(text, encoding="utf-8")
    return list(texts)


def run(results: Results, chosen: Sequence[str], budget: Budget) -> None:
    """Runs the stages in order, within the budget; the results hold what was left out."""
    from profiling.gpu_check import stages

    steps = {
        "checks": stages.check_backends,
        "times": stages.time_ops,
        "experts": stages.time_experts,
        "captures": stages.audit_captures,
    }
    for name, step in steps.items():
        if name in chosen:
            print(f"{name}: {budget.left():.0f} s left", file=sys.stderr)
            step(results, budget)


def main(argv: Sequence[str] | None = None) -> int:
    """Returns the exit code."""
    options = arguments(argv)
    if reason := why_not():
        print(f"gpu-check: {reason}; nothing was checked", file=sys.stderr)
        return 3
    chosen, budget = options.only or STAGES, Budget(options.seconds)
    host = machine()
    builds = {}
    if "build" in chosen:
        builds["eldr._C"] = building.build(str(host["capability"]).replace(".", ""))
    from profiling.gpu_check.results import Results, file_name  # imports eldr: after the build

    given = sys.argv[1:] if argv is None else argv
    command = " ".join(["python -m profiling.gpu_check", *given])
    results = Results(command, host, date.today().isoformat(), builds)
    try:
        run(results, chosen, budget)
    finally:  # an error in one stage must not lose what the others measured
        results.left_out += budget.left_out
        results.seconds = options.seconds - budget.left()
        paths = write(results, options.output, options.name or file_name(str(host["device"])))
    print(json.dumps(results.as_dict()) if options.json else paths[1].read_text(encoding="utf-8"))
    for failure in results.failures:
        print(f"FAILED {failure}", file=sys.stderr)
    return 1 if results.failures else 0


if __name__ == "__main__":
    sys.exit(main())
