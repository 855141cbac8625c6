"""Triton kernels that cost nothing until they are needed.

`@device_kernel()` marks a function written in Triton's language. Triton is imported, and the
function handed to `triton.jit`, at the first launch, so that machines without Triton or without a
GPU import the ops all the same. The module that defines a kernel names the language `tl` for type
checkers only; it becomes a real global here, and so do the `DeviceFunction`s that it calls.
"""

from __future__ import annotations

import contextlib
import importlib
import inspect
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

_recorded: list[Launch] | None = None


@dataclass(frozen=True, slots=True, eq=False)
class Launch:
    """One launch as it would have happened: what an offline compilation needs.

    Attributes:
        kernel: the kernel.
        grid: number of programs per axis.
        arguments: every parameter by name, tensors as meta tensors, in the kernel's order.
        constants: the names of those that are compile-time constants.
        options: num_warps, num_stages, enable_fp_fusion.
    """

    kernel: DeviceKernel
    grid: tuple[int, ...]
    arguments: dict[str, Any]
    constants: tuple[str, ...]
    options: dict[str, int | bool]


@contextlib.contextmanager
def record_launches() -> Iterator[list[Launch]]:
    """Within the block launches are listed instead of run: call a launcher on meta tensors.

    Not thread-safe; for reports and tests.
    """
    global _recorded
    previous, _recorded = _recorded, []
    try:
        yield _recorded
    finally:
        _recorded = previous


class DeviceFunction:
    """A function in Triton's language that kernels call; the compiler inlines it."""

    def __init__(self, function: Callable[..., Any]) -> None:
        self.function = function
        self._jit: Any = None

    @property
    def jit(self) -> Any:
        """The `triton.JITFunction`, or its interpreted twin under TRITON_INTERPRET=1."""
        if self._jit is None:
            self._jit = _compile(self.function)
        return self._jit

    def __call__(self, *args: Any) -> Any:
        """What type checkers see; reached only by a caller that is no kernel.

        Raises:
            TypeError: always.
        """
        raise TypeError(f"{self.function.__name__} runs inside a kernel only")


class DeviceKernel:
    """A function in Triton's language; `kernel[grid](...)` launches it."""

    def __init__(self, function: Callable[..., None], varying: tuple[str, ...]) -> None:
        self.function = function
        self.varying = varying
        self.__name__ = function.__name__
        self.__doc__ = function.__doc__
        self._jit: Any = None

    @property
    def jit(self) -> Any:
        """The `triton.JITFunction`, or its interpreted twin under TRITON_INTERPRET=1."""
        if self._jit is None:
            self._jit = _compile(self.function, do_not_specialize=self.varying)
        return self._jit

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., Any]:
        if _recorded is not None:
            return lambda *args, **kwargs: self._record(grid, args, kwargs)
        launcher: Callable[..., Any] = self.jit[grid]
        return launcher

    def _record(self, grid: tuple[int, ...], args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        parameters = inspect.signature(self.function).parameters
        constants = tuple(n for n, p in parameters.items() if "constexpr" in str(p.annotation))
        options = {key: kwargs.pop(key) for key in list(kwargs) if key not in parameters}
        bound = inspect.signature(self.function).bind(*args, **kwargs)
        assert _recorded is not None, "only called while recording"
        _recorded.append(Launch(self, grid, bound.arguments, constants, options))


def device_kernel(*varying: str) -> Callable[[Callable[..., None]], DeviceKernel]:
    """Decorator: see `DeviceKernel`.

    Args:
        varying: integer parameters that differ from step to step. Triton would compile anew when
            one is 1 or divisible by 16, in the middle of serving.
    """
    return lambda function: DeviceKernel(function, varying)


def _compile(function: Callable[..., Any], **options: Any) -> Any:
    """Hands `function` to Triton, after what it names has become what Triton knows."""
    triton = importlib.import_module("triton")
    names = function.__globals__
    names["tl"] = importlib.import_module("triton.language")
    for name in function.__code__.co_names:
        if isinstance(called := names.get(name), DeviceFunction):
            names[name] = called.jit
    return triton.jit(function, **options)


def power_of_two(value: int, least: int = 1) -> int:
    """The smallest power of two >= max(value, least)."""
    return max(1 << (value - 1).bit_length() if value > 1 else 1, least)


def ceil_div(value: int, by: int) -> int:
    """Quotient, rounded up."""
    return -(-value // by)
