"""Argument checks of the launchers.

Every error names the argument, its value and what was expected. Shapes, dtypes and devices are
read everywhere, data on CPU tensors alone, where that costs no synchronisation, and not while
torch.compile traces, which has no data yet: there the compiled ops themselves refuse what would
lead out of bounds.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

HISTOGRAM_DTYPES = (torch.uint8, torch.uint16)
INT32_MAX = 2**31 - 1
FLOAT32_MAX = torch.finfo(torch.float32).max


def tensor(
    name: str,
    value: object,
    dtypes: torch.dtype | Sequence[torch.dtype],
    shape: Sequence[int | str],
) -> Tensor:
    """Returns `value` if it is a tensor of one of `dtypes` and of `shape` (a str matches any size).

    Raises:
        TypeError: not a tensor, or another dtype.
        ValueError: another shape.
    """
    allowed = (dtypes,) if isinstance(dtypes, torch.dtype) else tuple(dtypes)
    if not isinstance(value, Tensor):
        raise TypeError(f"{name}: expected a torch.Tensor, got {type(value).__name__}")
    if value.dtype not in allowed:
        names = " or ".join(_short(dtype) for dtype in allowed)
        raise TypeError(f"{name}: expected {names}, got {_short(value.dtype)}")
    fits = value.dim() == len(shape) and all(
        isinstance(want, str) or want == have for want, have in zip(shape, value.shape, strict=True)
    )
    if not fits:
        wanted = ", ".join(str(size) for size in shape)
        raise ValueError(f"{name}: expected shape [{wanted}], got {list(value.shape)}")
    return value


def contiguous(**tensors: Tensor | None) -> None:
    """Raises ValueError for the first tensor that is not contiguous."""
    for name, value in tensors.items():
        if value is not None and not value.is_contiguous():
            raise ValueError(
                f"{name}: expected a contiguous tensor, got strides {value.stride()} "
                f"for shape {list(value.shape)}"
            )


def same_device(anchor: str, device: torch.device, **tensors: Tensor | None) -> None:
    """Raises ValueError for the first tensor that is not on `device`, where `anchor` lies."""
    for name, value in tensors.items():
        if value is not None and value.device != device:
            raise ValueError(f"{name}: on {value.device}, but {anchor} is on {device}")


def integer(name: str, value: object, low: int, high: int, why: str = "") -> int:
    """Returns `value` if it is an int in [low, high].

    Raises:
        TypeError: not an int.
        ValueError: out of range.
    """
    if not isinstance(value, int) or isinstance(value, bool):
        raise TypeError(f"{name}: expected an int, got {type(value).__name__} {value!r}")
    if not low <= value <= high:
        raise ValueError(f"{name}: {value} is not in [{low}, {high}]{why}")
    return value


def non_negative(name: str, value: object) -> None:
    """Raises ValueError unless `value` is a number >= 0 that stays finite in float32."""
    number = isinstance(value, int | float) and not isinstance(value, bool)
    if not number or not 0.0 <= value <= FLOAT32_MAX:  # type: ignore[operator]
        raise ValueError(f"{name}: {value!r} is not a finite number >= 0 in float32")


def histograms(value: object) -> Tensor:
    """Returns `value` if it is a block histogram: uint8 or uint16 [num_blocks, L, E], rows dense.

    Raises:
        TypeError: not a tensor, or another dtype.
        ValueError: another shape, empty, rows that are not dense or that overlap.
    """
    checked = tensor("histograms", value, HISTOGRAM_DTYPES, ("num_blocks", "L", "E"))
    blocks, layers, experts = checked.shape
    if layers == 0 or experts == 0:
        raise ValueError(f"histograms: L and E must be positive, got {list(checked.shape)}")
    dense = checked.stride(2) == 1 and (layers == 1 or checked.stride(1) == experts)
    apart = blocks <= 1 or checked.stride(0) >= layers * experts
    if not (dense and apart):
        raise ValueError(
            f"histograms: each block's [L, E] must be dense, got strides {checked.stride()} "
            f"for shape {list(checked.shape)}"
        )
    return checked


def within(name: str, values: Tensor, low: int, high: int, what: str) -> None:
    """Raises ValueError if a CPU tensor holds a value outside [low, high]; devices pass."""
    if values.device.type != "cpu" or values.numel() == 0 or torch.compiler.is_compiling():
        return
    least, most = (int(v) for v in torch.aminmax(values))
    bad = least if least < low else most
    if not low <= bad <= high:
        where = int((values.flatten() == bad).nonzero()[0])
        raise ValueError(f"{name}: {bad} at position {where} is not in [{low}, {high}], {what}")


def _short(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
