"""Runs interpreted/cases_*.py under Triton's interpreter, in a process of its own.

Triton decides at import whether it interprets, so that the cases cannot share this process.
Further versions are tested when they lie in build/triton/VERSION (or below the folder that
ELDR_TRITON_DIR names):

    pip install --no-deps --target build/triton/3.6.0 triton==3.6.0
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
VERSIONS = ("installed", "3.6.0", "3.7.1")


def search_path(version: str) -> str:
    """PYTHONPATH that makes `import triton` find the version, or skip."""
    if version == "installed":
        pytest.importorskip("triton")
        return str(ROOT)
    folder = Path(os.environ.get("ELDR_TRITON_DIR", ROOT / "build" / "triton")) / version
    if not (folder / "triton").is_dir():
        pytest.skip(f"Triton {version} is not in {folder}; see this file's docstring")
    return os.pathsep.join([str(folder), str(ROOT)])


@pytest.mark.parametrize("version", VERSIONS)
def test_interpreted_kernels_equal_the_references(version, tmp_path):
    environment = os.environ | {
        "TRITON_INTERPRET": "1",
        "PYTHONPATH": search_path(version),
        "OMP_NUM_THREADS": "1",
    }
    folder = Path(__file__).parent / "interpreted"
    options = ["-q", "-p", "no:cacheprovider", "-o", "python_files=cases_*.py"]
    result = subprocess.run(
        [sys.executable, "-m", "pytest", *options, str(folder)],
        env=environment, cwd=ROOT, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert result.returncode == 0, result.stdout + result.stderr


@pytest.mark.parametrize("version", VERSIONS[1:])
def test_the_version_is_the_one_asked_for(version):
    environment = os.environ | {"PYTHONPATH": search_path(version)}
    code = "import triton; print(triton.__version__)"
    result = subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True
    )
    assert result.stdout.strip() == version
