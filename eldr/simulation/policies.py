"""Policies of a study, written as text: `name` or `name:option=value,option=value`."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from eldr.routing.cost import StepCost
from eldr.routing.fit import fit_partition
from eldr.routing.policies import POLICIES, Policy, make_policy
from eldr.routing.policies.affinity import domain_pools
from eldr.routing.recorded import Recorded
from eldr.simulation.traffic import Index
from eldr.workload.traces import ExpertTrace


def parse(text: str) -> tuple[str, dict[str, Any]]:
    """Splits a policy's text into its name and options; values are numbers, words or booleans.

    Raises:
        ValueError: unknown policy or option, or malformed text.
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
    known = set(inspect.signature(POLICIES[name]).parameters) - {"partition", "pools", "cost"}
    if unknown := sorted(set(options) - known):
        raise ValueError(f"policy {name}: unknown option {unknown[0]!r}; it takes {sorted(known)}")
    return name, options


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
        calibration: its requests that are not served.
        cost: step cost given to policies that take one.
    """

    trace: ExpertTrace
    calibration: Index
    cost: StepCost | None = None

    @cached_property
    def recorded(self) -> Recorded:
        """The calibration requests as `eldr record` would have written them."""
        trace, rows = self.trace, self.calibration
        tokens = (trace.cuts - trace.offsets[:-1])[rows].astype(np.int32)
        labels = np.array([trace.domains[d] for d in trace.domain[rows]])
        return Recorded(
            counts=trace.prompt_counts[rows],
            tokens=tokens,
            coverage=np.ones(len(rows), np.float32),
            geometry=trace.geometry,
            model=trace.model,
            labels=labels,
        )

    def shares(self) -> dict[str, float]:
        """Share of every domain among the calibration requests."""
        domains = self.trace.domain[self.calibration]
        count = np.bincount(domains, minlength=len(self.trace.domains))
        return {d: float(c) for d, c in zip(self.trace.domains, count, strict=True) if c}


class Builder:
    """Makes policies for a fleet; a partition is fitted once per set of workers and seed."""

    def __init__(self, knowledge: Knowledge, seed: int = 0) -> None:
        self._knowledge, self._seed = knowledge, seed
        self._partitions: dict[tuple[str, ...], Any] = {}

    def factory(self, text: str) -> Callable[[Sequence[str]], Policy]:
        """What a run calls with the names of a router's workers."""
        name, options = parse(text)
        takes = inspect.signature(POLICIES[name]).parameters

        def make(workers: Sequence[str]) -> Policy:
            given = dict(options)
            if "partition" in takes:
                given["partition"] = self._partition(tuple(workers))
            if "pools" in takes:
                given["pools"] = domain_pools(self._knowledge.shares(), list(workers))
            if "cost" in takes and self._knowledge.cost is not None:
                given["cost"] = self._knowledge.cost
            return make_policy(name, **given)

        return make

    def _partition(self, workers: tuple[str, ...]) -> Any:
        if workers not in self._partitions:
            self._partitions[workers] = fit_partition(
                self._knowledge.recorded, list(workers), seed=self._seed
            )
        return self._partitions[workers]
