"""What a policy sees and answers: context in, choice out, and the decision that records it.

Nobody changes them once they are made. They are not frozen, since a frozen dataclass takes four
times as long to make, and every request makes all of them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from eldr.routing.fixed import I16
from eldr.routing.request import Reason, RouteRequest
from eldr.routing.worker import Worker, WorkerTable

Slots = npt.NDArray[np.intp]
Scores = npt.NDArray[np.float64]


@dataclass(slots=True, eq=False)
class Context:
    """Everything a choice may depend on; policies do not change it.

    Attributes:
        request: the request.
        table: the fleet's per-slot state.
        candidates: slots that may be chosen, intp [C], ascending, C >= 1.
        activation: the request's fixed-point activation int16 [L*E]; None without a usable
            signature, then `reason` says why.
        reason: why the signature cannot be used, or None.
        draw: 64 pseudo-random bits of this decision.
    """

    request: RouteRequest
    table: WorkerTable
    candidates: Slots
    activation: I16 | None
    reason: Reason | None
    draw: int


@dataclass(slots=True, eq=False)
class Choice:
    """A policy's answer and its explanation.

    Attributes:
        slot: the chosen worker's slot.
        branch: which rule inside the policy decided.
        reason: set when the policy fell back to load alone.
        scores: one value per candidate, or None; similarity (higher is better) or cost in seconds
            (lower is better), as `branch` says.
        band: slots inside the locality band, or None.
        added_experts: expected distinct experts, over all layers, that the request adds.
    """

    slot: int
    branch: str
    reason: Reason | None = None
    scores: Scores | None = None
    band: Slots | None = None
    added_experts: float | None = None


@dataclass(slots=True, eq=False)
class Decision:
    """A committed choice: the reservation of one request on one worker.

    Attributes:
        request_id: the request's.
        worker: the one chosen.
        policy: name of the policy.
        choice: what the policy answered.
        candidates: slots that could have been chosen, [C].
        names: of all slots.
        load: int64 [C], requests that ran on each candidate before this one.
    """

    request_id: str
    worker: Worker
    policy: str
    choice: Choice
    candidates: Slots
    names: tuple[str, ...]
    load: npt.NDArray[np.int64]

    @property
    def reason(self) -> Reason | None:
        """Why the decision was made on load alone, or None."""
        return self.choice.reason

    @property
    def branch(self) -> str:
        """Which rule inside the policy decided."""
        return self.choice.branch

    def explain(self) -> dict[str, Any]:
        """The decision as plain JSON values; workers by name."""
        choice = self.choice
        names = [self.names[slot] for slot in self.candidates]
        scores, band = choice.scores, choice.band
        return {
            "request": self.request_id,
            "worker": self.worker.name,
            "policy": self.policy,
            "branch": choice.branch,
            "reason": None if choice.reason is None else str(choice.reason),
            "candidates": names,
            "load": dict(zip(names, self.load.tolist(), strict=True)),
            "scores": None
            if scores is None
            else dict(zip(names, [round(float(s), 9) for s in scores], strict=True)),
            "band": None if band is None else [self.names[slot] for slot in band],
            "added_experts": choice.added_experts,
        }
