"""A cell of a study: one kind of traffic on one fleet; with a seed, a case to run policies on."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np

from eldr.routing.cost import StepCost
from eldr.signature import Signature
from eldr.simulation import report, traffic
from eldr.simulation.events import FleetEvent
from eldr.simulation.operating import operating_point
from eldr.simulation.placement import PLACEMENTS, Owners
from eldr.simulation.policies import Builder, Knowledge, parse
from eldr.simulation.pool import UNLIMITED, PoolConfig
from eldr.simulation.prefill import PrefillConfig
from eldr.simulation.replay import Replay
from eldr.simulation.run import Outcome, Run, RunConfig
from eldr.simulation.traffic import Mix
from eldr.simulation.variants import signatures
from eldr.workload import arrivals as arrival
from eldr.workload.arrivals import Arrivals
from eldr.workload.tiny import TRACE_PATH
from eldr.workload.traces import ExpertTrace, load


@dataclass(frozen=True, slots=True)
class ArrivalSpec:
    """When requests come and how long they are.

    Attributes:
        path: a public trace, "" = Poisson with Azure conversation lengths.
        name: array inside an .npz.
        output_tokens: fixed output length, None = as drawn or recorded.
        clip: output lengths are held inside these bounds.
        prompt: input lengths are held inside these bounds.
    """

    path: str = ""
    name: str = ""
    output_tokens: int | None = None
    clip: tuple[int, int] = (2, 1 << 20)
    prompt: tuple[int, int] = (1, 1 << 20)

    def __post_init__(self) -> None:
        if self.output_tokens is not None and self.output_tokens < 2:
            raise ValueError(
                f"arrivals: {self.output_tokens} output tokens leave nothing to decode, needs 2"
            )

    def make(self, requests: int, seed: int) -> Arrivals:
        """`requests` requests, at any rate: the caller sets it."""
        if self.path:
            made = _arrivals(self.path, self.name).take(requests, seed)
        else:
            made = arrival.poisson(1.0, requests, seed)
        if self.output_tokens is not None:
            made = replace(made, output_tokens=np.full(len(made), self.output_tokens, np.int64))
        return replace(
            made,
            input_tokens=np.clip(made.input_tokens, *self.prompt),
            output_tokens=np.clip(made.output_tokens, *self.clip),
        )


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
        placement: of experts on ranks, one of `placement.PLACEMENTS`.
        routers, shared, know_length, telemetry, trust: see RunConfig. Without telemetry, policies
            that price a step are told the true step cost (with expert parallelism, per distinct
            expert of the whole step, which is what a router can count); with it, they have to
            learn it.
        calibration: share of the trace's requests that are held out to calibrate.
        objective: what goodput asks for.
        shares: restrict the trace to these domains, in these proportions under the mix `same`.
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
    placement: str = "linear"
    expected: bool = False
    routers: int = 1
    shared: bool = False
    know_length: bool = False
    telemetry: float = 0.0
    trust: float = 0.0
    calibration: float = 0.5
    objective: report.Objective = field(default_factory=report.Objective)
    shares: tuple[tuple[str, float], ...] = ()

    def __post_init__(self) -> None:
        given = [v for v in (self.rate, self.load, self.batch) if v is not None]
        if len(given) != 1 or not (math.isfinite(given[0]) and given[0] > 0):
            raise ValueError("cell: give exactly one positive rate, load or batch")
        if self.workers < 1 or self.requests < 10:
            raise ValueError(
                f"cell: needs a worker and 10 requests, got {self.workers} and {self.requests}"
            )
        if self.placement not in PLACEMENTS:
            raise ValueError(f"cell: placement is one of {', '.join(PLACEMENTS)}")

    @property
    def trace_name(self) -> str:
        """How tables call the trace."""
        return "bundled" if self.trace == str(TRACE_PATH) else Path(self.trace).stem

    def pool(self, seed: int, owners: Owners | None = None) -> PoolConfig:
        """The workers' configuration; `owners` is the placement, None = contiguous blocks."""
        return PoolConfig(
            cost=self.cost,
            max_batch=self.max_batch,
            kv_tokens=self.kv_tokens,
            expert_ranks=self.expert_ranks,
            owners=owners,
            seed=seed,
            expected=self.expected,
            track_use=self.trust > 0,
        )


@lru_cache(maxsize=8)
def _arrivals(path: str, name: str) -> Arrivals:
    return arrival.load(path, name)


@lru_cache(maxsize=4)
def _loaded(path: str) -> tuple[ExpertTrace, Replay]:
    trace = load(path)
    return trace, Replay.of(trace)


@lru_cache(maxsize=8)
def _signatures(path: str, variant: str) -> list[Signature]:
    return signatures(_loaded(path)[0], variant)


class Case:
    """A cell with one seed: the traffic, fixed, and any policy to run on it."""

    def __init__(self, cell: Cell, seed: int) -> None:
        self.cell, self.seed = cell, seed
        self.trace, self.replay = _loaded(cell.trace)
        halves = traffic.split(self.trace, seed, cell.calibration)
        calibration, serving = halves.calibration, halves.serving
        if cell.shares:
            calibration = traffic.resample(self.trace, calibration, dict(cell.shares), seed)
            serving = traffic.resample(self.trace, serving, dict(cell.shares), seed + 1)
        made = cell.arrivals.make(cell.requests, seed)
        drawn = traffic.draw(self.trace, serving, cell.mix, made, seed)
        point = operating_point(
            self.replay, drawn, cell.workers, cell.pool(seed),
            rate=cell.rate, load=cell.load, batch=cell.batch,
        )  # fmt: skip
        self.rate, self._batch = point.rate, point.batch
        busy = float(cell.prefill.seconds(made.input_tokens).mean())
        self.load = max(point.load, self.rate * busy / cell.prefill.workers)
        self.traffic = replace(drawn, arrivals=made.at_rate(self.rate))
        seen = replace(cell.cost, expert=cell.cost.expert * point.slowest)
        told = None if cell.telemetry else seen
        self._builder = Builder(Knowledge(self.trace, calibration, told), seed)

    def run(self, policy: str, progress: Callable[[int], None] | None = None) -> Outcome:
        """The outcome under a policy, written as in `policies.parse`."""
        cell, spec = self.cell, parse(policy)
        names = [f"w{i}" for i in range(cell.workers)]
        fleets = [names] if cell.shared else [names[r :: cell.routers] for r in range(cell.routers)]
        owners = self._builder.owners(
            spec, fleets, cell.placement, cell.expert_ranks, self.replay, self._batch
        )
        config = RunConfig(
            workers=cell.workers,
            pool=cell.pool(self.seed, owners),
            prefill=cell.prefill,
            routers=cell.routers,
            shared=cell.shared,
            know_length=cell.know_length,
            telemetry=cell.telemetry,
            trust=cell.trust,
            seed=self.seed,
            events=cell.events,
        )
        return Run(
            self.trace,
            self.replay,
            _signatures(cell.trace, spec.signature),
            self.traffic,
            config,
            self._builder.factory(spec),
            progress=progress,
        ).execute()


def run_case(
    cell: Cell,
    seed: int,
    policies: Sequence[str],
    progress: Callable[[int], None] | None = None,
) -> dict[str, Any]:
    """One seed of a cell: policy -> figures; with the rate and what it is of capacity.

    `progress` is called with the requests placed so far, over all policies.
    """
    case = Case(cell, seed)
    layers = case.trace.geometry.layers
    figures = {}
    for i, policy in enumerate(policies):

        def report_on(placed: int, before: int = i * cell.requests) -> None:
            if progress is not None:
                progress(before + placed)

        figures[policy] = report.summarise(case.run(policy, report_on), layers, cell.objective)
    return {"rate": case.rate, "load": case.load, "policies": figures}
