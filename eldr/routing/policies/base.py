"""The interface of a policy, and the least-requests rule that every policy falls back to."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import ClassVar

import numpy as np
import numpy.typing as npt

from eldr.routing import fixed
from eldr.routing.decision import Choice, Context, Scores, Slots
from eldr.routing.request import Reason
from eldr.routing.step_fit import StepSample


class Policy(ABC):
    """Picks a slot for a request. `choose` is pure: the fleet commits what it answers."""

    name: ClassVar[str]

    @abstractmethod
    def choose(self, context: Context) -> Choice:
        """The choice for this context; its slot is one of the context's candidates."""

    def observe(self, sample: StepSample) -> None:
        """Learns from measured decode steps; most policies have nothing to learn."""
        return


def relative_load(context: Context, slots: Slots) -> npt.NDArray[np.float64]:
    """Running requests, other routers' included, per unit of weight of these slots, float64."""
    table = context.table
    load: npt.NDArray[np.float64] = (table.requests[slots] + table.others[slots]) / table.weight[
        slots
    ]
    return load


def least(context: Context, slots: Slots, load: npt.NDArray[np.float64]) -> int:
    """The slot of least load; the context's draw breaks ties."""
    ties = np.flatnonzero(load == load.min())
    return int(slots[ties[context.draw % len(ties)]])


def lightest_within(
    context: Context, slots: Slots, similarity: Scores, tau: float
) -> tuple[int, Slots]:
    """The least loaded of the slots within `tau` of the most similar, the first on a tie.

    Returns:
        The slot, and all that are as similar, in the order of `slots`.
    """
    if fixed.native is None:
        inside = slots[similarity >= similarity.max() - tau]
        return int(inside[relative_load(context, inside).argmin()]), inside
    table = context.table
    inside = np.empty(len(slots), np.intp)
    slot, count = fixed.native.band(
        similarity, tau, table.requests, table.others, table.weight, slots, inside
    )
    return slot, inside[:count]


def least_requests(context: Context, reason: Reason | None = None) -> Choice:
    """Joins the shortest queue, by running requests per weight."""
    load, slot = _least_loaded(context)
    branch = "least_requests" if reason is None else "fallback"
    return Choice(slot, branch, reason, scores=load)


def _least_loaded(context: Context) -> tuple[npt.NDArray[np.float64], int]:
    """Loads of the candidates, float64 [C], and the slot of the least."""
    slots, table = context.candidates, context.table
    if fixed.native is None:
        load = relative_load(context, slots)
        return load, least(context, slots, load)
    load = np.empty(len(slots))
    at = fixed.native.least(table.requests, table.others, table.weight, slots, context.draw, load)
    return load, int(slots[at])
