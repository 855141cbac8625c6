"""Mutation test of the routing core: how many small changes of the code do its tests notice?

    python -m benchmarks.mutation --into results/mutation.json      # survivors: docs/mutation.md

`benchmarks.mutants` says what is changed, `benchmarks.mutation_trial` how the tests run on it.
Killed: a test fails, or they take ten times as long as without the mutant. The run works on a copy
of the tree, so that it neither sees nor disturbs edits made meanwhile.
"""

from __future__ import annotations

import argparse
import datetime
import hashlib
import json
import os
import random
import re
import shutil
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.machine import cpu_name
from benchmarks.mutants import Mutant, mutants
from benchmarks.mutation_trial import QUIET, Baseline, Session, fresh_verdict

ROOT = Path(__file__).resolve().parent.parent
REASONS = ROOT / "docs/mutation.md"
CORE = tuple(
    f"eldr/routing/{name}.py"
    for name in (
        *("fleet", "decision", "activation", "expert_load", "fixed", "price", "cost", "worker"),
        *("request", "integrity", "policies/base", "policies/balance", "policies/affinity"),
        *("policies/locality", "policies/marginal"),
    )
)
# The rest of tests/routing is not about these files.
TESTS = tuple(
    f"tests/routing/test_{name}.py"
    for name in (
        *("state", "rules", "paths", "policies", "fleet", "observe", "fixed", "predict"),
        *("mutants", "fleet_machine", "refit", "partition"),
    )
)
_COPIED = ("eldr", "tests", "benchmarks", "docs", "pyproject.toml")


@dataclass(frozen=True)
class Reason:
    """A row of docs/mutation.md: which survivors it explains.

    Attributes:
        key: its name.
        file: how the path ends.
        texts: one of these is in the mutant's line; none: any line.
        changes: the changes; none: any.
    """

    key: str
    file: str
    texts: tuple[str, ...]
    changes: tuple[str, ...]

    def explains(self, path: str, survivor: dict[str, Any]) -> bool:
        """Whether the row is about this survivor."""
        return (
            path.endswith(self.file)
            and (not self.texts or any(text in survivor["text"] for text in self.texts))
            and (not self.changes or survivor["change"] in self.changes)
        )


def reasons(text: str) -> list[Reason]:
    """The rows `| key | file, lines | changes | why |` of a Markdown table, all but why in code."""
    found = []
    for line in text.splitlines():
        cells = line.split(" | ")
        if len(cells) != 4 or not re.fullmatch(r"\| `[\w-]+`", cells[0]):
            continue
        (key,), (file, *texts), changes = (re.findall(r"`([^`]+)`", cell) for cell in cells[:3])
        found.append(Reason(key, file, tuple(texts), tuple(changes)))
    return found


def explain(report: dict[str, Any], known: Sequence[Reason]) -> None:
    """Gives every survivor of a report the key of the first row about it, and counts again."""
    for path, file in report["files"].items():
        for survivor in file["survivors"]:
            keys = [reason.key for reason in known if reason.explains(path, survivor)]
            survivor["why"] = keys[0] if keys else None
    files = report["files"].values()
    why = [survivor["why"] for file in files for survivor in file["survivors"]]
    report["total"] = {
        name: sum(file[name] for file in files)
        for name in ("mutants", "tested", "killed", "timeout", "survived")
    } | {"explained": len(why) - why.count(None), "unexplained": why.count(None)}


def run(plan: Sequence[Mutant]) -> dict[int, str]:
    """Verdicts by the mutants' places in the plan: killed, timeout, survived or unreached.

    Raises:
        RuntimeError: the tests fail without any mutant.
    """
    _preload()
    read, write = os.pipe()
    child = os.fork()
    if not child:
        os.close(read)
        _collected(plan, write)
    os.close(write)
    found: dict[int, str] = {}
    seconds: dict[str, float] = {}
    with os.fdopen(read) as lines:
        for line in lines:
            told = json.loads(line)
            if "seconds" in told:
                seconds = told["seconds"]
            elif told["verdict"]:
                found[told["at"]] = told["verdict"]
                _progress(plan[told["at"]], told["verdict"], len(found), len(plan))
    if os.waitpid(child, 0)[1] or not seconds:
        raise RuntimeError("the tests do not pass without any mutant; run them alone")
    for at, mutant in enumerate(plan):
        if at not in found:
            found[at] = fresh_verdict(ROOT, mutant, _tests(), seconds) or "killed"
            _progress(mutant, found[at], len(found), len(plan))
    return found


def _collected(plan: Sequence[Mutant], write: int) -> None:
    """The forked process that collects the tests and tries what needs no fresh import."""
    import pytest

    places = {id(mutant): at for at, mutant in enumerate(plan)}
    with os.fdopen(write, "w") as pipe:

        def found(mutant: Mutant | None, verdict: str | None, baseline: Baseline) -> None:
            if mutant is None:
                told: dict[str, Any] = {"seconds": baseline.seconds}
            else:
                told = {"at": places[id(mutant)], "verdict": verdict}
            print(json.dumps(told), file=pipe, flush=True)

        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        code = 99
        try:
            session = Session(ROOT, CORE, plan, found)
            code = int(pytest.main([*QUIET, *_tests()], plugins=[session]))
        finally:
            os._exit(0 if code in (0, 5) else 1)  # 5: pytest itself has run no test


def _progress(mutant: Mutant, verdict: str, done: int, every: int) -> None:
    if verdict in ("survived", "unreached"):
        said = f"{mutant.path}:{mutant.line}: {mutant.change} {verdict}: {mutant.text}"
        print(said, file=sys.stderr, flush=True)
    if done % 50 == 0:
        print(f"{done} of {every}", file=sys.stderr, flush=True)


def _tests() -> list[str]:
    return [name for name in TESTS if (ROOT / name).exists()]


def _preload() -> None:
    """What every child needs and no mutant is part of; failing tests are not made smaller."""
    import hypothesis.stateful
    import numpy as np  # noqa: F401
    import pytest  # noqa: F401
    import pytest_asyncio  # noqa: F401
    import scipy.optimize  # noqa: F401
    import sklearn.cluster  # noqa: F401

    phases = (hypothesis.Phase.explicit, hypothesis.Phase.generate)
    hypothesis.settings.register_profile("mutation", phases=phases, database=None)
    hypothesis.settings.load_profile("mutation")
    os.chdir(ROOT)
    sys.dont_write_bytecode = True
    assert not [name for name in sys.modules if name.startswith("eldr.routing")]


def report(plan: Sequence[Mutant], every: Counter[str], found: dict[int, str]) -> dict[str, Any]:
    """The verdicts by file, with the survivors; `every` counts the files' mutants, drawn or not."""
    files: dict[str, Any] = {}
    for at, mutant in enumerate(plan):
        digest = hashlib.sha256((ROOT / mutant.path).read_bytes()).hexdigest()[:16]
        file = files.setdefault(
            mutant.path,
            {"sha256": digest, "mutants": every[mutant.path], "tested": 0, "killed": 0}
            | {"timeout": 0, "survived": 0, "survivors": []},
        )
        file["tested"] += 1
        alive = found[at] in ("survived", "unreached")
        file["survived" if alive else found[at]] += 1
        if alive:
            file["survivors"].append(
                {
                    "line": mutant.line,
                    "text": mutant.text,
                    "change": mutant.change,
                    "reached": found[at] == "survived",
                }
            )
    about = {
        "command": "python -m benchmarks.mutation --into results/mutation.json",
        "machine": {"cores": os.cpu_count(), "cpu": cpu_name()},
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
    }
    return about | {"total": {}, "files": files}


def _in_a_copy(arguments: Sequence[str]) -> str:
    """Runs this program on a copy of the tree and returns what it prints."""
    with tempfile.TemporaryDirectory() as folder:
        for name in _COPIED:
            source, target = ROOT / name, Path(folder) / name
            if source.is_dir():
                shutil.copytree(source, target, ignore=shutil.ignore_patterns("__pycache__"))
            else:
                shutil.copy2(source, target)
        done = subprocess.run(
            [sys.executable, "-m", "benchmarks.mutation", "--here", *arguments],
            cwd=folder,
            env={**os.environ, "PYTHONPATH": folder},
            stdout=subprocess.PIPE,
            text=True,
            check=True,
        )
    return done.stdout


def main() -> None:
    """Prints the report, or merges it into a file."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.mutation", description=__doc__)
    parser.add_argument("--only", default="", help="only files whose path contains this")
    parser.add_argument("--most", type=int, default=0, help="a random draw of so many; 0: all")
    parser.add_argument("--seed", type=int, default=0, help="of the draw")
    parser.add_argument("--into", type=Path, help="replace these files' part of a JSON report")
    parser.add_argument("--explain", action="store_true", help="only read the reasons again")
    parser.add_argument("--here", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.here:
        plan = [m for path in CORE if args.only in path for m in mutants(ROOT, path)]
        every = Counter(mutant.path for mutant in plan)
        if 0 < args.most < len(plan):
            drawn = random.Random(args.seed).sample(range(len(plan)), args.most)
            plan = [plan[i] for i in sorted(drawn)]
        print(json.dumps(report(plan, every, run(plan))))
        return
    if args.into and args.most:
        parser.error("--into keeps whole files, --most draws from them")
    old = json.loads(args.into.read_text()) if args.into and args.into.exists() else {"files": {}}
    new = old
    if not args.explain:
        chosen = ["--only", args.only, "--most", str(args.most), "--seed", str(args.seed)]
        new = json.loads(_in_a_copy(chosen))
        new["files"] = {
            path: file
            for path in CORE
            if (file := new["files"].get(path) or old["files"].get(path)) is not None
        }
    explain(new, reasons(REASONS.read_text("utf-8")))
    text = json.dumps(new, indent=2) + "\n"
    if args.into:
        args.into.write_text(text)
    else:
        print(text, end="")


if __name__ == "__main__":
    main()
