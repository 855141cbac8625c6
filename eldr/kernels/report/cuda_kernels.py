"""Compiles every instance of the CUDA kernels: with nvcc where there is one, else with NVRTC."""

from __future__ import annotations

import re
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path

from eldr.kernels import nvrtc
from eldr.kernels.report import nvidia
from eldr.kernels.report.row import Row
from eldr.kernels.report.triton_kernels import from_nvidia

_IDS = {"int32_t": (16, 4), "uint8_t": (8, 1), "uint16_t": (16, 2), "int64_t": (8,)}
_BINS = (("uint8_t", 8), ("uint8_t", 16), ("uint16_t", 16))
# Mangled template arguments, and how the report writes them.
_CODES = {"h": "uint8_t", "t": "uint16_t", "i": "int32_t", "l": "int64_t", "x": "int64_t"}
_SYMBOL = re.compile(r"^_ZN4eldr\d+(accumulate|decide)I(.+?)EEvNS_")


def instances() -> list[str]:
    """Name expressions of all instances that the launchers choose from."""
    accumulate = [
        f"eldr::accumulate<{ids}, {row}, {bits}, {width}>"
        for ids, widths in _IDS.items()
        for width in widths
        for row, bits in _BINS
    ]
    decide = [
        f"eldr::decide<{row}, {wide}, {group}>"
        for row in ("uint8_t", "uint16_t")
        for wide in ("true", "false")
        for group in (1, 4)
    ]
    return accumulate + decide


def readable(symbol: str) -> str:
    """The name expression of a mangled instance.

    Raises:
        ValueError: not an instance of ours.
    """
    match = _SYMBOL.match(symbol)
    if match is None:
        raise ValueError(f"{symbol}: not one of the CUDA kernels")
    arguments = []
    for code, literal in re.findall(r"L[bi](\d+)E|([a-z])", match[2] + "E"):
        arguments.append(code if code else _CODES[literal])
    if match[1] == "decide":
        arguments[1] = "true" if arguments[1] == "1" else "false"
    return f"eldr::{match[1]}<{', '.join(arguments)}>"


def nvcc() -> str | None:
    """The CUDA compiler on PATH, where the launchers' sources are at hand too (a checkout)."""
    return shutil.which("nvcc") if (nvrtc.folder() / "decide.cu").exists() else None


def compiler() -> str:
    """Name and version of what compiles here."""
    path = nvcc()
    if path is None:
        major, minor = nvrtc.version()
        return f"nvrtc {major}.{minor}"
    text = subprocess.run([path, "--version"], capture_output=True, text=True, check=True).stdout
    match = re.search(r"release [\d.]+, V([\d.]+)", text)
    return f"nvcc {match[1] if match else 'of unknown version'}"


def _cubins(target: str, folder: Path, wanted: list[str] | None) -> Iterator[Path]:
    path = nvcc()
    if path is None or wanted is not None:
        for i, kernel in enumerate(wanted or instances()):
            cubin = folder / f"{i}.cubin"
            cubin.write_bytes(nvrtc.compile_cubin(kernel, int(target[3:]))[0])
            yield cubin
        return
    for op in ("accumulate", "decide"):
        cubin = folder / f"{op}.cubin"
        source = nvrtc.folder() / f"{op}.cu"
        command = [path, "-cubin", f"-arch={target}", "-O3", "-std=c++17", str(source)]
        done = subprocess.run(
            [*command, "-o", str(cubin)], capture_output=True, text=True, check=False
        )
        if done.returncode:
            raise RuntimeError(f"{op}, {target}: {done.stderr.strip()[:2000]}")
        yield cubin


def rows(target: str, wanted: list[str] | None = None) -> list[Row]:
    """Every instance for `sm_NN`; with `wanted` only those, through NVRTC."""
    version = compiler() if wanted is None else "nvrtc {}.{}".format(*nvrtc.version())
    with tempfile.TemporaryDirectory() as folder:
        return [
            from_nvidia(readable(symbol), "cuda", target, version, usage, usage.shared)
            for cubin in _cubins(target, Path(folder), wanted)
            for symbol, usage in nvidia.functions(cubin).items()
        ]
