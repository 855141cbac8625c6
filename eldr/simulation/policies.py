"""Policies of a study, written as text: `name` or `name:option=value,option=value`.

Beside a policy's own options, studies may set `signature` (see `variants.SIGNATURES`), `idf` and
`balanced` (both booleans: how the partition is fitted).
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from eldr.routing.cost import StepCost
from eldr.routing.fit import normalise
from eldr.routing.partition import Partition
from eldr.routing.policies import POLICIES, Policy, make_policy
from eldr.routing.policies.affinity import domain_pools
from eldr.routing.recorded import Recorded
from eldr.simulation import placement, variants
from eldr.simulation.operating import chances
from eldr.simulation.replay import Replay
from eldr.simulation.traffic import Index
from eldr.workload.traces import ExpertTrace

_GIVEN = {"partition", "pools", "cost"}  # what a study supplies, and nobody writes


@dataclass(frozen=True, slots=True)
class Spec:
    """A parsed policy: its name, its own options, and the study's."""

    name: str
    options: dict[str, Any] = field(default_factory=dict)
    signature: str = "count"
    idf: bool = True
    balanced: bool = True

    @property
    def takes(self) -> set[str]:
        """Parameters of the policy's constructor."""
        return set(inspect.signature(POLICIES[self.name]).parameters)


def parse(text: str) -> Spec:
    """Splits a policy's text; values are numbers, words or booleans.

    Raises:
        ValueError: unknown policy, option or signature, or malformed text.
    """
    name, _, rest = text.partition(":")
    if name not in POLICIES:
        raise ValueError(f"unknown policy {name!r}; there are {', '.join(POLICIES)}")
    options: dict[str, Any] = {}
    for item in rest.split(",") if rest else []:
        key, equals, value = item.partition("=")
        if not (key and equals and value) or key in options:
            raise ValueError(f"policy {text!r}: expected name:option=value,..., got {item!r}")
        options[key] = _value(value)
    ours = {k: options.pop(k) for k in ("signature", "idf", "balanced") if k in options}
    spec = Spec(name, options, **ours)
    known = spec.takes - _GIVEN
    if unknown := sorted(set(options) - known):
        raise ValueError(f"policy {name}: unknown option {unknown[0]!r}; it takes {sorted(known)}")
    if spec.signature not in variants.SIGNATURES:
        raise ValueError(f"policy {text!r}: signature is one of {', '.join(variants.SIGNATURES)}")
    if not (isinstance(spec.idf, bool) and isinstance(spec.balanced, bool)):
        raise ValueError(f"policy {text!r}: idf and balanced are true or false")
    return spec


def _value(text: str) -> Any:
    if text in ("true", "false"):
        return text == "true"
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            continue
    return text


@dataclass(frozen=True, eq=False)
class Knowledge:
    """What policies may learn before the run: calibration requests, and the step cost.

    Attributes:
        trace: the trace.
        calibration: its requests that are not served; repeats allowed.
        cost: step cost given to policies that take one.
    """

    trace: ExpertTrace
    calibration: Index
    cost: StepCost | None = None

    def recorded(self, signature: str = "count") -> Recorded:
        """The calibration requests as `eldr record` would have written them."""
        trace, rows = self.trace, self.calibration
        known = variants.signatures(trace, signature)
        return Recorded(
            counts=np.stack([known[r].counts for r in rows]),
            tokens=np.array([known[r].tokens for r in rows], np.int32),
            coverage=np.ones(len(rows), np.float32),
            geometry=trace.geometry,
            model=trace.model,
            labels=np.array([trace.domains[d] for d in trace.domain[rows]]),
        )

    def shares(self) -> dict[str, float]:
        """Share of every domain among the calibration requests."""
        domains = self.trace.domain[self.calibration]
        count = np.bincount(domains, minlength=len(self.trace.domains))
        return {d: float(c) for d, c in zip(self.trace.domains, count, strict=True) if c}


class Builder:
    """Makes policies for a fleet; a partition is fitted once per set of workers and kind of fit."""

    def __init__(self, knowledge: Knowledge, seed: int = 0) -> None:
        self._knowledge, self._seed = knowledge, seed
        self._partitions: dict[tuple[Any, ...], Partition] = {}

    def factory(self, spec: Spec) -> Callable[[Sequence[str]], Policy]:
        """What a run calls with the names of a router's workers."""

        def make(workers: Sequence[str]) -> Policy:
            given = dict(spec.options)
            if "partition" in spec.takes:
                given["partition"] = self._partition(tuple(workers), spec)
            if "pools" in spec.takes:
                given["pools"] = domain_pools(self._knowledge.shares(), list(workers))
            if "cost" in spec.takes and self._knowledge.cost is not None:
                given["cost"] = self._knowledge.cost
            return make_policy(spec.name, **given)

        return make

    def owners(
        self,
        spec: Spec,
        fleets: Sequence[Sequence[str]],
        kind: str,
        ranks: int,
        replay: Replay,
        batch: float,
    ) -> placement.Owners | None:
        """The placement of experts on the ranks of workers w0, w1, ..., uint8 [P, L, E].

        `spread` levels what a step of `batch` calibration requests is expected to read; `clusters`
        does so with the requests nearest to the worker's centroid, where the policy has centroids.

        Args:
            spec: the policy.
            fleets: the workers of each router; worker j is fleets[j mod R][j // R].
            kind: one of `placement.PLACEMENTS`.
            ranks: expert-parallel ranks; 1 = nothing to place.
            replay: of the trace.
            batch: requests of a step.
        """
        geometry, rows = replay.geometry, self._knowledge.calibration
        if ranks == 1 or kind == "linear":
            return None
        if kind == "round_robin":
            return placement.round_robin(geometry, ranks)
        groups = [rows]
        if kind == "clusters" and "partition" in spec.takes:
            groups = self._clusters(spec, fleets)
        reads = [
            -np.expm1(batch * np.log1p(-np.minimum(chances(replay, g).mean(axis=0), 1 - 1e-12)))
            for g in groups
        ]
        shape = (len(groups), geometry.layers, geometry.experts)
        return placement.spread(np.stack(reads).reshape(shape), ranks)

    def _clusters(self, spec: Spec, fleets: Sequence[Sequence[str]]) -> list[Index]:
        """Calibration requests nearest to each worker's centroid, all of them where none is."""
        rows, recorded = self._knowledge.calibration, self._knowledge.recorded(spec.signature)
        found: dict[str, Index] = {}
        for fleet in fleets:
            fitted = self._partition(tuple(fleet), spec)
            points = normalise(recorded.counts, fitted.weights)
            home = (points @ fitted.centroids.reshape(fitted.workers, -1).T).argmax(axis=1)
            for i, name in enumerate(fitted.names):
                mine = rows[home == i]
                found[name] = mine if len(mine) else rows
        return [found[f"w{j}"] for j in range(len(found))]

    def _partition(self, workers: tuple[str, ...], spec: Spec) -> Partition:
        key = (workers, spec.signature, spec.idf, spec.balanced)
        if key not in self._partitions:
            recorded = self._knowledge.recorded(spec.signature)
            self._partitions[key] = (
                variants.balanced_partition(recorded, workers, self._seed, spec.idf)
                if spec.balanced
                else variants.plain_partition(recorded, workers, self._seed)
            )
        return self._partitions[key]
