"""What placing a request on each worker costs everyone: the formula of `marginal_cost`.

With D[w] the expected distinct experts of worker w, dD[w] what the request adds to them, and n the
running requests:

    step[w]  = (base + expert * D[w] + kv * KV[w] + request * n[w]) / weight[w]
    added[w] = (expert * dD[w] + request + kv * kv_tokens) / weight[w]
    cost[w]  = (1 + hedge * n[w]) * (step[w] + added[w])^power - hedge * n[w] * step[w]^power

The native loop, NumPy and torch run the same float64 operations in the same order, so that all of
them choose alike.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from eldr.routing import fixed
from eldr.routing.cost import StepCost
from eldr.routing.worker import WorkerTable

DOT_UNIT = 1.0 / (fixed.P_ONE * fixed.SURVIVAL_ONE)
IDLE_UNIT = 1.0 / fixed.SURVIVAL_ONE


def terms(cost: StepCost, cells: int, kv_tokens: float, hedge: float) -> tuple[float, ...]:
    """The 9 scalars of the formula."""
    return (
        cost.base, cost.expert, cost.kv, cost.request, float(cells),
        DOT_UNIT, IDLE_UNIT, float(kv_tokens), hedge,
    )  # fmt: skip


def increase(
    t: Any, power: int, dots: Any, idle: Any, requests: Any, others: Any, kv: Any, weight: Any
) -> Any:
    """cost[w] for arrays of any library; `t` holds `terms`, as scalars or as an array.

    Args:
        t: 9 values.
        power: integer >= 1.
        dots: [W], <activation, survival> in fixed point.
        idle: [W], sums of the survival rows.
        requests: [W], running requests of this router.
        others: [W], those of other routers.
        kv: [W], KV tokens.
        weight: [W], relative capacity.
    """
    count = requests * 1.0 + others
    distinct = t[4] - (idle * 1.0) * t[6]
    step = ((t[0] + t[1] * distinct) + t[2] * (kv * 1.0)) + t[3] * count
    more = (t[1] * ((dots * 1.0) * t[5]) + t[3]) + t[2] * t[7]
    before = step / weight
    after = before + more / weight
    low, high = before, after
    for _ in range(power - 1):  # repeated products round alike everywhere, pow does not
        low, high = low * before, high * after
    rest = count * t[8]
    return (rest + 1.0) * high - rest * low


def place(
    t: tuple[float, ...],
    power: int,
    guard: float,
    x: fixed.I16,
    table: WorkerTable,
    candidates: npt.NDArray[np.intp],
) -> tuple[npt.NDArray[np.float64], int, float]:
    """What a request costs on each candidate, and which of them is the best.

    Workers whose load exceeds (1 + guard) * mean load + 1 cost infinity. The table's expert load
    must be tracked.

    Args:
        t: `terms`.
        power: integer >= 1.
        guard: >= 0.
        x: the request's activation, int16 [L*E].
        table: the workers.
        candidates: slots, [C], C >= 1.

    Returns:
        cost[w] of the candidates, float64 [C]; the index of the least, the first on a tie; and
        dD[w] there.
    """
    assert table.experts is not None
    survival, idle, n, others = (
        table.experts.survival, table.experts.idle, table.requests, table.others,
    )  # fmt: skip
    if fixed.native is not None:
        out = np.empty(len(candidates))
        at, dot = fixed.native.place(
            x, survival, idle, n, others, table.kv_tokens, table.weight, candidates,
            t, power, guard, out,
        )  # fmt: skip
        return out, at, dot * DOT_UNIT
    dots = fixed.dots(x, survival[candidates])
    chosen = (a[candidates] for a in (idle, n, others, table.kv_tokens, table.weight))
    out = np.asarray(increase(t, power, dots, *chosen), np.float64)
    load = (n[candidates] + others[candidates]) / table.weight[candidates]
    limit = sum(load.tolist()) / len(load) * (1.0 + guard) + 1.0  # summed in order, as native does
    out[load > limit] = np.inf
    at = int(out.argmin())
    return out, at, int(dots[at]) * DOT_UNIT
