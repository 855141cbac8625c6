"""The mutation test's own parts: the places it changes, what it reaches, killed from survived."""

from __future__ import annotations

import ast
import json
import os
import subprocess
import sys
import types
from pathlib import Path

import pytest

from benchmarks import mutation
from benchmarks.mutants import Mutant, mutants
from benchmarks.mutation_trial import Baseline, Trace, take_over

SOURCE = '''"""A module."""

def choose(load: int | None = 3, *, slow: bool = False) -> float:
    """Docstrings stay."""
    if load is None or load < 2:
        raise ValueError(f"load {load + 1}")
    return min(load * 1.5, 9) if not slow else -1.0
'''


@pytest.fixture
def found(tmp_path: Path) -> list[Mutant]:
    (tmp_path / "module.py").write_text(SOURCE)
    return list(mutants(tmp_path, "module.py"))


def test_every_kind_of_place_is_changed_once(found: list[Mutant]) -> None:
    assert len({m.source for m in found}) == len(found)
    changes = [(m.line, m.change) for m in found]
    for wanted in (
        (3, "3 -> 4"),
        (3, "False -> True"),
        (5, "condition negated"),
        (5, "Or -> And"),
        (5, "Is -> IsNot"),
        (5, "Lt -> LtE"),
        (5, "Lt -> GtE"),
        (7, "Mult -> Div"),
        (7, "min -> max"),
        (7, "condition negated"),
        (7, "USub left out"),
        (7, "returns None"),
    ):
        assert wanted in changes
    text = "".join(m.source for m in found)
    assert text.count("load + 1") == len(found)  # messages stay
    assert text.count("int | None") == len(found)  # annotations stay
    for mutant in found:
        ast.parse(mutant.source)


def test_a_mutant_s_statement_is_what_a_run_must_reach(found: list[Mutant]) -> None:
    assert {(m.line, m.span) for m in found} == {(3, (3, 3)), (5, (5, 5)), (7, (7, 7))}
    baseline = Baseline(
        {"slow": 2.0, "quick": 1.0, "other": 0.1},
        {"slow": {("module.py", 7)}, "quick": {("module.py", 7)}, "other": {("module.py", 5)}},
        {("module.py", 3)},
    )
    last = found[-1]
    assert (last.line, baseline.tests(last)) == (7, ["quick", "slow"])
    assert [baseline.needs_import(m) for m in (found[0], last)] == [True, False]


def test_lines_are_traced_and_code_is_taken_over(tmp_path: Path, found: list[Mutant]) -> None:
    module = types.ModuleType("module")
    module.__file__ = str(tmp_path / "module.py")
    sys.modules["module"] = module
    exec(compile(SOURCE, module.__file__, "exec"), module.__dict__)
    trace = Trace(tmp_path, ["module.py"])
    kept = sys.gettrace()
    trace.start()
    choose = module.choose
    assert choose(4) == 6.0
    lines = trace.stop()
    sys.settrace(kept)
    assert lines == {("module.py", 5), ("module.py", 7)}
    changed = next(m for m in found if m.change == "Mult -> Div")
    take_over(changed.source, module)
    assert choose(3) == 2.0  # the same function object
    assert sys.modules.pop("module") is module


def test_rows_of_the_page_explain_survivors() -> None:
    page = "| key | where | change | why |\n| `k` | `a.py`, `x = ` or `y` | `1 -> 2` | because |\n"
    page += "| `rest` | `b.py` | any | so |\n"
    survivor = {"line": 1, "text": "x = 1", "change": "1 -> 2", "reached": True}
    report = {
        "files": {
            "eldr/a.py": {
                **dict.fromkeys(("mutants", "tested"), 5),
                **{"killed": 2, "timeout": 1, "survived": 2},
                "survivors": [survivor, {**survivor, "change": "1 -> 0"}],
            }
        }
    }
    mutation.explain(report, mutation.reasons(page))
    assert [s["why"] for s in report["files"]["eldr/a.py"]["survivors"]] == ["k", None]
    assert report["total"]["explained"] == report["total"]["unexplained"] == 1
    assert report["total"]["mutants"] == 5


def test_the_page_explains_every_survivor_of_the_result() -> None:
    result = json.loads((mutation.ROOT / "results/mutation.json").read_text())
    known = mutation.reasons(mutation.REASONS.read_text("utf-8"))
    assert len({reason.key for reason in known}) == len(known)
    survivors = [(path, s) for path, f in result["files"].items() for s in f["survivors"]]
    used = {survivor["why"] for _, survivor in survivors}
    assert used == {reason.key for reason in known}  # no row without a survivor either
    assert set(result["files"]) == set(mutation.CORE)
    total = result["total"]
    killed = total["killed"] + total["timeout"]
    said = (
        f"**{total['mutants']:,} mutants, {killed} killed ({total['timeout']} of them by time-out)"
    )
    said += f", {total['survived']} survived, every one explained below.**"
    assert said in " ".join(mutation.REASONS.read_text("utf-8").split())


def test_the_core_is_there() -> None:
    for path in mutation.CORE:
        assert next(mutants(mutation.ROOT, path))
    assert set(mutation._tests()) == set(mutation.TESTS)


def test_a_mutant_is_killed_and_no_mutant_survives() -> None:
    """In a fresh process, which has not imported routing: in a function, and while importing."""
    program = (
        "from benchmarks import mutation as m; from benchmarks.mutants import mutants;"
        "m.TESTS = ('tests/routing/test_rules.py',);"
        "path = 'eldr/routing/policies/balance.py';"
        "found = list(mutants(m.ROOT, path));"
        "inside = next(x for x in found if x.change == 'condition negated' and 'pair' in x.text);"
        "count = next(x for x in found if x.change == '0 -> -1' and 'single' in x.text);"
        "path = 'eldr/routing/fixed.py';"
        "table = next(x for x in mutants(m.ROOT, path) if x.text.startswith('P_ONE'));"
        "print(*m.run([inside, count, table]).values())"
    )
    done = subprocess.run(
        [sys.executable, "-c", program],
        capture_output=True,
        text=True,
        cwd=mutation.ROOT,
        env={**os.environ, "PYTHONPATH": str(mutation.ROOT)},
        timeout=600,
    )
    assert done.stdout.split() == ["killed", "unreached", "killed"], done.stderr[-2000:]
