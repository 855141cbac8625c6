"""Builds the extension for the device at hand, before anything of eldr is imported."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
SECONDS = 240.0


def build(architecture: str, root: Path = ROOT, seconds: float = SECONDS) -> str:
    """Runs setup.py for one compute capability ("90"); says how it ended, never raises for it.

    Without nvcc the extension has no CUDA kernels, and the check covers CuPy's path instead. A
    failed build is a finding: the other backends can still be checked.
    """
    if "eldr.kernels" in sys.modules:
        raise RuntimeError("eldr.kernels is loaded: a build now would not be what is checked")
    command = [sys.executable, "setup.py", "build_ext", "--inplace"]
    try:
        done = subprocess.run(
            command, cwd=root, env=os.environ | {"ELDR_CUDA_ARCHS": architecture},
            capture_output=True, text=True, timeout=seconds, check=False,
        )  # fmt: skip
    except subprocess.TimeoutExpired:
        return f"gave up after {seconds:.0f} s"
    if done.returncode:
        return f"failed: {(done.stderr.strip() or 'no message').splitlines()[-1][:300]}"
    return f"for {architecture}"
