"""Fixed-point tables and loops of the expert load, native or NumPy, bit-identical in result.

Formats (all exact integers, so that removal restores a state and every backend decides alike):

* activation `x`, int16: x = p * 2^15, p the chance that one decode token uses the expert;
* cost, uint16: cost[x] = round(-log(1 - x / 2^15) * 2^13), at most 65535 (p = 0.9997);
* load, int32: sum of the costs of a worker's running requests = -log survival * 2^13;
* survival, uint8: survival[load] = round(255 * exp(-load / 2^13)), 0 beyond the table.
"""

from __future__ import annotations

import importlib
import logging
import math
from types import ModuleType
from typing import Any

import numpy as np
import numpy.typing as npt

_log = logging.getLogger(__name__)

P_ONE = 1 << 15
LOG_ONE = 1 << 13
SURVIVAL_ONE = 255

I16 = npt.NDArray[np.int16]
U8 = npt.NDArray[np.uint8]
U16 = npt.NDArray[np.uint16]
U32 = npt.NDArray[np.uint32]
I32 = npt.NDArray[np.int32]
I64 = npt.NDArray[np.int64]
F32 = npt.NDArray[np.float32]
F64 = npt.NDArray[np.float64]


def _cost_table() -> npt.NDArray[np.uint16]:
    x = np.arange(P_ONE, dtype=np.float64)
    table: npt.NDArray[np.uint16] = np.minimum(
        np.rint(-np.log1p(-x / P_ONE) * LOG_ONE), 65535
    ).astype(np.uint16)
    return table


def _survival_table() -> U8:
    last = int(np.ceil(np.log(2 * SURVIVAL_ONE) * LOG_ONE)) + 1
    u = np.arange(last + 1, dtype=np.float64)
    table: U8 = np.rint(SURVIVAL_ONE * np.exp(-u / LOG_ONE)).astype(np.uint8)
    return table


COST = _cost_table()
SURVIVAL = _survival_table()


_NEEDED = (
    *("admit", "similarities", "dots", "shift", "place", "least", "band"),
    *("assign_exact", "assign_prices"),
)


def _load_native() -> ModuleType | None:
    try:
        module = importlib.import_module("eldr._native")
    except ImportError:
        return None
    missing = [name for name in _NEEDED if not hasattr(module, name)]
    if missing:
        _log.warning(
            "eldr._native is of another version (no %s): deciding with NumPy, more slowly; "
            "build it again with `pip install -e .`",
            missing[0],
        )
        return None
    return module


native: ModuleType | None = _load_native()


def admit(counts: U32, scale: float, mean: F32, keep: float, x: I16, step: U16, total: U32) -> bool:
    """A request's activation and its costs, and its counts added to a sum, in one pass.

    x[i] = min(trunc(counts[i] * scale + (mean[i] * keep + 0.5)), 2^15 - 1), in float32.

    Args:
        counts: uint32, n in all, contiguous.
        scale: 2^15 * weight of the counts, >= 0.
        mean: float32 [n], what the counts are shrunk towards, >= 0.
        keep: 2^15 * weight of the mean, >= 0.
        x: int16 [n], written.
        step: uint16 [n], written: COST[x].
        total: uint32 [n], increased by the counts.

    Returns:
        Whether any count is not zero.

    Raises:
        ValueError: an x is negative, as of a count of 2^31 or more; nothing was added.
    """
    if native is not None:
        return bool(native.admit(counts, scale, mean, keep, COST, x, step, total))
    flat = counts.reshape(-1)
    prior = mean * np.float32(keep) + np.float32(0.5)  # one half, so that truncation rounds
    value = flat.astype(np.int32).astype(np.float32) * np.float32(scale) + prior
    x[:] = np.minimum(value, np.float32(P_ONE - 1)).astype(np.int16)
    if (x < 0).any():
        raise ValueError("admit: x must not be negative")
    step[:] = COST[x]
    total += flat
    return bool(flat.any())


def similarities(
    counts: U32,
    weights: F32,
    scale: float,
    rows: U8,
    unit: F64,
    of: npt.NDArray[np.intp],
) -> F64 | None:
    """Cosines of weighted counts with vectors in fixed point.

    <x, rows[r]> * unit[r] / |x| for every r of `of`, in float64, with
    x[i] = min(trunc(counts[i] * weights[i] * scale + 0.5), 2^15 - 1) in float32.

    Args:
        counts: uint32, n in all, contiguous.
        weights: float32 [n], >= 0.
        scale: brings the products into int16.
        rows: uint8 [W, n], directions.
        unit: float64 [W], length of the vectors that `rows` stand for, over that of the rows.
        of: intp [C], rows to compare with.

    Returns:
        float64 [C], or None when x is zero.
    """
    if native is not None:
        out = np.empty(len(of))
        found = native.similarities(counts, weights, scale, rows, unit, of, out)
        return out if found else None
    value = counts.reshape(-1).astype(np.int32).astype(np.float32) * weights
    value = value * np.float32(scale) + np.float32(0.5)
    x = np.minimum(value, np.float32(P_ONE - 1)).astype(np.int16)
    squares = int((x.astype(np.int64) ** 2).sum())
    if squares == 0:
        return None
    cosines: F64 = dots(x, rows[of]) * unit[of] * np.float64(1.0 / math.sqrt(squares))
    return cosines


def dots(x: I16, rows: U8) -> I64:
    """Exact dot products int64 [W] of x int16 [n] with every row of uint8 [W, n]."""
    out = np.empty(len(rows), np.int64)
    if native is not None:
        native.dots(x, rows, out)
        return out
    # Products stay below 2^23 and rows below 2^20 cells: float64 sums are exact.
    for start in range(0, len(rows), 64):
        part = rows[start : start + 64].astype(np.float64) @ x.astype(np.float64)
        out[start : start + 64] = part.astype(np.int64)
    return out


def shift(load: I32, survival: U8, idle: I64, slot: int, step: U16, sign: int) -> None:
    """Adds (sign 1) or removes (-1) one request to the expert load of a slot.

    load[slot] += sign * step; survival[slot] = survival of that load; idle[slot] = its sum, that is
    255 * (experts expected not to be read).

    Args:
        load: int32 [S, n], changed.
        survival: uint8 [S, n], changed.
        idle: int64 [S], changed.
        slot: which of S.
        step: uint16 [n], COST of the request's activation.
        sign: 1 or -1.
    """
    if native is not None:
        native.shift(load, survival, idle, slot, step, sign, SURVIVAL)
        return
    load[slot] += np.int32(sign) * step.astype(np.int32)
    survival[slot] = SURVIVAL[np.clip(load[slot], 0, len(SURVIVAL) - 1)]
    idle[slot] = int(survival[slot].sum(dtype=np.int64))


def describe() -> dict[str, Any]:
    """Which implementation runs, for logs and benchmarks."""
    return {"native": native is not None}
