"""`marginal_cost`: the worker to whose step, and to whose other requests, this one costs least."""

from __future__ import annotations

from typing import ClassVar

import numpy as np

from eldr.routing.cost import StepCost
from eldr.routing.decision import Choice, Context
from eldr.routing.policies.base import Policy, least_requests

# Shares of a step's time where nothing was measured yet: EVIDENCE of published step-cost models has
# expert weights at about two thirds of a step at the batch sizes that matter.
_DEFAULT = StepCost(base=3e-3, expert=1.5e-4, kv=0.0, request=2e-5)


class MarginalCost(Policy):
    """Minimises step time now + what the request adds + `hedge` * n * what it adds to others.

    With D[w] the expected distinct experts of worker w and dD[w] what the request adds to them:

        step[w]  = base + expert * D[w] + kv * KV[w] + request * n[w]
        added[w] = expert * dD[w] + kv * kv_tokens + request
        cost[w]  = (step[w] + (1 + hedge * n[w]) * added[w]) / weight[w]
    """

    name: ClassVar[str] = "marginal_cost"

    def __init__(self, hedge: float = 1.0, cost: StepCost | None = None) -> None:
        if not (np.isfinite(hedge) and hedge >= 0):
            raise ValueError(f"marginal_cost: hedge must be finite and >= 0, got {hedge}")
        self.hedge = hedge
        self.cost = cost or _DEFAULT

    def choose(self, context: Context) -> Choice:
        """The candidate of least cost, the lowest slot on a tie."""
        table, experts = context.table, context.table.experts
        if context.activation is None or experts is None:
            return least_requests(context, context.reason)
        cost, slots = self.cost, context.candidates
        n, kv = table.requests, table.kv_tokens
        added = experts.added(context.activation)
        step = cost.base + cost.expert * experts.distinct() + cost.kv * kv + cost.request * n
        more = cost.expert * added + (cost.kv * context.request.kv_tokens + cost.request)
        total = ((step + (1.0 + self.hedge * n) * more) / table.weight)[slots]
        at = int(np.argmin(total))
        slot = int(slots[at])
        return Choice(slot, "marginal", None, total, None, float(added[slot]))
