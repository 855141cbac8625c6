"""Arrays of other libraries, taken over by DLPack without a copy.

CuPy, NumPy, JAX: whatever has `__dlpack__` may stand where an op takes a tensor. The tensor that
the op sees is the array's own memory, so what an op writes in place, the array holds. On a GPU
DLPack makes torch's current stream wait for the producer's; no host waits.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any, ParamSpec, TypeVar

from torch import Tensor
from torch.utils.dlpack import from_dlpack

P = ParamSpec("P")
R = TypeVar("R")


def taken_over(name: str, value: Any) -> Any:
    """A tensor over the array's memory; anything that is no array of another library, as it is.

    Raises:
        TypeError: DLPack cannot hand it over: a dtype that torch lacks, memory that is read-only.
    """
    if isinstance(value, Tensor) or not hasattr(value, "__dlpack__"):
        return value
    if _read_only(value):  # torch has no such tensors, and would write all the same
        raise TypeError(f"{name}: read-only {type(value).__name__}, pass a copy of it")
    try:
        return from_dlpack(value)
    except (BufferError, RuntimeError, TypeError, ValueError) as error:
        raise TypeError(
            f"{name}: expected a tensor or an array that DLPack can share, got "
            f"{type(value).__name__}: {error}"
        ) from error


def _read_only(array: Any) -> bool:
    for protocol in ("__array_interface__", "__cuda_array_interface__"):
        interface = getattr(array, protocol, None)
        if interface is not None and interface.get("data") is not None:
            return bool(interface["data"][1])
    return False


def takes_arrays(launcher: Callable[P, R]) -> Callable[P, R]:
    """Decorates a launcher: every argument may be an array of another library."""
    names = tuple(inspect.signature(launcher).parameters)

    @functools.wraps(launcher)
    def call(*args: P.args, **kwargs: P.kwargs) -> R:
        given: tuple[Any, ...] = tuple(map(taken_over, names, args))
        named: dict[str, Any] = {name: taken_over(name, value) for name, value in kwargs.items()}
        return launcher(*(given + args[len(given) :]), **named)

    return call


def take_over(record: object, *fields: str) -> None:
    """The same for the named fields of a frozen dataclass, from its `__post_init__`."""
    for name in fields:
        object.__setattr__(record, name, taken_over(name, getattr(record, name)))
