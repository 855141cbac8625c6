"""The series this project ships, and the digest the engine compares at run time."""

import importlib.util
import os
import subprocess
import sys
from dataclasses import replace
from importlib import metadata
from pathlib import Path

import pytest

from eldr.cli import main
from eldr.engine import patching
from eldr.engine.patching import change, lint, series, target
from eldr.engine.patching.pin import pinned
from eldr.engine.patching.pin import pristine as pristine_files
from tests.engine.patching import toy as toys

ROOT = Path(__file__).parents[3]


@pytest.fixture
def pristine(tmp_path):
    """The touched files as the installed vLLM's wheel brought them, with that wheel's RECORD."""
    shipped = series.load()
    if importlib.util.find_spec("vllm") is None:
        pytest.skip("vLLM is not installed")
    installed = target.locate(shipped.upstream)
    if not shipped.upstream.matches(installed.version):
        pytest.skip(f"{installed} is not the release that the series is for")
    found = change.check(shipped, installed)[0]
    assert not found.obstacles(), change.explain(found)
    tree = pristine_files(shipped, installed)
    root = tmp_path / "site-packages"
    toys.write(root, {path: raw for path, raw in tree.items() if raw is not None})
    toys.write(root, {"vllm/__init__.py": (installed.root / "vllm/__init__.py").read_bytes()})
    info = Path(str(metadata.distribution(installed.distribution).locate_file("")))
    for path in info.glob("vllm*-*.dist-info"):
        toys.write(
            root / path.name, {p.name: p.read_bytes() for p in path.iterdir() if p.is_file()}
        )
    return root


def test_shipped_series_keeps_the_house_rules():
    shipped = series.load()
    assert shipped.directory == ROOT / "patches"
    assert lint.lint(shipped) == []
    for patch in shipped.patches:
        assert (ROOT / patch.trailers["Test"]).is_file(), patch.name


def test_readme_names_the_size_and_the_upstream_hook_of_every_patch():
    shipped = series.load()
    text = (ROOT / "patches/README.md").read_text(encoding="utf-8")
    words = ("no", "one", "two", "three", "four", "five", "six")
    changed = sum(patch.added + patch.removed for patch in shipped.patches)
    assert f"{changed} changed lines in {words[len(shipped.patches)]} patches" in text
    rows = [line.split("|")[1:-1] for line in text.splitlines() if line.startswith("| `")]
    assert [name.strip(" `") for name, _, _ in rows] == [
        patch.name.removesuffix(".patch") for patch in shipped.patches
    ]
    assert all(len(hook.strip()) > 10 for _, _, hook in rows)


def test_shipped_series_on_the_real_files(pristine):
    command = ["--target", str(pristine)]
    before = toys.snapshot(pristine)
    assert main(["patch", "export", "--check", *command]) == 0
    assert main(["patch", "verify", *command]) == 1
    assert main(["patch", "apply", *command]) == 0
    assert main(["patch", "verify", *command]) == 0
    assert main(["patch", "revert", *command]) == 0
    assert toys.snapshot(pristine) == before


def test_shipped_series_as_mails_on_a_checkout(pristine, tmp_path):
    files = {
        path.relative_to(pristine).as_posix(): path.read_bytes()
        for path in (pristine / "vllm").rglob("*.py")
    }
    repo = toys.repository(tmp_path / "fork", files)
    shipped = series.load()
    mails = [str(shipped.directory / patch.name) for patch in shipped.patches]
    toys.git(repo, "am", "-q", *mails)
    assert main(["patch", "verify", "--target", str(repo)]) == 0
    assert main(["patch", "apply", "--target", str(pristine)]) == 0
    for path in shipped.paths:
        assert (repo / path).read_bytes() == (pristine / path).read_bytes()


def test_installed_series(toy, monkeypatch):
    loaded = series.load(toy.patches)
    monkeypatch.setattr(patching, "load", lambda: loaded)
    monkeypatch.setattr(patching, "locate", lambda upstream: target.locate(upstream, toy.site))
    assert patching.shipped_series() == loaded.digest
    assert patching.installed_series() is None
    change.apply(loaded, target.locate(loaded.upstream, toy.site))
    assert patching.installed_series() == loaded.digest
    (toy.site / "vllm/runner.py").write_text("edited = 1\n")
    assert patching.installed_series() is None


def test_installed_series_names_another_one(toy, monkeypatch, tmp_path):
    loaded = series.load(toy.patches)
    where = target.locate(loaded.upstream, toy.site)
    change.apply(loaded, where)
    fewer = series.Series(toy.patches, loaded.upstream, loaded.patches[:-1])
    fewer = replace(fewer, upstream=pinned(fewer, pristine_files(fewer, where)))
    monkeypatch.setattr(patching, "load", lambda: fewer)
    monkeypatch.setattr(patching, "locate", lambda upstream: where)
    assert patching.installed_series() == loaded.digest != fewer.digest


def test_built_package_carries_the_series(tmp_path):
    """An eldr from a wheel has no source tree beside it."""
    command = [sys.executable, "setup.py", "-q", "build_py", "--build-lib", str(tmp_path / "lib")]
    environment = {**os.environ, "ELDR_SKIP_EXT": "1"}
    subprocess.run(command, cwd=ROOT, env=environment, check=True, capture_output=True)
    code = (
        "from eldr.engine.patching import series; s = series.load(); print(s.directory, s.digest)"
    )
    environment = {**os.environ, "PYTHONPATH": str(tmp_path / "lib"), "PYTHONSAFEPATH": "1"}
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=tmp_path,
        env=environment,
        check=True,
        capture_output=True,
        text=True,
    )
    directory, digest = done.stdout.split()
    assert directory == str(tmp_path / "lib/eldr/engine/patching/shipped")
    assert digest == series.load().digest
