"""Compiles the recorded Triton launches for any target, as the launchers would on that device."""

from __future__ import annotations

import contextlib
import importlib
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from eldr.kernels.device_kernel import Launch
from eldr.kernels.recipes import Recipe, recipes
from eldr.kernels.report import amd, nvidia
from eldr.kernels.report.row import Row

_TYPES = {
    torch.uint8: "u8",
    torch.uint16: "u16",
    torch.int32: "i32",
    torch.int64: "i64",
    torch.float32: "fp32",
}


@contextlib.contextmanager
def _as_on(target: str) -> Iterator[None]:
    """Launchers choose some settings by vendor, which they read from torch's build."""
    build: Any = torch.version
    before = build.hip
    build.hip = "offline" if target.startswith("gfx") else None
    try:
        yield
    finally:
        build.hip = before


def launches(target: str) -> list[Recipe]:
    """Every kernel with the settings of the target's vendor."""
    with _as_on(target):
        return recipes()


def _scalar(value: object) -> str:
    if isinstance(value, bool):
        return "i1"
    if isinstance(value, int):
        return "i32" if -(2**31) <= value < 2**31 else "i64"
    if isinstance(value, float):
        return "fp32"
    raise TypeError(f"no Triton type for {value!r}")


def _specialised(launch: Launch) -> tuple[dict[str, str], dict[tuple[int], Any], dict[Any, Any]]:
    """Signature, constants and divisibility as Triton's own launch derives them.

    Parameters that a kernel declares as varying get neither.

    Absent tensors and integers equal to 1 become constants; addresses, and integers divisible by
    16, are marked so: without the marks vector loads are lost.
    """
    signature: dict[str, str] = {}
    constants: dict[tuple[int], Any] = {}
    marks: dict[Any, Any] = {}
    for i, (name, value) in enumerate(launch.arguments.items()):
        integer = isinstance(value, int) and not isinstance(value, bool)
        special = integer and name not in launch.kernel.varying
        if name in launch.constants or value is None or (special and value == 1):
            signature[name], constants[(i,)] = "constexpr", value
            continue
        is_tensor = isinstance(value, torch.Tensor)
        signature[name] = f"*{_TYPES[value.dtype]}" if is_tensor else _scalar(value)
        if is_tensor or (special and value % 16 == 0):
            marks[(i,)] = [["tt.divisibility", 16]]
    return signature, constants, marks


def compiled(launch: Launch, target: str) -> Any:
    """Triton's compiled kernel for `sm_NN` or `gfxNNN`."""
    compiler = importlib.import_module("triton.compiler")
    targets = importlib.import_module("triton.backends.compiler")
    vendor = targets.GPUTarget(
        *(("hip", target, 64) if target.startswith("gfx") else ("cuda", int(target[3:]), 32))
    )
    signature, constants, marks = _specialised(launch)
    source = compiler.ASTSource(
        fn=launch.kernel.jit, signature=signature, constexprs=constants, attrs=marks
    )
    return compiler.compile(source, target=vendor, options=dict(launch.options))


def row(recipe: Recipe, target: str) -> Row:
    """Compiles and reads one kernel."""
    built = compiled(recipe.launch, target)
    version = f"triton {importlib.import_module('triton').__version__}"
    if target.startswith("gfx"):
        usage = amd.kernel(built.asm["amdgcn"])
        ops = usage.opcodes
        loads = {op: n for op, n in ops.items() if op.startswith(("global_load", "buffer_load"))}
        atomics = sum(
            n for op, n in ops.items() if op.startswith(("global_atomic", "buffer_atomic"))
        )
        return Row(
            recipe.name, "triton", target, version, usage.registers, usage.spills,
            built.metadata.shared, usage.wide_loads, usage.batch(), sum(loads.values()), atomics,
            sum(ops.values()),
        )  # fmt: skip
    with tempfile.TemporaryDirectory() as folder:
        cubin = Path(folder) / "kernel.cubin"
        cubin.write_bytes(built.asm["cubin"])
        (read,) = nvidia.functions(cubin).values()
    return from_nvidia(recipe.name, "triton", target, version, read, built.metadata.shared)


def from_nvidia(
    kernel: str, backend: str, target: str, compiler: str, usage: nvidia.Usage, shared: int
) -> Row:
    """A row from what the NVIDIA tools say."""
    return Row(
        kernel, backend, target, compiler, usage.registers, usage.spills, shared,
        usage.count("LDG", "LDGSTS", having="128"), usage.batch(), usage.count("LDG", "LDGSTS"),
        usage.count("ATOM", "ATOMG", "RED", "REDG"), sum(usage.opcodes.values()),
    )  # fmt: skip
