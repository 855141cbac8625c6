"""assign: one worker per request, in request order, on loads that earlier requests changed.

Among the workers with load < CLOSED, for r = 0, 1, ...:

    LeastLoad      least load; ties: lowest index
    LocalityBand   among {w : s[w] >= max(s) - tau} the least load;
                   ties: highest score, then lowest index
    MarginalCost   least tau[w] + dtau[w] + hedge * n[w] * dtau[w]; ties: lowest index, with
                       dtau[w] = expert * max(s[w], 0) + kv * request_kv[r] + request
                       tau[w]  = expert * distinct[w] + kv * KV[w] + request * n[w]        n = load

then load[chosen] += cost[r], and with MarginalCost distinct[chosen] += max(s, 0) and
KV[chosen] += request_kv[r]. The fixed part of a step's time is the same for all workers and left
out. A NaN score is the worst one (no added experts with MarginalCost). Float operations are
rounded one by one, so that all backends choose alike.
"""

from __future__ import annotations

import math
from dataclasses import astuple, dataclass
from typing import ClassVar

import torch
from torch import Tensor

from eldr.kernels import checks
from eldr.kernels.library import declare

CLOSED = checks.INT32_MAX
"""Load of a worker that must not be chosen (draining, down)."""


@dataclass(frozen=True, slots=True)
class LeastLoad:
    """The least loaded worker; scores are ignored."""

    code: ClassVar[int] = 1


@dataclass(frozen=True, slots=True)
class LocalityBand:
    """The least loaded worker whose score is within `tau` of the best.

    Raises:
        ValueError: tau is not a finite number >= 0.
    """

    tau: float
    code: ClassVar[int] = 2

    def __post_init__(self) -> None:
        _non_negative(self)


@dataclass(frozen=True, slots=True)
class MarginalCost:
    """The worker whose step time grows least; scores are expected added experts.

    Attributes:
        expert: seconds per distinct expert read in a step.
        kv: seconds per KV token in a step.
        request: seconds per running request in a step.
        hedge: weight of the slow-down that the running requests suffer.

    Raises:
        ValueError: a coefficient is not a finite number >= 0.
    """

    expert: float
    kv: float
    request: float
    hedge: float
    code: ClassVar[int] = 3

    def __post_init__(self) -> None:
        _non_negative(self)


Rule = LeastLoad | LocalityBand | MarginalCost


def assign_ref(
    scores: Tensor,
    rule: int,
    coefficients: list[float],
    cost: Tensor,
    request_kv: Tensor | None,
    load: Tensor,
    state: Tensor | None,
    chosen: Tensor,
) -> None:
    """The rules in plain torch, into `chosen`, `load` and `state`; arguments as the op's."""
    kv = torch.zeros_like(cost, dtype=torch.float32) if request_kv is None else request_kv
    for r in range(scores.shape[0]):
        eligible = load != CLOSED
        if rule == MarginalCost.code:
            assert state is not None, "MarginalCost has a state"
            added = scores[r].nan_to_num(nan=0.0, posinf=math.inf).clamp(min=0.0)
            key = _cost_ref(added, kv[r], load, state, coefficients)
            best = _first_least(key, eligible)
        else:
            s = scores[r].nan_to_num(nan=-math.inf, posinf=math.inf, neginf=-math.inf)
            if rule == LocalityBand.code:
                top = s.masked_fill(~eligible, -math.inf).max()
                eligible &= s >= top - torch.tensor(coefficients[0], dtype=torch.float32)
                eligible &= load == load.masked_fill(~eligible, CLOSED).min()
                key = -s
            else:
                key = load
            best = _first_least(key, eligible)
        chosen[r] = best
        if best >= 0:
            load[best] = min(int(load[best]) + max(int(cost[r]), 0), CLOSED - 1)
            if rule == MarginalCost.code:
                assert state is not None, "MarginalCost has a state"
                state[0, best] += added[best]
                state[1, best] += kv[r]


def _cost_ref(
    added: Tensor, kv: Tensor, load: Tensor, state: Tensor, coefficients: list[float]
) -> Tensor:
    c = torch.tensor(coefficients, dtype=torch.float32, device=load.device)
    n = load.to(torch.float32)
    more = (c[0] * added + c[1] * kv) + c[2]
    now = (c[0] * state[0] + c[1] * state[1]) + c[2] * n
    return (now + more) + (c[3] * n) * more


def _first_least(key: Tensor, eligible: Tensor) -> int:
    if not bool(eligible.any()):
        return -1
    least = key[eligible].min()
    return int((eligible & (key == least)).nonzero()[0])


_op = declare(
    "assign(Tensor scores, int rule, float[] coefficients, Tensor cost, Tensor? request_kv, "
    "Tensor(a!) load, Tensor(b!)? state, Tensor(c!) chosen) -> ()",
    assign_ref,
)


def assign(
    scores: Tensor,
    rule: Rule,
    load: Tensor,
    cost: Tensor,
    *,
    state: Tensor | None = None,
    request_kv: Tensor | None = None,
    chosen: Tensor | None = None,
) -> Tensor:
    """Assigns R requests to W workers and updates the workers' loads in place.

    Args:
        scores: float32 [R, W], from `score`.
        rule: `LeastLoad`, `LocalityBand` or `MarginalCost`.
        load: int32 [W], updated; `CLOSED` = never choose. MarginalCost: running requests.
        cost: int32 [R] >= 0, what each request adds to the load.
        state: float32 [2, W], distinct experts and KV tokens per worker, updated; with
            MarginalCost only.
        request_kv: float32 [R], KV tokens of each request; MarginalCost only.
        chosen: int32 [R] to write into; allocated when None.

    Returns:
        chosen, int32 [R]; -1 where every worker is closed.

    Raises:
        TypeError, ValueError: an argument of another type, dtype, shape, device or layout; state
            or request_kv missing with MarginalCost or given with another rule; on a CPU also
            a negative load or cost.
    """
    checks.tensor("scores", scores, torch.float32, ("R", "W"))
    requests, workers = scores.shape
    if workers == 0:
        raise ValueError("scores: no worker, expected [R, W] with W >= 1")
    checks.contiguous(scores=scores)
    device = scores.device
    chosen = check_assignment(
        rule, load, cost, state, request_kv, chosen, requests, workers, device
    )
    if requests:
        _op(scores, rule.code, coefficients(rule), cost, request_kv, load, state, chosen)
    return chosen


def coefficients(rule: Rule) -> list[float]:
    """The rule's numbers in the order that the ops take them."""
    return [float(value) for value in astuple(rule)]


def check_assignment(
    rule: Rule,
    load: object,
    cost: object,
    state: Tensor | None,
    request_kv: Tensor | None,
    chosen: Tensor | None,
    requests: int,
    workers: int,
    device: torch.device,
) -> Tensor:
    """Checks what `assign` and `decide` share; returns `chosen`, allocated when None."""
    if not isinstance(rule, LeastLoad | LocalityBand | MarginalCost):
        raise TypeError(
            f"rule: expected LeastLoad, LocalityBand or MarginalCost, got {type(rule).__name__}"
        )
    load = checks.tensor("load", load, torch.int32, (workers,))
    cost = checks.tensor("cost", cost, torch.int32, (requests,))
    checks.within("load", load, 0, CLOSED, "loads")
    checks.within("cost", cost, 0, CLOSED, "costs")
    for name, value, shape in (
        ("state", state, (2, workers)),
        ("request_kv", request_kv, (requests,)),
    ):
        if isinstance(rule, MarginalCost) != (value is not None):
            raise ValueError(f"{name}: needed with MarginalCost and meaningless otherwise")
        if value is not None:
            checks.tensor(name, value, torch.float32, shape)
    if chosen is None:
        chosen = torch.empty(requests, dtype=torch.int32, device=device)
    checks.tensor("chosen", chosen, torch.int32, (requests,))
    operands = {"load": load, "cost": cost, "state": state, "request_kv": request_kv}
    checks.contiguous(chosen=chosen, **operands)
    checks.same_device("scores", device, chosen=chosen, **operands)
    return chosen


def _non_negative(rule: LocalityBand | MarginalCost) -> None:
    for name in rule.__dataclass_fields__:
        value = getattr(rule, name)
        if not isinstance(value, int | float) or not 0.0 <= value < math.inf:
            raise ValueError(f"{name}: {value!r} is not a finite number >= 0")
