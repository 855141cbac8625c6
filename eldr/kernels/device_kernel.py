"""Triton kernels that cost nothing until they are needed.

`@device_kernel` marks a function written in Triton's language. Triton is imported, and the
function handed to `triton.jit`, at the first launch, so that machines without Triton or without a
GPU import the ops all the same. The module that defines a kernel names the language `tl` for type
checkers only; it becomes a real global here.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any


class DeviceKernel:
    """A function in Triton's language; `kernel[grid](...)` launches it."""

    def __init__(self, function: Callable[..., None]) -> None:
        self.function = function
        self.__name__ = function.__name__
        self.__doc__ = function.__doc__
        self._jit: Any = None

    @property
    def jit(self) -> Any:
        """The `triton.JITFunction`, or its interpreted twin under TRITON_INTERPRET=1."""
        if self._jit is None:
            triton = importlib.import_module("triton")
            self.function.__globals__["tl"] = importlib.import_module("triton.language")
            self._jit = triton.jit(self.function)
        return self._jit

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., Any]:
        launcher: Callable[..., Any] = self.jit[grid]
        return launcher


def device_kernel(function: Callable[..., None]) -> DeviceKernel:
    """Decorator: see `DeviceKernel`."""
    return DeviceKernel(function)


def power_of_two(value: int, least: int = 1) -> int:
    """The smallest power of two >= max(value, least)."""
    return max(1 << (value - 1).bit_length() if value > 1 else 1, least)


def ceil_div(value: int, by: int) -> int:
    """Quotient, rounded up."""
    return -(-value // by)
