"""`marginal_cost`: the worker on which a request, and all it shares steps with, lose least."""

from __future__ import annotations

from typing import ClassVar

import numpy as np

from eldr.routing.cost import StepCost
from eldr.routing.decision import Choice, Context
from eldr.routing.policies.base import Policy, least_requests
from eldr.routing.price import place, terms
from eldr.routing.step_fit import StepFit, StepSample, prior


class MarginalCost(Policy):
    """Minimises what a placement adds to the sum over running requests of (step time)^power.

    `eldr.routing.price` has the formula.

    power = 1 and hedge = 1 is the increase of the sum of step times. A higher power makes slow
    workers dearer and so protects the tail. Where experts are nearly all read, another request adds
    almost nothing, and the sum alone would pile requests onto one worker: only workers whose load
    is at most (1 + guard) * mean load + 1 are considered.

    A request delays the others for as long as it decodes: where its length is predicted, the hedge
    grows and falls with it, relative to the mean prediction (`eldr.routing.lengths`).

    The coefficients start from `cost`, or from `step_fit.prior`, and follow measured steps.

    Args:
        hedge: weight of the other requests, >= 0.
        power: integer in [1, 8].
        guard: tolerated excess over the mean load, >= 0.
        cost: step cost to start from.
    """

    name: ClassVar[str] = "marginal_cost"

    def __init__(
        self, hedge: float = 1.0, power: int = 3, guard: float = 0.25, cost: StepCost | None = None
    ) -> None:
        if not (np.isfinite(hedge) and hedge >= 0):
            raise ValueError(f"marginal_cost: hedge must be finite and >= 0, got {hedge}")
        if power not in range(1, 9):
            raise ValueError(f"marginal_cost: power must be an integer in [1, 8], got {power}")
        if not guard >= 0:
            raise ValueError(f"marginal_cost: guard must be >= 0, got {guard}")
        self.hedge, self.power, self.guard = float(hedge), int(power), float(guard)
        self.fit: StepFit | None = None if cost is None else StepFit(cost)

    def observe(self, sample: StepSample) -> None:
        """Moves the step cost towards measured steps, once a decision has set the scale."""
        if self.fit is not None:
            self.fit.add(sample)

    def choose(self, context: Context) -> Choice:
        """The candidate of least cost, the lowest slot on a tie."""
        table, experts = context.table, context.table.experts
        if context.activation is None or experts is None:
            return least_requests(context, context.reason)
        if self.fit is None:
            self.fit = StepFit(prior(experts.cells))
        request = context.request
        hedge = self.hedge * table.lengths.relative(request.new_tokens)
        t = terms(self.fit.cost, experts.cells, request.kv_tokens, hedge)
        slots = context.candidates
        total, at, added = place(t, self.power, self.guard, context.activation, table, slots)
        return Choice(int(slots[at]), "marginal", None, total, None, added)
