"""What `eldr doctor` finds out about this machine, without importing torch or vLLM."""

from __future__ import annotations

import importlib.util
import shutil
import socket
import subprocess
import sys
from collections.abc import Iterator, Sequence
from importlib import metadata

from eldr import __version__
from eldr.cli.findings import NOTE, OK, PROBLEM, UNKNOWN, Finding
from eldr.engine.patching import PatchError
from eldr.engine.patching.series import load
from eldr.engine.patching.state import PATCHED, survey
from eldr.engine.patching.target import locate

# Distributions by package; the first that is installed counts.
_PARTS = {
    "torch": (("torch",), "engines need it; it comes with vLLM"),
    "triton": (("triton",), "GPU kernels need it; it comes with torch"),
    "nixl": (("nixl-cu13", "nixl-cu12", "nixl"), "pip install nixl where KV travels by NIXL"),
}
_NATIVE = {
    "eldr._native": "the fit and the simulator then use slower Python",
    "eldr._C": "engines on a CPU then use slower Python",
}
_SMI = ("--query-gpu=name,driver_version,memory.total", "--format=csv,noheader")


def machine(ports: Sequence[int]) -> Iterator[Finding]:
    """Every local check."""
    yield from versions()
    yield patch()
    yield from native()
    yield gpu()
    for number in ports:
        yield port(number)


def installed(*names: str) -> str | None:
    """Version of the first of these distributions that is installed."""
    for name in names:
        try:
            return metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return None


def versions() -> Iterator[Finding]:
    """Python, eldr, vLLM and what engines need."""
    python = ".".join(map(str, sys.version_info[:3]))
    fits = (3, 11) <= sys.version_info[:2] <= (3, 13)
    fix = "" if fits else "use Python 3.11 to 3.13"
    yield Finding("python", OK if fits else PROBLEM, python, fix)
    yield Finding("eldr", OK, __version__)
    yield vllm()
    for package, (names, why) in _PARTS.items():
        version = installed(*names)
        if version is None:
            yield Finding(package, NOTE, "not installed", f"a router needs none; {why}")
        else:
            yield Finding(package, OK, version)


def vllm() -> Finding:
    """Whether the installed vLLM is the release that the series is for."""
    try:
        upstream = load().upstream
    except PatchError as error:
        return Finding("vllm", UNKNOWN, str(error), "install eldr again, with its patches")
    version = installed(*upstream.distributions)
    if version is None:
        fix = f"a router needs none; on an engine: pip install vllm=={upstream.version}"
        return Finding("vllm", NOTE, "not installed", fix)
    if not upstream.matches(version):
        detail = f"{version}, the series is for {upstream.version}"
        fix = f"pip install vllm=={upstream.version}, then eldr patch apply"
        return Finding("vllm", PROBLEM, detail, fix)
    return Finding("vllm", OK, version)


def patch() -> Finding:
    """The state of the installed vLLM, file by file, by hash."""
    try:
        series = load()
        found = survey(series, locate(series.upstream))
    except PatchError as error:
        if importlib.util.find_spec("vllm") is None:
            fix = "nothing to do on a router; on an engine install vLLM, then eldr patch apply"
            return Finding("patch", NOTE, "no vLLM to patch", fix)
        return Finding("patch", UNKNOWN, str(error), "eldr patch verify says more")
    detail = f"{found.state}, series {series.digest}"
    if found.state == PATCHED:
        return Finding("patch", OK, detail)
    if found.obstacles():
        files = ", ".join(file.path for file in found.obstacles())
        fix = "install the files of this vLLM again (pip install --force-reinstall --no-deps)"
        return Finding("patch", PROBLEM, f"{detail}: {files}", f"{fix}, then eldr patch apply")
    return Finding("patch", PROBLEM, detail, "eldr patch apply")


def native() -> Iterator[Finding]:
    """Whether the compiled parts are there."""
    for module, effect in _NATIVE.items():
        spec = importlib.util.find_spec(module)
        if spec is None:
            fix = f"{effect}; for the fast ones install a C++ compiler and pip install eldr again"
            yield Finding(module, NOTE, "not built", fix)
        else:
            yield Finding(module, OK, str(spec.origin).rsplit("/", 1)[-1])


def gpu() -> Finding:
    """What nvidia-smi says."""
    tool = shutil.which("nvidia-smi")
    if tool is None:
        fix = "nothing to do on a router or a CPU engine; else install NVIDIA's driver"
        return Finding("gpu", NOTE, "no nvidia-smi", fix)
    try:
        done = subprocess.run([tool, *_SMI], capture_output=True, text=True, timeout=20)
    except (OSError, subprocess.TimeoutExpired) as error:
        return Finding("gpu", UNKNOWN, str(error), "see why nvidia-smi does not answer")
    names = [line.strip() for line in done.stdout.splitlines() if line.strip()]
    if done.returncode or not names:
        said = (done.stderr or done.stdout).strip().splitlines()
        detail = said[0] if said else f"nvidia-smi ended with {done.returncode}"
        return Finding(
            "gpu", PROBLEM, detail, "repair the driver, or pass the GPU to the container"
        )
    return Finding("gpu", OK, "; ".join(names))


def port(number: int) -> Finding:
    """Whether this port can be listened on."""
    check = f"port {number}"
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("0.0.0.0", number))
        except OSError as error:
            reason = str(error.strerror)
            fix = f"choose another port, or stop what holds it (ss -ltnp 'sport = :{number}')"
            return Finding(check, PROBLEM, reason, fix)
    return Finding(check, OK, "free")
