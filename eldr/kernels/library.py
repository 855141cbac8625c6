"""Declares the ops to torch and joins each device to an implementation.

Schemas live here and in the op's file. All ops mutate their outputs and return nothing, so the
fake implementations, which torch.compile traces, have nothing to compute.
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable

import torch

from eldr.kernels import backend

_library = torch.library.Library("eldr", "DEF")  # type: ignore[no-untyped-call]


@functools.cache
def _cpu_backend() -> str:
    name = backend.on_cpu()
    if name == "cpp":
        importlib.import_module("eldr._C")  # registers the CPU implementations
    return name


def declare(schema: str, reference: Callable[..., None]) -> Callable[..., None]:
    """Declares `eldr::<schema>` and returns the op. `reference` takes the op's arguments."""
    name = schema.split("(", 1)[0]
    _library.define(schema, tags=(torch.Tag.pt2_compliant_tag,))  # type: ignore[no-untyped-call]
    torch.library.register_fake(f"eldr::{name}", lambda *args: None, lib=_library)
    if _cpu_backend() == "torch":
        _library.impl(name, reference, "CPU")  # type: ignore[no-untyped-call]
    elif _cpu_backend() == "triton":
        _library.impl(name, lambda *args: _ignore(backend.triton_launcher(name)(*args)), "CPU")  # type: ignore[no-untyped-call]

    _library.impl(name, lambda *args: _ignore(backend.on_cuda(name, reference)(*args)), "CUDA")  # type: ignore[no-untyped-call]
    op: Callable[..., None] = getattr(torch.ops.eldr, name).default
    return op


def _ignore(_: object) -> None:
    """An op without results returns None, whatever its implementation returned."""
