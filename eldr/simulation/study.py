"""Studies: cells (trace, mix, workers) x policies x seeds, run in parallel and averaged.

Within a cell and seed every policy sees the same requests at the same times with the same token
draws, so that their differences are the policies' alone.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass, field, replace
from functools import lru_cache
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import numpy as np

from eldr.routing.cost import StepCost
from eldr.simulation import report, traffic
from eldr.simulation.events import FleetEvent
from eldr.simulation.policies import Builder, Knowledge, parse
from eldr.simulation.pool import UNLIMITED, PoolConfig
from eldr.simulation.prefill import PrefillConfig
from eldr.simulation.replay import LOG_UNIT, Replay
from eldr.simulation.run import Outcome, Run, RunConfig, signatures
from eldr.simulation.traffic import Mix
from eldr.workload import arrivals as arrival
from eldr.workload.arrivals import Arrivals
from eldr.workload.traces import ExpertTrace, load

# Above this share of capacity, or when waiting requests pile up, a cell is called saturated.
_SATURATED = 1.0


@dataclass(frozen=True, slots=True)
class ArrivalSpec:
    """When requests come and how long they are.

    Attributes:
        path: a public trace, "" = Poisson with Azure conversation lengths.
        name: array inside an .npz.
        output_tokens: fixed output length, None = as drawn or recorded.
        clip: output lengths are held inside these bounds.
    """

    path: str = ""
    name: str = ""
    output_tokens: int | None = None
    clip: tuple[int, int] = (2, 1 << 20)

    def make(self, requests: int, seed: int) -> Arrivals:
        """`requests` requests, at any rate: the caller sets it."""
        if not self.path:
            made = arrival.poisson(1.0, requests, seed, output_tokens=self.output_tokens)
            return made.clip(*self.clip)
        made = _arrivals(self.path, self.name).take(requests, seed)
        if self.output_tokens is not None:
            made = replace(made, output_tokens=np.full(len(made), self.output_tokens, np.int64))
        return made.clip(*self.clip)


@dataclass(frozen=True, slots=True)
class Cell:
    """One kind of traffic on one fleet.

    Exactly one of `rate`, `load` and `batch` sets the arrival rate.

    Attributes:
        trace: path of the expert trace.
        mix: kind of traffic.
        workers: decode workers.
        cost: step cost in cells of the trace.
        requests: requests of a run.
        rate: requests per second.
        load: share of the rate at which every worker's batch or KV memory would be full.
        batch: mean running requests per worker under load balancing.
        arrivals, prefill, events: see their types.
        max_batch, kv_tokens, expert_ranks, expected: see PoolConfig.
        routers, shared, know_length, tick: see RunConfig.
        calibration: share of the trace's requests that are held out to calibrate.
        objective: what goodput asks for.
    """

    trace: str
    mix: Mix
    workers: int
    cost: StepCost
    requests: int
    rate: float | None = None
    load: float | None = None
    batch: float | None = None
    arrivals: ArrivalSpec = field(default_factory=ArrivalSpec)
    prefill: PrefillConfig = field(default_factory=PrefillConfig)
    events: tuple[FleetEvent, ...] = ()
    max_batch: int = 256
    kv_tokens: int = UNLIMITED
    expert_ranks: int = 1
    expected: bool = False
    routers: int = 1
    shared: bool = False
    know_length: bool = False
    calibration: float = 0.5
    objective: report.Objective = field(default_factory=report.Objective)

    def __post_init__(self) -> None:
        given = [v for v in (self.rate, self.load, self.batch) if v is not None]
        if len(given) != 1 or not (math.isfinite(given[0]) and given[0] > 0):
            raise ValueError("cell: give exactly one positive rate, load or batch")
        if self.workers < 1 or self.requests < 10:
            raise ValueError(
                f"cell: needs a worker and 10 requests, got {self.workers} and {self.requests}"
            )

    def pool(self, seed: int) -> PoolConfig:
        """The workers' configuration."""
        return PoolConfig(
            cost=self.cost,
            max_batch=self.max_batch,
            kv_tokens=self.kv_tokens,
            expert_ranks=self.expert_ranks,
            seed=seed,
            expected=self.expected,
        )


@lru_cache(maxsize=8)
def _arrivals(path: str, name: str) -> Arrivals:
    return arrival.load(path, name)


@lru_cache(maxsize=4)
def _loaded(path: str) -> tuple[ExpertTrace, Replay, list[Any]]:
    trace = load(path)
    return trace, Replay.of(trace), signatures(trace)


class Case:
    """A cell with one seed: the traffic, fixed, and any policy to run on it."""

    def __init__(self, cell: Cell, seed: int) -> None:
        self.cell, self.seed = cell, seed
        self.trace, self.replay, self._signatures = _loaded(cell.trace)
        halves = traffic.split(self.trace, seed, cell.calibration)
        made = cell.arrivals.make(cell.requests, seed)
        drawn = traffic.draw(self.trace, halves.serving, cell.mix, made, seed)
        self.rate, self.load = _rate(cell, self.replay, drawn)
        self.traffic = replace(drawn, arrivals=made.at_rate(self.rate))
        knowledge = Knowledge(self.trace, halves.calibration, cell.cost)
        self._builder = Builder(knowledge, seed)

    def run(self, policy: str, progress: Callable[[int], None] | None = None) -> Outcome:
        """The outcome under a policy, written as in `policies.parse`."""
        cell = self.cell
        config = RunConfig(
            workers=cell.workers,
            pool=cell.pool(self.seed),
            prefill=cell.prefill,
            routers=cell.routers,
            shared=cell.shared,
            know_length=cell.know_length,
            seed=self.seed,
            events=cell.events,
        )
        return Run(
            self.trace, self.replay, self._signatures, self.traffic, config,
            self._builder.factory(policy), progress=progress,
        ).execute()  # fmt: skip


def _rate(cell: Cell, replay: Replay, drawn: traffic.Traffic) -> tuple[float, float]:
    """Requests per second, and that as a share of capacity (0 when there is no limit)."""
    made = drawn.arrivals
    steps = float((made.output_tokens - 1).mean())
    context = float((made.input_tokens + 0.5 * made.output_tokens).mean())
    held = float((made.input_tokens + made.output_tokens).mean())
    # The mean request's chance to use each expert, over the traffic as it is drawn.
    rows, count = np.unique(drawn.rows, return_counts=True)
    use = -np.expm1(-LOG_UNIT * replay.logs[rows].astype(np.float64))
    idle = np.log1p(-np.minimum(count @ use / count.sum(), 1 - 1e-12))

    def at(batch: float) -> float:
        """Requests per second when every worker runs `batch` of them."""
        cells = float(-np.expm1(batch * idle).sum())
        seconds = cell.cost.seconds(cells, batch * context, batch)
        return cell.workers * batch / (steps * seconds)

    full = at(min(cell.max_batch, cell.kv_tokens / held))
    if cell.rate is not None:
        rate = cell.rate
    elif cell.load is not None:
        rate = cell.load * full
    else:
        assert cell.batch is not None  # checked on construction
        rate = at(cell.batch)
    return rate, rate / full


def run_case(cell: Cell, seed: int, policies: Sequence[str]) -> dict[str, Any]:
    """One seed of a cell: policy -> figures; with the rate and what it is of capacity."""
    case = Case(cell, seed)
    layers = case.trace.geometry.layers
    figures = {p: report.summarise(case.run(p), layers, cell.objective) for p in policies}
    return {"rate": case.rate, "load": case.load, "policies": figures}


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
        return f"{Path(self.cell.trace).stem}/{self.cell.mix}/{self.cell.workers}"

    @property
    def saturated(self) -> bool:
        """Whether more arrives than the fleet can serve."""
        return self.load > _SATURATED

    def rows(self) -> list[dict[str, Any]]:
        """One JSON object per policy."""
        head = {
            "trace": Path(self.cell.trace).stem,
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
        for i, seed in tasks:
            done[i, seed] = run_case(cells[i], seed, policies)
            if progress:
                progress(len(done), len(tasks))
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
