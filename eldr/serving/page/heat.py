"""The heat map: how often each worker reads each expert."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from eldr.serving.page.counters import F64, Counters

MOST_WORKERS = 64
_DIGITS = np.frombuffer(
    b"ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/", np.uint8
)


def heat(
    changes: Mapping[str, Counters], layer: int | None, problems: Mapping[str, str]
) -> dict[str, Any]:
    """Shares of decode steps in which an expert was read, by worker.

    Args:
        changes: counters by worker; those without steps show as empty rows.
        layer: which, or None for the mean over all layers.
        problems: why a worker has no counters.

    Returns:
        workers (names), steps, distinct (mean per step and layer, in the shown layers), experts,
        layers, layer, cells (one digit per cell of [workers, experts], see `digits`), why (if there
        is nothing to show).
    """
    shapes = {c.use.shape for c in changes.values()}
    why = None
    if not changes:
        first = next(iter(sorted(problems.items())), None)
        why = "no decode counters" if first is None else f"{first[0]}: {first[1]}"
    elif len(shapes) > 1:
        why = f"the decode workers report different shapes: {sorted(shapes)}"
    if why is not None:
        return {"workers": [], "why": why, "layer": None, "layers": 0, "experts": 0}
    (layers, experts) = shapes.pop()
    chosen = layer if layer is not None and 0 <= layer < layers else None
    names = sorted(changes)[:MOST_WORKERS]
    shares = np.stack([_shares(changes[name], chosen) for name in names])
    return {
        "workers": names,
        "left_out": len(changes) - len(names),
        "steps": [changes[name].steps for name in names],
        "distinct": [round(float(row.sum()), 3) for row in shares],
        "layers": layers,
        "experts": experts,
        "layer": chosen,
        "cells": digits(shares),
        "why": None,
    }


def digits(shares: F64) -> str:
    """Shares in [0, 1] as base64 digits, row by row: only 0 is `A`, only 1 is `/`."""
    level = np.rint(shares * 63)
    level = np.where(shares > 0, np.maximum(level, 1), 0)
    level = np.where(shares < 1, np.minimum(level, 62), 63)
    return _DIGITS[level.astype(np.uint8)].tobytes().decode()


def _shares(change: Counters, layer: int | None) -> F64:
    use = change.use.mean(axis=0) if layer is None else change.use[layer]
    shares: F64 = use / max(change.steps, 1)
    return shares
