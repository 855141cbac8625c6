"""Step costs from measurements: decode workers' own counters, or a file of fitted coefficients."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from eldr.routing.cost import StepCost
from eldr.routing.step_fit import StepSample
from eldr.simulation.models import Figure, HardwareSpec

_KEYS = ("base", "expert", "kv", "request")


@dataclass(frozen=True, slots=True)
class Fit:
    """A fitted step cost and the share of the variance that it explains."""

    cost: StepCost
    r2: float


def fit(samples: Sequence[StepSample]) -> Fit:
    """Least squares on the samples' mean steps, coefficients >= 0, weighted by steps.

    A column that does not vary cannot be told from the base and gets 0.

    Raises:
        ValueError: fewer usable samples than coefficients that vary.
    """
    used = [s for s in samples if s.usable]
    if len(used) < 2:
        raise ValueError(f"calibration: needs two usable samples or more, got {len(used)}")
    rows = np.array([[s.steps, s.distinct, s.kv_tokens, s.requests] for s in used], np.float64)
    weight = np.sqrt(rows[:, 0])
    times = np.array([s.seconds for s in used]) / rows[:, 0]
    rows /= rows[:, :1]
    varies = np.ptp(rows, axis=0) > 1e-9 * np.abs(rows).max(axis=0)
    varies[0] = True
    if len(used) < varies.sum():
        raise ValueError(f"calibration: {len(used)} samples for {varies.sum()} coefficients")
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
        ValueError: another geometry, or a restart in between.
    """
    if before.get("geometry") != after.get("geometry"):
        raise ValueError("calibration: the two snapshots have different geometries")
    steps = after["steps"] - before["steps"]
    if steps < 0:
        raise ValueError(f"calibration: {steps} steps between the snapshots; did it restart?")
    return StepSample(
        steps=steps,
        seconds=after["seconds"] - before["seconds"],
        requests=float(after["tokens"] - before["tokens"]),
        distinct=float(sum(after["distinct"]) - sum(before["distinct"])),
        kv_tokens=float(after.get("kv_tokens", 0) - before.get("kv_tokens", 0)),
    )


def load_snapshots(path: str | Path) -> list[StepSample]:
    """Samples between successive lines of a file of `/eldr/decode` answers of one worker.

    Raises:
        ValueError: malformed line, or lines that do not follow each other; names file and line.
    """
    snapshots: list[Mapping[str, Any]] = []
    samples = []
    with open(path, encoding="utf-8") as file:
        for number, line in enumerate(file, 1):
            if not line.strip():
                continue
            try:
                snapshots.append(json.loads(line))
                if len(snapshots) > 1:
                    samples.append(from_counters(*snapshots[-2:]))
            except (ValueError, TypeError, KeyError) as error:
                raise ValueError(f"{path}, line {number}: {error!r}") from error
    return samples


def from_gpu_check(path: str | Path, assumed: HardwareSpec, model: str) -> HardwareSpec:
    """Hardware whose bandwidth `make gpu-check` measured.

    Bandwidth is the measured copy; efficiency is the rate at which the fused-MoE layer read one
    more expert, relative to it, for this model or on average over the measured ones. A layer takes
    at least what its MoE part took with no expert at all.

    Raises:
        ValueError: not such a file, or one without timings of MoE layers.
    """
    try:
        content = json.loads(Path(path).read_text(encoding="utf-8"))
        copy = float(content["copy_bytes_per_s"])
        layers = [
            (str(e["model"]).lower(), float(e["expert_gb_per_s"]) * 1e9, float(e["base_us"]) * 1e-6)
            for e in content["experts"]
            if e["expert_gb_per_s"]
        ]
        used = [e[1:] for e in layers if e[0] == model] or [e[1:] for e in layers]
        if not (copy > 0 and used):
            raise ValueError("no time of a fused-MoE layer was measured")
    except (ValueError, TypeError, KeyError) as error:
        raise ValueError(f"{path}: not a result of `make gpu-check`: {error!r}") from error
    rate, base = np.mean(used, axis=0).tolist()
    source = f"measured by gpu-check, {Path(path).name}"
    fixed = max(assumed.layer_fixed.value, base)
    return replace(
        assumed,
        bandwidth=Figure(copy, source),
        efficiency=Figure(min(1.0, rate / copy), source),
        layer_fixed=assumed.layer_fixed if fixed > base else Figure(base, source),
    )


def is_gpu_check(path: str | Path) -> bool:
    """Whether a file looks like a result of `make gpu-check`."""
    if Path(path).suffix != ".json":
        return False
    try:
        content = json.loads(Path(path).read_text(encoding="utf-8"))
    except ValueError:
        return False
    return isinstance(content, dict) and "copy_bytes_per_s" in content


def load_cost(path: str | Path) -> StepCost:
    """The step cost of a file, D in cells of the measured model.

    `.jsonl`: `/eldr/decode` answers of one worker over time, to which a cost is fitted; otherwise a
    JSON object {"base": s, "expert": s, "kv": s, "request": s}, of which kv and request may lack.

    Raises:
        ValueError: malformed file; the message names it.
    """
    if Path(path).suffix == ".jsonl":
        samples = load_snapshots(path)
        try:
            return fit(samples).cost
        except ValueError as error:
            raise ValueError(f"{path}: {error}") from error
    try:
        content = json.loads(Path(path).read_text(encoding="utf-8"))
        if not isinstance(content, dict) or not {"base", "expert"} <= set(content) <= set(_KEYS):
            raise ValueError(f"expected an object with keys of {_KEYS}, got {content!r}")
        return StepCost(**{k: float(v) for k, v in content.items()})
    except (ValueError, TypeError) as error:
        raise ValueError(f"{path}: {error}") from error
