"""Every metric that the Grafana dashboard asks for exists under that name and with those labels."""

import ast
import json
import re
from importlib.util import find_spec
from pathlib import Path

import pytest

from eldr.engine.metrics import render
from tests.serving.rig import rig

ROOT = Path(__file__).resolve().parents[2]
DASHBOARD = json.loads((ROOT / "deploy/grafana/eldr.json").read_text())
RAY = json.loads((ROOT / "deploy/grafana/eldr-ray.json").read_text())
METRIC = re.compile(r"\b((?:eldr_|vllm:)[a-z_]+)")
# How Ray exports a kind of metric.
ENDS = {"Counter": "_total", "Histogram": "_bucket"}
# Labels that Prometheus adds to what it scrapes in Kubernetes.
TARGET_LABELS = {"namespace", "pod"}


def expressions(dashboard: dict = DASHBOARD) -> list[str]:
    panels = [p for p in dashboard["panels"] if p["type"] != "row"]
    assert len(panels) > 8
    return [target["expr"] for panel in panels for target in panel["targets"]]


def samples(text: str) -> dict[str, set[str]]:
    """Sample name -> its labels; names of metrics that have no sample yet, too."""
    found: dict[str, set[str]] = {}
    for line in text.splitlines():
        if line.startswith("# TYPE "):
            _, _, name, kind = line.split()
            ends = {"counter": ("",), "gauge": ("",), "histogram": ("_bucket", "_sum", "_count")}
            for end in ends.get(kind, ("",)):
                found.setdefault(name + end, set())
        elif not line.startswith("#"):
            match = re.match(r"([\w:]+)(?:\{(.*)\})? ", line)
            assert match, line
            labels = set(re.findall(r'(\w+)="', match[2] or ""))
            found.setdefault(match[1], set()).update(labels)
    return found


@pytest.fixture
async def served() -> dict[str, set[str]]:
    """What a router that served a request, and an engine, expose."""
    async with rig() as running:
        await running.complete()
        await running.stream()
        router = running.router.metrics.render().decode()
        running.router.metrics.fallback.labels("no_signature")
        running.router.metrics.retries.labels("decode", "retried")
        running.router.metrics.kv_releases.labels("released")
        router = running.router.metrics.render().decode()
    decode = dict.fromkeys(("steps", "tokens", "kv_tokens", "seconds"), 1) | {"distinct": [1, 1]}
    signatures = dict.fromkeys(("full", "partial", "none", "guarded_blocks"), 1)
    engine = render({"failed": 0, "decode": decode, "signatures": signatures}).decode()
    return samples(router) | samples(engine)


async def test_every_metric_and_label_exists(served) -> None:
    asked = [name for expr in expressions() for name in METRIC.findall(expr)]
    ours = {name for name in asked if name.startswith("eldr_")}
    assert len(ours) > 15
    assert sorted(ours - served.keys()) == []
    for expr in expressions():
        names = [n for n in METRIC.findall(expr) if n.startswith("eldr_")]
        known = set().union(*(served[n] for n in names)) | TARGET_LABELS | {"le"}
        for group in re.findall(r"by \(([\w, ]+)\)", expr):
            if names:
                assert set(group.replace(" ", "").split(",")) <= known, expr


def test_vllms_metrics_are_in_its_source() -> None:
    asked = {n for expr in expressions() for n in METRIC.findall(expr) if n.startswith("vllm:")}
    assert asked
    spec = find_spec("vllm")
    if spec is None or not spec.submodule_search_locations:
        pytest.skip("vLLM is not installed")
    loggers = Path(spec.submodule_search_locations[0]) / "v1/metrics/loggers.py"
    source = loggers.read_text()
    assert {n for n in asked if f'"{n}"' not in source} == set()


def declared() -> dict[str, set[str]]:
    """Exported name -> labels of every metric that the Ray application declares."""
    found: dict[str, set[str]] = {}
    tree = ast.parse((ROOT / "eldr/serving/ray/metrics.py").read_text())
    for call in (node for node in ast.walk(tree) if isinstance(node, ast.Call)):
        kind = getattr(call.func, "attr", "")
        if kind in ENDS:
            name = f"ray_{ast.literal_eval(call.args[0])}{ENDS[kind]}"
            tags = [k.value for k in call.keywords if k.arg == "tag_keys"]
            labels = ast.literal_eval(tags[0]) if tags else ()
            found[name] = {*labels, "application", "deployment", "replica"}  # Serve adds these
    return found


def test_the_ray_dashboard_asks_for_what_the_application_declares() -> None:
    exported = declared()
    assert len(exported) > 8
    for expr in expressions(RAY):
        names = set(re.findall(r"\bray_\w+", expr))
        assert names <= exported.keys(), expr
        known = set().union(*(exported[n] for n in names)) | {"le"}
        for group in re.findall(r"by \(([\w, ]+)\)", expr):
            assert set(group.replace(" ", "").split(",")) <= known, expr


@pytest.mark.parametrize("dashboard", [DASHBOARD, RAY], ids=["router", "ray"])
def test_panels_do_not_overlap_and_have_their_own_ids(dashboard) -> None:
    taken: set[tuple[int, int]] = set()
    for panel in dashboard["panels"]:
        at = panel["gridPos"]
        cells = {(at["x"] + i, at["y"] + j) for i in range(at["w"]) for j in range(at["h"])}
        assert not cells & taken, panel["title"]
        taken |= cells
    ids = [panel["id"] for panel in dashboard["panels"]]
    assert len(set(ids)) == len(ids)
