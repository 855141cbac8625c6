"""The heat map: how often each worker reads each expert."""

from __future__ import annotations

import base64
from collections.abc import Mapping
from typing import Any

import numpy as np

from eldr.serving.page.counters import Counters

MOST_WORKERS = 64


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
        layers, layer, cells (base64 of uint8 [workers, experts], 255 = every step), order (experts
        by the worker that reads them most, then by how often), why (if there is nothing to show).
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
    home, most = shares.argmax(axis=0), shares.max(axis=0)
    order = np.lexsort((np.arange(experts), -most, home))
    return {
        "workers": names,
        "left_out": len(changes) - len(names),
        "steps": [changes[name].steps for name in names],
        "distinct": [round(float(row.sum()), 3) for row in shares],
        "layers": layers,
        "experts": experts,
        "layer": chosen,
        "cells": base64.b64encode(np.rint(shares * 255).astype(np.uint8).tobytes()).decode(),
        "order": order.tolist(),
        "why": None,
    }


def _shares(change: Counters, layer: int | None) -> np.ndarray[Any, np.dtype[np.float64]]:
    use = change.use.mean(axis=0) if layer is None else change.use[layer]
    shares: np.ndarray[Any, np.dtype[np.float64]] = use / max(change.steps, 1)
    return shares
