"""Studies: cells (trace, mix, workers) x policies x seeds, run in parallel and averaged.

Within a cell and seed every policy sees the same requests at the same times with the same token
draws, so that their differences are the policies' alone.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import numpy as np

from eldr.simulation import report
from eldr.simulation.cells import Cell, run_case
from eldr.simulation.policies import parse

# Above this share of capacity a cell is called saturated.
_SATURATED = 1.0


@dataclass(frozen=True, eq=False)
class Result:
    """Figures of a study.

    Attributes:
        cell: what was run.
        figures: policy -> figures averaged over seeds.
        gains: policy -> quantile -> mean over seeds of the gain in %.
        spread: the same, standard error over seeds.
        best: quantile -> best load balancer.
        rate, load: requests per second, and their share of capacity.
    """

    cell: Cell
    figures: dict[str, Any]
    gains: dict[str, dict[str, float]]
    spread: dict[str, dict[str, float]]
    best: dict[str, str]
    rate: float
    load: float

    @property
    def name(self) -> str:
        """trace/mix/workers, the key of this cell in tables."""
        return f"{self.cell.trace_name}/{self.cell.mix}/{self.cell.workers}"

    @property
    def saturated(self) -> bool:
        """Whether more arrives than the fleet can serve."""
        return self.load > _SATURATED

    def rows(self) -> list[dict[str, Any]]:
        """One JSON object per policy."""
        head = {
            "trace": self.cell.trace_name,
            "mix": str(self.cell.mix),
            "workers": self.cell.workers,
            "arrivals": self.cell.arrivals.name or Path(self.cell.arrivals.path).stem or "poisson",
            "rate": self.rate,
            "load": self.load,
            "saturated": self.saturated,
        }
        return [
            {**head, "policy": p, **f, "gain_pct": self.gains.get(p), "error": self.spread.get(p)}
            for p, f in self.figures.items()
        ]


def study(
    cells: Sequence[Cell],
    policies: Sequence[str],
    seeds: Sequence[int],
    *,
    processes: int = 2,
    progress: Callable[[int, int], None] | None = None,
) -> list[Result]:
    """Runs every cell with every seed; one task per (cell, seed), in `processes` processes.

    `progress` gets (done, total): requests in one process, tasks in several.

    Raises:
        ValueError: nothing to run, or a policy that does not exist.
    """
    if not (cells and policies and seeds):
        raise ValueError("study: needs at least one cell, one policy and one seed")
    for policy in policies:
        parse(policy)
    tasks = [(i, s) for i in range(len(cells)) for s in seeds]
    done: dict[tuple[int, int], dict[str, Any]] = {}
    if processes == 1:
        total = len(policies) * len(seeds) * sum(cell.requests for cell in cells)
        before = 0
        for i, seed in tasks:

            def placed(count: int, before: int = before) -> None:
                if progress:
                    progress(before + count, total)

            done[i, seed] = run_case(cells[i], seed, policies, placed)
            before += len(policies) * cells[i].requests
    else:
        with ProcessPoolExecutor(processes, mp_context=get_context("forkserver")) as pool:
            futures = {
                pool.submit(run_case, cells[i], s, tuple(policies)): (i, s) for i, s in tasks
            }
            for future in as_completed(futures):
                done[futures[future]] = future.result()
                if progress:
                    progress(len(done), len(tasks))
    return [_result(cell, [done[i, s] for s in seeds]) for i, cell in enumerate(cells)]


def _result(cell: Cell, runs: list[dict[str, Any]]) -> Result:
    figures = report.average([r["policies"] for r in runs])
    gains: dict[str, dict[str, float]] = {}
    spread: dict[str, dict[str, float]] = {}
    best: dict[str, str] = {}
    if any(p in report.LOAD_BALANCERS for p in figures):
        best = report.best_load_balancer(figures)
        per_seed = [report.gains(r["policies"], best) for r in runs]
        gains = report.average(per_seed)
        for policy in figures:
            values = {q: [g[policy][q] for g in per_seed] for q in report.QUANTILES}
            spread[policy] = {q: report.standard_error(v) for q, v in values.items()}
    rate, load = (float(np.mean([r[k] for r in runs])) for k in ("rate", "load"))
    return Result(cell, figures, gains, spread, best, rate, load)
