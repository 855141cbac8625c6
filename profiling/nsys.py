"""Runs a program under Nsight Systems and audits the capture, where `nsys` is installed."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

from profiling.audit import Options, audit
from profiling.export import Export
from profiling.verdict import Check

_RECORD = (
    *("profile", "--force-overwrite=true", "-t", "cuda,nvtx", "--sample=none"),
    *("--cpuctxsw=none", "--cuda-graph-trace=node"),
)
# A micro-benchmark has no engine whose time could be shared.
_NOT_ASKED = ("kernel-share",)


class NsysError(Exception):
    """Nsight Systems, or the program under it, failed; ends with its last words."""


def installed() -> bool:
    """Whether `nsys` is on PATH."""
    return shutil.which("nsys") is not None


def audited(module: str, arguments: list[str], folder: Path, seconds: float) -> list[Check]:
    """Runs `python -m module arguments` under nsys with ranges on, and audits what it recorded.

    Raises:
        NsysError: a command failed, or took longer than `seconds`.
    """
    folder.mkdir(parents=True, exist_ok=True)
    capture, export = folder / f"{'-'.join([module, *arguments])}", "sqlite"
    program = [sys.executable, "-m", module, *arguments]
    _run(["nsys", *_RECORD, "-o", str(capture), *program], seconds)
    path = Path(f"{capture}.{export}")
    report = f"{capture}.nsys-rep"
    words = ["--type", export, "--force-overwrite=true", "-o", str(path), report]
    _run(["nsys", "export", *words], seconds)
    verdict, _ = audit(Export(path), None, Options())
    return [check for check in verdict.checks if check.name not in _NOT_ASKED]


def _run(command: list[str], seconds: float) -> None:
    environment = {**os.environ, "ELDR_NVTX": "1"}
    try:
        done = subprocess.run(
            command, env=environment, capture_output=True, text=True, check=False, timeout=seconds
        )
    except subprocess.TimeoutExpired as error:
        raise NsysError(f"{' '.join(command[:2])}: not done after {seconds:.0f} s") from error
    if done.returncode:
        last = (done.stderr or done.stdout).strip().rpartition("\n")[2]
        raise NsysError(f"{' '.join(command[:2])}: exit code {done.returncode}: {last}")
