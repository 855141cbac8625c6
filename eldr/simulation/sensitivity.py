"""How much the gains hang on constants that nobody has measured."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields, replace
from typing import Any

from eldr.simulation import models
from eldr.simulation.cells import Cell
from eldr.simulation.cost import Deployment
from eldr.simulation.models import ASSUMED, Figure
from eldr.simulation.study import study
from eldr.workload.traces import load

FACTORS = (0.5, 2.0)
_STEP = ("efficiency", "step_fixed", "layer_fixed", "tensor_parallel")  # what decides a decode step


def sensitivity(
    cell: Cell,
    policies: Sequence[str],
    seeds: Sequence[int],
    model: str,
    hardware: str,
    tensor: int,
    expert: int,
) -> list[dict[str, Any]]:
    """Halves and doubles every assumed constant of the step cost, one at a time.

    Returns:
        Rows {constant, factor, value, gain_pct: {policy: {p50, p99}}}; the first changes nothing.
    """
    hard = models.hardware(hardware)
    geometry = load(cell.trace).geometry
    variants: list[tuple[str, float, models.HardwareSpec]] = [("none", 1.0, hard)]
    for field in fields(hard):
        figure: Figure = getattr(hard, field.name)
        if field.name == "tensor_parallel" and tensor == 1:
            continue  # a single GPU has no all-reduce
        if field.name in _STEP and figure.value and figure.source.startswith(ASSUMED):
            for factor in FACTORS:
                value = figure.value * factor
                if field.name == "efficiency":
                    value = min(value, 1.0)
                changed = replace(hard, **{field.name: Figure(value, figure.source)})
                variants.append((field.name, value / figure.value, changed))
    cells = [
        replace(cell, cost=Deployment(models.model(model), h, tensor, expert).step_cost(geometry))
        for _, _, h in variants
    ]
    results = study(cells, policies, seeds, processes=min(2, len(cells)))
    return [
        {
            "constant": name,
            "factor": factor,
            "value": None if name == "none" else getattr(h, name).value,
            "gain_pct": result.gains,
        }
        for (name, factor, h), result in zip(variants, results, strict=True)
    ]
