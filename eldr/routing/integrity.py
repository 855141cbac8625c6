"""Recomputes a fleet's counters from its running requests."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from eldr.routing.expert_load import ExpertLoad
from eldr.routing.fixed import SURVIVAL, U16
from eldr.routing.worker import WorkerTable


@dataclass(slots=True, eq=False)
class Running:
    """One reservation: where it runs and what it added there, to expert load by `step`."""

    slot: int
    kv_tokens: int
    step: U16 | None


def check(table: WorkerTable, running: Iterable[Running], slots: dict[str, int]) -> None:
    """Compares the table with the sums over the running requests.

    Raises:
        AssertionError: a counter or a survival row differs; the message names it.
    """
    fresh = None if table.experts is None else ExpertLoad(table.experts.cells)
    requests, kv = np.zeros_like(table.requests), np.zeros_like(table.kv_tokens)
    if fresh is not None:
        fresh.resize(len(requests))
    for one in running:
        requests[one.slot] += 1
        kv[one.slot] += one.kv_tokens
        if one.step is not None and fresh is not None:
            fresh.add(one.slot, one.step)
    _same("requests", table.requests, requests)
    _same("kv_tokens", table.kv_tokens, kv)
    if fresh is not None and table.experts is not None:
        _check_experts(table.experts, fresh)
    members = {worker.name: slot for slot, worker in enumerate(table.workers) if worker}
    if members != slots:
        raise AssertionError(f"fleet: names {slots} but slots hold {members}")


def _check_experts(experts: ExpertLoad, fresh: ExpertLoad) -> None:
    survival = SURVIVAL[experts.load.clip(0, len(SURVIVAL) - 1)]
    _same("load", experts.load, fresh.load + experts.other)
    _same("survival", experts.survival, survival)
    _same("idle", experts.idle, survival.sum(axis=1, dtype=np.int64))


def _same(name: str, actual: npt.NDArray[Any], expected: npt.NDArray[Any]) -> None:
    if not np.array_equal(actual, expected):
        where = np.argwhere(actual != expected)[0].tolist()
        raise AssertionError(f"fleet: {name}{where} differs from the running requests' sum")
