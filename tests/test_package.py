"""The package as users get it: sdist, a wheel from it without a compiler, an empty environment."""

import json
import os
import shutil
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

from eldr import __version__

ROOT = Path(__file__).resolve().parent.parent
# What is not part of a checkout: environments, build results, caches.
LEFT_OUT = shutil.ignore_patterns(
    *(".*", "build", "dist", "demo-out", "*.egg-info", "__pycache__", "*.so", "*.o")
)
# No compiler can be found or run: the build must notice and make a pure wheel.
BARE = {"PATH": "/nonexistent", "CC": "/nonexistent/cc", "CXX": "/nonexistent/c++"}


def run(*command, **environment):
    done = subprocess.run(
        [str(c) for c in command],
        capture_output=True,
        text=True,
        cwd="/",
        env={k: v for k, v in os.environ.items() if k != "PYTHONPATH"} | environment,
    )
    assert done.returncode == 0, f"{command}\n{done.stdout}\n{done.stderr}"
    return done.stdout


@pytest.fixture(scope="module")
def sdist(tmp_path_factory):
    folder = tmp_path_factory.mktemp("package")
    shutil.copytree(ROOT, folder / "checkout", ignore=LEFT_OUT, symlinks=True)
    build = (sys.executable, "-m", "build", "--no-isolation", "--sdist", "--outdir", folder)
    run(*build, folder / "checkout", ELDR_SKIP_EXT="1")
    (archive,) = folder.glob("*.tar.gz")
    return archive


@pytest.fixture(scope="module")
def wheel(sdist):
    pip = (sys.executable, "-m", "pip", "wheel", "--no-deps", "--no-index", "--no-build-isolation")
    run(*pip, "--wheel-dir", sdist.parent, sdist, **BARE)
    (archive,) = sdist.parent.glob("*.whl")
    return archive


@pytest.fixture(scope="module")
def installed(wheel):
    """The `bin` folder of an environment that holds this wheel and nothing else."""
    home = wheel.parent / "environment"
    run(sys.executable, "-m", "venv", "--without-pip", home)
    python = home / "bin/python"
    run(
        sys.executable, "-m", "pip", "--python", python, "install", "--no-deps", "--no-index", wheel
    )
    return home / "bin"


def test_the_sdist_holds_what_a_build_needs(sdist):
    with tarfile.open(sdist) as archive:
        names = {n.partition("/")[2] for n in archive.getnames()}
    assert {"pyproject.toml", "setup.py", "LICENSE", "README.md", "patches/series"} <= names
    checkout = sdist.parent / "checkout"
    sources = {str(p.relative_to(checkout)) for p in (checkout / "csrc").rglob("*.cpp")}
    assert sources
    assert sources <= names


def test_the_wheel_is_pure_and_complete(wheel):
    assert wheel.name == f"eldr-{__version__}-py3-none-any.whl"
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
        metadata = archive.read(f"eldr-{__version__}.dist-info/METADATA").decode()
    checkout = wheel.parent / "checkout"  # what was built, whatever changes in the tree meanwhile
    data = {".json", ".jsonl", ".safetensors", ".npz", ".txt", ".html", ".toml", ".typed", ".py"}
    for path in (checkout / "eldr").rglob("*"):
        if path.suffix in data or path.name.startswith("NOTICE"):
            assert str(path.relative_to(checkout)) in names
    shipped = {f"eldr/engine/patching/shipped/{p.name}" for p in (checkout / "patches").iterdir()}
    assert shipped <= names
    assert not [n for n in names if not n.startswith(("eldr/", "eldr-"))]
    for licence in ("LICENSE", "eldr/workload/prompts/NOTICE", "eldr/workload/tiny_moe/NOTICE"):
        assert f"License-File: {licence}" in metadata
    assert "Requires-Python: >=3.11" in metadata


def test_commands_run_where_nothing_else_is_installed(installed):
    assert "usage: eldr" in run(installed / "eldr", "--help", **BARE)
    assert run(installed / "eldr", "--version", **BARE).split() == ["eldr", __version__]
    listed = json.loads(run(installed / "eldr", "patch", "list", "--json", **BARE))
    series = (installed.parents[1] / "checkout/patches/series").read_text().split()
    assert all(name in json.dumps(listed) for name in series)
    program = (
        "from eldr.workload.tiny import MODEL_DIR, TRACE_PATH, load_prompts;"
        "print(len(load_prompts('serving')), MODEL_DIR.is_dir(), TRACE_PATH.is_file())"
    )
    assert run(installed / "python", "-c", program, **BARE) == "240 True True\n"


def interpreter(version):
    """A Python of this version: on PATH, or installed by pyenv or uv; None if there is none."""
    homes = [
        Path.home() / ".pyenv/versions",
        Path(os.environ.get("PYENV_ROOT", "/nonexistent")) / "versions",
        Path.home() / ".local/share/uv/python",
    ]
    found = [python for home in homes for python in home.glob(f"*{version}*/bin/python{version}")]
    # pyenv's shims are on PATH for versions that are not chosen: they only say so.
    on_path = shutil.which(f"python{version}")
    if on_path is not None and "shims" not in Path(on_path).parts:
        return on_path
    return next(map(str, sorted(found)), None)


@pytest.mark.parametrize("version", ["3.12", "3.13"])
def test_the_wheel_on_other_pythons(wheel, version, tmp_path):
    """Installed by that Python's own pip; what needs no other package works, and all compiles."""
    python = interpreter(version)
    if python is None:
        pytest.skip(f"there is no Python {version} on this machine")
    run(python, "-m", "venv", tmp_path)
    there = tmp_path / "bin"
    run(there / "pip", "install", "--no-deps", "--no-index", wheel)
    assert run(there / "eldr", "--version", **BARE).split() == ["eldr", __version__]
    assert "usage: eldr" in run(there / "eldr", "--help", **BARE)
    assert run(there / "eldr", "patch", "list", "--json", **BARE)
    site = next(tmp_path.glob("lib/python3*/site-packages/eldr"))
    # Warnings are errors: what the next Python would refuse (escapes, `is` with a literal).
    run(there / "python", "-W", "error", "-m", "compileall", "-q", "-f", site, **BARE)


def test_without_vllm_the_patch_tool_says_it_cannot_tell(installed):
    done = subprocess.run(
        [installed / "eldr", "patch", "check"], capture_output=True, text=True, cwd="/"
    )
    assert done.returncode == 3
    assert "vllm" in done.stderr.lower()
