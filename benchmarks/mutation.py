"""Mutation test of the routing core: how many small changes of the code do its tests notice?

    python -m benchmarks.mutation --json      # results/mutation.json; survivors: docs/mutation.md

Every mutant changes one place of a module's syntax tree: a comparison, an arithmetic, bit or
boolean operator, a number, a truth value, a `not`, min against max, a statement left out. Type
annotations, docstrings and messages of errors are left alone. A mutant lives in memory only: a
forked child imports it instead of the file and runs the fast tests of routing, then the slow ones.
Killed: a test fails, or they take ten times as long as without it.
"""

from __future__ import annotations

import argparse
import ast
import copy
import datetime
import importlib.abc
import importlib.machinery
import importlib.util
import json
import os
import random
import signal
import sys
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

from benchmarks.machine import cpu_name

ROOT = Path(__file__).resolve().parent.parent
CORE = (
    *("fleet", "decision", "activation", "expert_load", "fixed", "price", "cost", "worker"),
    *("request", "integrity", "policies/base", "policies/balance", "policies/affinity"),
    *("policies/locality", "policies/marginal"),
)
# In this order: those that fail soonest first. The rest of tests/routing is not about these files.
FAST = ("policies", "fleet", "observe", "fixed", "predict", "mutants")
SLOW = ("fleet_machine", "refit", "partition")
_SWAPS: dict[type[ast.AST], tuple[type[Any], ...]] = {
    **{ast.Lt: (ast.LtE, ast.GtE), ast.LtE: (ast.Lt, ast.Gt), ast.Gt: (ast.GtE, ast.LtE)},
    **{ast.GtE: (ast.Gt, ast.Lt), ast.Eq: (ast.NotEq,), ast.NotEq: (ast.Eq,)},
    **{ast.Is: (ast.IsNot,), ast.IsNot: (ast.Is,), ast.In: (ast.NotIn,), ast.NotIn: (ast.In,)},
    **{ast.Add: (ast.Sub,), ast.Sub: (ast.Add,), ast.Mult: (ast.Div,), ast.Div: (ast.Mult,)},
    **{ast.FloorDiv: (ast.Mult,), ast.Mod: (ast.Add,), ast.Pow: (ast.Mult,)},
    **{ast.LShift: (ast.RShift,), ast.RShift: (ast.LShift,), ast.BitAnd: (ast.BitOr,)},
    **{ast.BitOr: (ast.BitAnd,), ast.BitXor: (ast.BitAnd,), ast.And: (ast.Or,), ast.Or: (ast.And,)},
}
_NAMES = {"min": "max", "max": "min", "argmin": "argmax", "argmax": "argmin", "any": "all"}


@dataclass(frozen=True)
class Mutant:
    """One changed module."""

    path: str
    line: int
    change: str
    source: str


def mutants(path: str) -> Iterator[Mutant]:
    """All mutants of a file, from top to bottom."""
    tree = ast.parse((ROOT / path).read_text("utf-8"))
    seen = {ast.unparse(tree)}
    for number, node in enumerate(places(tree)):
        for change, edit in edits(node):
            changed = copy.deepcopy(tree)
            target = next(n for i, n in enumerate(places(changed)) if i == number)
            edit(target)
            source = ast.unparse(ast.fix_missing_locations(changed))
            if source not in seen:  # two ways to the same change
                seen.add(source)
                yield Mutant(path, node.lineno, change, source)


def places(tree: ast.AST) -> Iterator[Any]:
    """Nodes that may change, in the order of the text; not annotations, docstrings, messages."""
    for field, value in ast.iter_fields(tree):
        if field in ("annotation", "returns", "decorator_list", "exc", "msg"):
            continue
        for node in value if isinstance(value, list) else [value]:
            if not isinstance(node, ast.AST):
                continue
            text = isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
            if text or isinstance(node, ast.Import | ast.ImportFrom):
                continue
            if hasattr(node, "lineno"):
                yield node
            yield from places(node)


def edits(node: Any) -> Iterator[tuple[str, Any]]:
    """(what changes, the function that changes such a node) for every mutation of a node."""
    if isinstance(node, ast.Compare):
        for new in _SWAPS.get(type(node.ops[0]), ()):
            yield _named(node.ops[0], new), lambda n, new=new: n.ops.__setitem__(0, new())
    elif isinstance(node, ast.BinOp | ast.AugAssign | ast.BoolOp):
        for new in _SWAPS.get(type(node.op), ()):
            yield _named(node.op, new), lambda n, new=new: setattr(n, "op", new())
    elif isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not):
        yield "Not left out", lambda n: setattr(n, "operand", ast.UnaryOp(ast.Not(), n.operand))
    elif isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
        yield "USub left out", lambda n: setattr(n, "op", ast.UAdd())
    elif isinstance(node, ast.Constant) and isinstance(node.value, bool):
        yield f"{node.value} -> {not node.value}", lambda n: setattr(n, "value", not n.value)
    elif isinstance(node, ast.Constant) and isinstance(node.value, int | float):
        for step in (1, -1):
            yield (
                f"{node.value} -> {node.value + step}",
                lambda n, s=step: setattr(n, "value", n.value + s),
            )
    elif isinstance(node, ast.Name | ast.Attribute):
        name = "id" if isinstance(node, ast.Name) else "attr"
        new_name = _NAMES.get(getattr(node, name))
        if new_name:
            yield f"{getattr(node, name)} -> {new_name}", lambda n: setattr(n, name, new_name)
    elif isinstance(node, ast.If | ast.IfExp | ast.While):
        yield "condition negated", lambda n: setattr(n, "test", ast.UnaryOp(ast.Not(), n.test))
    elif isinstance(node, ast.Expr) and isinstance(node.value, ast.Call):
        yield "call left out", lambda n: setattr(n, "value", ast.Constant(None))
    elif isinstance(node, ast.Return) and node.value is not None:
        yield "returns None", lambda n: setattr(n, "value", ast.Constant(None))


def _named(old: ast.AST, new: type[Any]) -> str:
    return f"{type(old).__name__} -> {new.__name__}"


class _Instead(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Imports a mutant in place of its file."""

    def __init__(self, mutant: Mutant) -> None:
        self._name = mutant.path[:-3].replace("/", ".")
        self._mutant = mutant

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        """Only the mutant's module is ours."""
        if name != self._name:
            return None
        return importlib.util.spec_from_file_location(name, ROOT / self._mutant.path, loader=self)

    def exec_module(self, module: ModuleType) -> None:
        """Runs the mutant."""
        exec(compile(self._mutant.source, self._mutant.path, "exec"), module.__dict__)


def verdict(mutant: Mutant | None, tests: Sequence[str], limit: float) -> str:
    """`survived`, `killed` or `timeout`: what the tests say in a process of their own."""
    child = os.fork()
    if not child:
        try:
            os._exit(_tested(mutant, tests))
        finally:
            os._exit(99)
    end = time.monotonic() + limit
    while time.monotonic() < end:
        done, status = os.waitpid(child, os.WNOHANG)
        if done:
            return "survived" if os.waitstatus_to_exitcode(status) == 0 else "killed"
        time.sleep(0.01)
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    return "timeout"


def _tested(mutant: Mutant | None, tests: Sequence[str]) -> int:
    import pytest

    sys.dont_write_bytecode = True
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, 1)
    os.dup2(nowhere, 2)
    if mutant is not None:
        sys.meta_path.insert(0, _Instead(mutant))
    quiet = ("-x", "-q", "-p", "no:cacheprovider", "--hypothesis-seed=0")
    return int(pytest.main([*quiet, *tests]))


def _files(names: Sequence[str]) -> list[str]:
    found = [f"tests/routing/test_{name}.py" for name in names]
    return [name for name in found if (ROOT / name).exists()]


def run(most: int, seed: int, only: str) -> dict[str, Any]:
    """Tests a random draw of the core's mutants.

    Raises:
        RuntimeError: the tests fail without any mutant.
    """
    plan = [m for name in CORE for m in mutants(f"eldr/routing/{name}.py") if only in m.path]
    every = len(plan)
    if most and most < every:
        plan = [plan[i] for i in sorted(random.Random(seed).sample(range(every), most))]
    _preload()
    started = time.monotonic()
    for tests in (_files(FAST), _files(SLOW)):
        if verdict(None, tests, 900) != "survived":
            raise RuntimeError(f"without any mutant, {tests} do not pass")
    limit = 10 * (time.monotonic() - started) + 30
    counts: Counter[str] = Counter()
    survivors = []
    for at, mutant in enumerate(plan):
        found = verdict(mutant, _files(FAST), limit)
        if found == "survived":
            found = verdict(mutant, _files(SLOW), limit)
        counts[found] += 1
        if found == "survived":
            survivors.append({"at": f"{mutant.path}:{mutant.line}", "change": mutant.change})
            print(f"{mutant.path}:{mutant.line}: {mutant.change}", file=sys.stderr, flush=True)
        if at % 50 == 49:
            print(f"{at + 1} of {len(plan)}: {dict(counts)}", file=sys.stderr, flush=True)
    return {"mutants": every, "tested": len(plan), **counts, "survivors": survivors}


def _preload() -> None:
    """What every child needs and no mutant is part of; forked children do not load it again."""
    import hypothesis.stateful  # noqa: F401
    import numpy as np  # noqa: F401
    import pytest  # noqa: F401
    import pytest_asyncio  # noqa: F401
    import scipy.optimize  # noqa: F401
    import sklearn.cluster  # noqa: F401

    os.chdir(ROOT)
    assert not [name for name in sys.modules if name.startswith("eldr.routing")]


def main() -> None:
    """Prints the counts and the survivors."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.mutation", description=__doc__)
    parser.add_argument("--most", type=int, default=0, help="a random draw of so many; 0: all")
    parser.add_argument("--seed", type=int, default=0, help="of the draw")
    parser.add_argument("--only", default="", help="only files whose path contains this")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    args = parser.parse_args()
    found = run(args.most, args.seed, args.only)
    about = {
        "command": f"python -m benchmarks.mutation --most {args.most} --seed {args.seed} --json",
        "machine": {"cores": os.cpu_count(), "cpu": cpu_name()},
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
    }
    print(json.dumps(about | found, indent=2) if args.json else found)


if __name__ == "__main__":
    main()
