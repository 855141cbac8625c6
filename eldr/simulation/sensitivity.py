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
# What decides a decode step; and what decides prefill and the KV transfer, where they take time.
_STEP = ("bandwidth", "efficiency", "step_fixed", "layer_fixed", "tensor_parallel")
_PREFILL = ("flops", "flops_efficiency", "link")


def sensitivity(
    cell: Cell,
    policies: Sequence[str],
    seeds: Sequence[int],
    model: str,
    hardware: str,
    tensor: int,
    expert: int,
    prefill_workers: int = 0,
) -> list[dict[str, Any]]:
    """Halves and doubles every assumed constant of the step cost, one at a time.

    With prefill workers, those of prefill and of the KV transfer too.

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
        wanted = _STEP + (_PREFILL if prefill_workers else ())
        if field.name in wanted and figure.value and figure.source.startswith(ASSUMED):
            for factor in FACTORS:
                value = figure.value * factor
                if field.name.endswith("efficiency"):
                    value = min(value, 1.0)
                changed = replace(hard, **{field.name: Figure(value, figure.source)})
                variants.append((field.name, value / figure.value, changed))
    cells = []
    for _, _, h in variants:
        made = Deployment(models.model(model), h, tensor, expert)
        prefill = made.prefill(prefill_workers, cell.prefill.cached) if prefill_workers else None
        cells.append(replace(cell, cost=made.step_cost(geometry), prefill=prefill or cell.prefill))
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
