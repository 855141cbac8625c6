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
from typing import TYPE_CHECKING, ClassVar

import torch
from torch import Tensor

from eldr.kernels import checks
from eldr.kernels.arrays import takes_arrays
from eldr.kernels.device_kernel import device_kernel, power_of_two
from eldr.kernels.library import declare

if TYPE_CHECKING:
    import triton.language as tl

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
    return ((now + more) + (c[3] * n) * more).nan_to_num(nan=math.inf, posinf=math.inf)


def _first_least(key: Tensor, eligible: Tensor) -> int:
    if not bool(eligible.any()):
        return -1
    least = key[eligible].min()
    return int((eligible & (key == least)).nonzero()[0])


@device_kernel("requests")
def assign_kernel(  # type: ignore[no-untyped-def]
    scores_ptr, cost_ptr, kv_ptr, load_ptr, state_ptr, chosen_ptr, requests, workers,
    tau, c_expert, c_kv, c_request, hedge, WORKERS: tl.constexpr, RULE: tl.constexpr,
) -> None:  # fmt: skip
    """chosen[r] = best worker by RULE on the loads after request r - 1; see the module.

    Grid (1,): requests are sequential by definition. Loads and state stay in registers across the
    loop; the program writes chosen[:], and load[:] and state[:] at the end.
    """
    closed: tl.constexpr = 0x7FFFFFFF
    w = tl.arange(0, WORKERS)
    real = w < workers
    load = tl.load(load_ptr + w, mask=real, other=closed)
    if RULE == 3:
        distinct = tl.load(state_ptr + w, mask=real, other=0.0)
        kv = tl.load(state_ptr + workers + w, mask=real, other=0.0)
    for r in range(requests):
        s = tl.load(scores_ptr + r * workers + w, mask=real, other=0.0)
        eligible = load != closed
        if RULE == 3:
            added = tl.where(s > 0.0, s, 0.0)  # NaN adds nothing
            request_kv = tl.load(kv_ptr + r)
            n = load.to(tl.float32)
            more = (c_expert * added + c_kv * request_kv) + c_request
            now = (c_expert * distinct + c_kv * kv) + c_request * n
            key = (now + more) + (hedge * n) * more
            key = tl.where(eligible & (key == key), key, float("inf"))
            eligible = eligible & (key == tl.min(key, 0))
        elif RULE == 2:
            s = tl.where(eligible & (s == s), s, float("-inf"))
            eligible = eligible & (s >= tl.max(s, 0) - tau)
            eligible = eligible & (load == tl.min(tl.where(eligible, load, closed), 0))
            best = tl.max(tl.where(eligible, s, float("-inf")), 0)
            eligible = eligible & (s == best)
        else:
            eligible = eligible & (load == tl.min(load, 0))
        pick = tl.min(tl.where(eligible, w, closed), 0)
        tl.store(chosen_ptr + r, tl.where(pick == closed, -1, pick))
        cost = tl.maximum(tl.load(cost_ptr + r), 0)
        # min before the sum, so that the sum cannot wrap
        load = tl.where(w == pick, load + tl.minimum(cost, closed - 1 - load), load)
        if RULE == 3:
            distinct = tl.where(w == pick, distinct + added, distinct)
            kv = tl.where(w == pick, kv + request_kv, kv)
    tl.store(load_ptr + w, load, mask=real)
    if RULE == 3:
        tl.store(state_ptr + w, distinct, mask=real)
        tl.store(state_ptr + workers + w, kv, mask=real)


def assign_triton(
    scores: Tensor,
    rule: int,
    coefficients: list[float],
    cost: Tensor,
    request_kv: Tensor | None,
    load: Tensor,
    state: Tensor | None,
    chosen: Tensor,
) -> None:
    """Launches `assign_kernel`; arguments as the op's, already checked."""
    requests, workers = scores.shape
    tau = coefficients[0] if rule == LocalityBand.code else 0.0
    costs = coefficients if rule == MarginalCost.code else [0.0, 0.0, 0.0, 0.0]
    # 128 lanes and more let one warp reduce with its hardware instruction.
    width = power_of_two(workers, least=128)
    assign_kernel[(1,)](
        scores, cost, scores if request_kv is None else request_kv, load,
        scores if state is None else state, chosen, requests, workers, tau, *costs,
        WORKERS=width, RULE=rule, num_warps=1 if width <= 256 else 4, enable_fp_fusion=False,
    )  # fmt: skip


_op = declare(
    "assign(Tensor scores, int rule, float[] coefficients, Tensor cost, Tensor? request_kv, "
    "Tensor(a!) load, Tensor(b!)? state, Tensor(c!) chosen) -> ()",
    assign_ref,
)


@takes_arrays
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
        checks.non_negative(name, getattr(rule, name))
