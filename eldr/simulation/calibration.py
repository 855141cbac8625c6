"""Step costs from measurements: decode workers' own counters, or a file of fitted coefficients."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from eldr.routing.cost import StepCost

_KEYS = ("base", "expert", "kv", "request")


@dataclass(frozen=True, slots=True)
class StepSample:
    """Means over some steps of one decode worker.

    Attributes:
        seconds: of a step.
        cells: distinct experts, summed over layers.
        kv_tokens: KV tokens read.
        requests: batch size.
        steps: how many steps the means stand for.
    """

    seconds: float
    cells: float
    kv_tokens: float
    requests: float
    steps: float = 1.0


@dataclass(frozen=True, slots=True)
class Fit:
    """A fitted step cost and the share of the variance that it explains."""

    cost: StepCost
    r2: float


def fit(samples: Sequence[StepSample]) -> Fit:
    """Least squares with coefficients >= 0, weighted by steps.

    Raises:
        ValueError: fewer samples than coefficients that vary, or non-finite values.
    """
    rows = np.array([[1.0, s.cells, s.kv_tokens, s.requests] for s in samples], np.float64)
    times = np.array([s.seconds for s in samples], np.float64)
    weight = np.sqrt(np.array([s.steps for s in samples], np.float64))
    if len(samples) < 2 or not (np.isfinite(rows).all() and np.isfinite(times).all()):
        raise ValueError(f"calibration: needs two finite samples or more, got {len(samples)}")
    # A column that does not vary cannot be told from the base.
    varies = np.ptp(rows, axis=0) > 1e-9 * np.abs(rows).max(axis=0)
    varies[0] = True
    if len(samples) < varies.sum():
        raise ValueError(f"calibration: {len(samples)} samples for {varies.sum()} coefficients")
    scale = np.maximum(np.abs(rows).max(axis=0), 1e-30)
    solution = np.zeros(4)
    solution[varies] = _nonnegative((rows / scale)[:, varies] * weight[:, None], times * weight)
    solution /= scale
    residual = (rows @ solution - times) * weight
    spread = (times - np.average(times, weights=weight**2)) * weight
    r2 = 1.0 - float(residual @ residual) / max(float(spread @ spread), 1e-300)
    return Fit(StepCost(**dict(zip(_KEYS, solution.tolist(), strict=True))), r2)


def _nonnegative(a: npt.NDArray[np.float64], b: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    from scipy.optimize import nnls

    return np.asarray(nnls(a, b)[0], np.float64)


def from_counters(before: Mapping[str, Any], after: Mapping[str, Any]) -> StepSample:
    """The steps between two answers of a worker's `/eldr/decode`.

    Raises:
        ValueError: another geometry, a restart in between, or no step.
    """
    if before.get("geometry") != after.get("geometry"):
        raise ValueError("calibration: the two snapshots have different geometries")
    steps = after["steps"] - before["steps"]
    if steps < 1:
        raise ValueError(f"calibration: {steps} steps between the snapshots; did it restart?")
    distinct = sum(after["distinct"]) - sum(before["distinct"])
    kv = after.get("kv_tokens", 0) - before.get("kv_tokens", 0)
    return StepSample(
        seconds=(after["seconds"] - before["seconds"]) / steps,
        cells=distinct / steps,
        kv_tokens=kv / steps,
        requests=(after["tokens"] - before["tokens"]) / steps,
        steps=float(steps),
    )


def load_cost(path: str | Path) -> StepCost:
    """Reads {"base": s, "expert": s, "kv": s, "request": s}; kv and request may be absent.

    Raises:
        ValueError: malformed file; the message names it.
    """
    try:
        content = json.loads(Path(path).read_text(encoding="utf-8"))
        if not isinstance(content, dict) or not {"base", "expert"} <= set(content) <= set(_KEYS):
            raise ValueError(f"expected an object with keys of {_KEYS}, got {content!r}")
        return StepCost(**{k: float(v) for k, v in content.items()})
    except (ValueError, TypeError) as error:
        raise ValueError(f"{path}: {error}") from error
