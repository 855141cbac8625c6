"""The mutation test's own parts: which places it changes, and that it tells killed from not."""

from __future__ import annotations

import ast
import os
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks import mutation

SOURCE = '''"""A module."""

def choose(load: int | None = 3, *, slow: bool = False) -> float:
    """Docstrings stay."""
    if load is None or load < 2:
        raise ValueError(f"load {load + 1}")
    return min(load * 1.5, 9) if not slow else -1.0
'''


@pytest.fixture
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setattr(mutation, "ROOT", tmp_path)
    (tmp_path / "module.py").write_text(SOURCE)
    return "module.py"


def test_every_kind_of_place_is_changed_once(module: str) -> None:
    found = list(mutation.mutants(module))
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


def test_the_core_is_there() -> None:
    for name in mutation.CORE:
        assert list(mutation.mutants(f"eldr/routing/{name}.py"))
    assert mutation._files(mutation.FAST)
    assert mutation._files(mutation.SLOW)


def test_a_mutant_is_killed_and_no_mutant_survives() -> None:
    """In a fresh process, which has not imported routing: `<` for `>` in a policy, and nothing."""
    program = (
        "from benchmarks import mutation as m; m._preload();"
        "found = [x for x in m.mutants('eldr/routing/policies/balance.py')"
        " if x.change == 'argmin -> argmax' or x.change == 'returns None'];"
        "print(m.verdict(None, ['tests/routing/test_policies.py'], 300),"
        " m.verdict(found[0], ['tests/routing/test_policies.py'], 300))"
    )
    done = subprocess.run(
        [sys.executable, "-c", program],
        capture_output=True,
        text=True,
        cwd=mutation.ROOT,
        env={**os.environ, "PYTHONPATH": str(mutation.ROOT)},
        timeout=600,
    )
    assert done.stdout.split() == ["survived", "killed"], done.stderr[-2000:]
