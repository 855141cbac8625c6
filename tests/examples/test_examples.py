"""Every example runs, on a CPU, and does what it says."""

from __future__ import annotations

import ast
import asyncio
import importlib.util
import json
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest

from eldr.routing import POLICIES, Fleet, RouteRequest, Worker, load_partition
from eldr.signature import Signature
from tests.serving.mocks.worker import Plan
from tests.serving.page.traced import TracedDecode, TracedPrefill, drive, trace
from tests.serving.rig import rig

FOLDER = Path(__file__).resolve().parents[2] / "examples"


def load(name: str) -> ModuleType:
    """The example as a module, without its main part."""
    spec = importlib.util.spec_from_file_location(name, FOLDER / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_every_example_is_tested() -> None:
    tested = {"device_router", "own_policy", "calibrate_from_log", "ab_on_live_traffic"}
    assert {path.stem for path in FOLDER.glob("*.py")} == tested


def code_lines(name: str) -> int:
    """Lines of an example without blank ones, comments and docstrings' text."""
    source = (FOLDER / f"{name}.py").read_text()
    used: set[int] = set()
    for node in ast.walk(ast.parse(source)):
        constant = isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
        if isinstance(node, ast.stmt) and not constant:
            last = node.body[0].lineno if hasattr(node, "body") else node.end_lineno
            used |= set(range(node.lineno, (last or node.lineno) + (not hasattr(node, "body"))))
    return len(used)


@pytest.mark.parametrize(("name", "most"), [("device_router", 20), ("own_policy", 30)])
def test_short_ones_are_short(name: str, most: int) -> None:
    assert code_lines(name) <= most


def test_device_router() -> None:
    """Twice the weight gets most requests; the release returns to an empty fleet."""
    pytest.importorskip("torch")
    run = [sys.executable, str(FOLDER / "device_router.py")]
    done = subprocess.run(run, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    first, second = done.stdout.splitlines()
    counts = json.loads(first.partition(": ")[2])
    assert sum(counts) == 64
    assert counts[2] == max(counts)
    assert second.endswith("[0, 0, 0]")


@pytest.fixture
def two_choices() -> Any:
    yield load("own_policy").TwoChoices
    del POLICIES["two_choices"]


def test_own_policy_gathers_like_requests(two_choices: Any) -> None:
    """With equal loads it joins the worker that runs the same experts; without signature, load."""
    geometry = trace().geometry
    fleet = Fleet(two_choices(), [Worker("a"), Worker("b")], geometry=geometry)

    def request(name: str, expert: int) -> RouteRequest:
        counts = np.zeros((geometry.layers, geometry.experts), np.uint32)
        counts[:, expert : expert + geometry.top_k] = 100
        return RouteRequest(name, Signature(counts, 100))

    first = fleet.reserve(request("1", 0)).worker.name
    fleet.reserve(request("2", 32))
    fleet.reserve(request("3", 32))
    again = fleet.reserve(request("4", 0))
    assert again.worker.name == first
    assert again.branch == "two_choices"
    assert fleet.reserve(RouteRequest("5")).branch == "fallback"
    fleet.check_integrity()


def test_own_policy_is_an_option_of_the_router() -> None:
    run = [sys.executable, str(FOLDER / "own_policy.py"), "serve", "--show-config"]
    done = subprocess.run(
        [*run, "--policy", "two_choices", "--prefill", "http://p:1", "--decode", "http://d:1"],
        capture_output=True,
        text=True,
        timeout=180,
    )
    assert done.returncode == 0, done.stderr
    assert "two_choices" in done.stdout
    code = (
        f"import sys; sys.path.insert(0, {str(FOLDER)!r}); import own_policy\n"
        "from eldr.serving.policy import SERVING_POLICIES; assert 'two_choices' in SERVING_POLICIES"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=180)


async def test_calibration_from_the_log(tmp_path: Path, capsys: Any) -> None:
    pytest.importorskip("sklearn")
    log, output = tmp_path / "decisions.jsonl", tmp_path / "partition.safetensors"
    prefill = TracedPrefill()
    options = {"decision_log": str(log), "decision_log_signatures": True}
    async with rig([prefill], [TracedDecode(0.002) for _ in range(2)], **options) as r:
        await drive(r, 40, 8, tokens=8)
        r.router.decision_log.flush()  # type: ignore[union-attr]
        names = [worker.url for worker in r.decode]
        main = load("calibrate_from_log").main
        await asyncio.to_thread(main, str(log), prefill.url, str(output), names)
    assert "40 signatures, 0 unusable" in capsys.readouterr().err
    assert load_partition(output, geometry=trace().geometry, workers=names).names == tuple(names)


def test_calibration_needs_signatures(tmp_path: Path) -> None:
    log = tmp_path / "log"
    log.write_text('{"v": 1}\n')
    with pytest.raises(SystemExit, match="--decision-log-signatures"):
        load("calibrate_from_log").recorded(str(log), trace().geometry)


async def test_ab_watches_until_it_can_tell(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two equal policies: nothing is shown, and it says so; a made difference is found."""
    example = load("ab_on_live_traffic")
    monkeypatch.setattr(example, "LOOK_SECONDS", 0.01)
    async with rig(1, 1, ab=("round_robin", "least_requests"), ab_design="request") as r:
        assert await asyncio.to_thread(example.watch, r.url, 0.05) is False
        assert "needs more data" in capsys.readouterr().out
        r.decode[0].plan = Plan(pause=0.001)
        for _ in range(20):
            await r.stream()
        experiment = r.router.decode.experiment
        assert experiment is not None
        slow = experiment.arms[1].tpot.units
        for _ in range(100):
            slow.add(10.0)  # what a policy that makes everything slow would have measured
            slow.add(10.1)
        assert await asyncio.to_thread(example.watch, r.url, 5.0) is True
        out = capsys.readouterr().out
        assert "least_requests against round_robin: TPOT +" in out
        assert out.rstrip().endswith("slower")
