"""Is expert-locality routing worth deploying? An estimate from recorded signatures.

Recorded requests are split in two. One half fits the partition; the other half is served by real
fleets in steady state, each policy seeing the same requests in the same order. What a step reads is
then computed from the requests' own use: their decode counts where the file has them, else the
*second* half of evidence is missing and the prompt's counts stand in, which flatters every policy
that reads them; the report says which.

Controls, because a high correlation of prefill and decode proves nothing by itself:
* `other_request`: marginal_cost that is shown the signature of a random other request;
* `popularity`: marginal_cost that is shown the mean of all requests.
Both know everything but which request is which; a gain beyond theirs is real.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from eldr.routing.cost import StepCost
from eldr.routing.expert_load import ExpertLoad
from eldr.routing.fit import fit_partition
from eldr.routing.fixed import COST, P_ONE
from eldr.routing.fleet import Fleet
from eldr.routing.policies import make_policy
from eldr.routing.recorded import Recorded
from eldr.routing.request import RouteRequest
from eldr.routing.worker import Worker
from eldr.signature import Signature

SERVED = ("least_requests", "locality_band", "marginal_cost", "other_request", "popularity")
_ENOUGH = 50  # requests per half below which no verdict is given


@dataclass(frozen=True, slots=True)
class Plan:
    """The fleet to assess.

    Attributes:
        workers: decode workers, >= 2.
        batch: mean running requests per worker, >= 1.
        cost: step cost in cells of the recorded geometry.
        worthwhile: smallest reduction of TPOT (share) that is worth a deployment.
        rounds: independent repetitions (other halves, other orders), >= 2.
        requests: placed per round after warm-up.
        seed: of the repetitions.
    """

    workers: int
    batch: int
    cost: StepCost
    worthwhile: float = 0.02
    rounds: int = 5
    requests: int = 600
    seed: int = 0

    def __post_init__(self) -> None:
        if self.workers < 2 or self.batch < 1 or self.rounds < 2 or self.requests < 1:
            raise ValueError(
                "assess: needs workers >= 2, batch >= 1, rounds >= 2 and requests >= 1, got "
                f"{self.workers}, {self.batch}, {self.rounds} and {self.requests}"
            )


def assess(recorded: Recorded, plan: Plan) -> dict[str, Any]:
    """The report, as JSON values.

    Raises:
        ValueError: fewer than 2 requests per worker and half.
    """
    if len(recorded) < 4 * plan.workers:
        raise ValueError(
            f"assess: {len(recorded)} signatures for {plan.workers} workers; record at least "
            f"{max(4 * plan.workers, 2 * _ENOUGH)}"
        )
    rounds = [_round(recorded, plan, plan.seed + i) for i in range(plan.rounds)]
    policies = {name: _summary([r[name] for r in rounds], rounds) for name in SERVED}
    verdict, why = _verdict(policies, len(recorded), plan)
    return {
        "verdict": verdict,
        "why": why,
        "truth": "decode counts" if recorded.decode is not None else "prompt counts (flattering)",
        "signatures": len(recorded),
        "geometry": str(recorded.geometry),
        "plan": {**asdict(plan), "cost": asdict(plan.cost)},
        "policies": policies,
    }


def _round(recorded: Recorded, plan: Plan, seed: int) -> dict[str, tuple[float, float]]:
    """Per policy: mean distinct experts per layer, and mean step seconds over requests."""
    rng = np.random.default_rng(seed)
    order = rng.permutation(len(recorded))
    fit, serve = order[: len(order) // 2], order[len(order) // 2 :]
    names = [f"w{i}" for i in range(plan.workers)]
    partition = fit_partition(_select(recorded, fit), names, restarts=1, seed=seed)
    truth = _truth(recorded, serve)
    signatures = _signatures(recorded, serve)
    stream = rng.integers(len(serve), size=plan.workers * plan.batch + plan.requests)
    ends = rng.permutation(len(stream))  # who leaves when the fleet is full
    shuffled = rng.permutation(len(serve))
    mean = Signature(
        np.rint(64 * recorded.counts[fit].mean(axis=0)).astype(np.uint32),
        max(1, int(64 * recorded.tokens[fit].mean())),
    )
    shown: dict[str, tuple[str, dict[str, Any], Sequence[Signature]]] = {
        "least_requests": ("least_requests", {}, signatures),
        "locality_band": ("locality_band", {"partition": partition}, signatures),
        "marginal_cost": ("marginal_cost", {"cost": plan.cost}, signatures),
        "other_request": (
            "marginal_cost", {"cost": plan.cost}, [signatures[j] for j in shuffled]
        ),
        "popularity": ("marginal_cost", {"cost": plan.cost}, [mean] * len(serve)),
    }  # fmt: skip
    return {
        name: _serve(recorded, plan, (policy, options), seen, truth, stream, ends)
        for name, (policy, options, seen) in shown.items()
    }


def _serve(
    recorded: Recorded,
    plan: Plan,
    policy: tuple[str, dict[str, Any]],
    signatures: Sequence[Signature],
    truth: npt.NDArray[np.uint16],
    stream: npt.NDArray[np.int64],
    ends: npt.NDArray[np.int64],
) -> tuple[float, float]:
    geometry, names = recorded.geometry, [f"w{i}" for i in range(plan.workers)]
    slot = {name: i for i, name in enumerate(names)}
    fleet = Fleet(
        make_policy(policy[0], **policy[1]),
        [Worker(name) for name in names],
        geometry=geometry,
        min_coverage=0.0,
    )
    real = ExpertLoad(geometry.cells)
    real.resize(plan.workers)
    count = np.zeros(plan.workers)
    running: list[tuple[str, int, int]] = []
    full, seen = plan.workers * plan.batch, []
    for i, row in enumerate(stream.tolist()):
        if len(running) == full:
            name, home, gone = running.pop(int(ends[i]) % full)
            fleet.release(name)
            real.remove(home, truth[gone])
            count[home] -= 1
        home = slot[fleet.reserve(RouteRequest(str(i), signatures[row])).worker.name]
        running.append((str(i), home, row))
        real.add(home, truth[row])
        count[home] += 1
        if i >= full and i % 4 == 0:
            distinct = real.distinct()
            step = plan.cost.base + plan.cost.expert * distinct + plan.cost.request * count
            share = count / count.sum()
            seen.append((float(share @ distinct) / geometry.layers, float(share @ step)))
    means = np.mean(seen, axis=0)
    return float(means[0]), float(means[1])


def _truth(recorded: Recorded, rows: npt.NDArray[np.int64]) -> npt.NDArray[np.uint16]:
    """What each request really adds to expert load: costs uint16 [rows, L*E]."""
    geometry = recorded.geometry
    counts = recorded.counts if recorded.decode is None else recorded.decode
    flat = counts[rows].reshape(len(rows), -1).astype(np.float64)
    tokens = flat.sum(axis=1, keepdims=True) / (geometry.top_k * geometry.layers)
    use = flat / np.maximum(tokens, 1.0)
    activation = np.minimum(np.rint(use * P_ONE), P_ONE - 1).astype(np.int16)
    return np.asarray(COST[activation], np.uint16)


def _signatures(recorded: Recorded, rows: npt.NDArray[np.int64]) -> list[Signature]:
    return [
        Signature(
            recorded.counts[r].astype(np.uint32),
            int(recorded.tokens[r]),
            float(recorded.coverage[r]),
        )
        for r in rows
    ]


def _select(recorded: Recorded, rows: npt.NDArray[np.int64]) -> Recorded:
    return Recorded(
        recorded.counts[rows],
        recorded.tokens[rows],
        recorded.coverage[rows],
        recorded.geometry,
        recorded.model,
        None if recorded.labels is None else recorded.labels[rows],
        None if recorded.decode is None else recorded.decode[rows],
    )


def _summary(
    mine: list[tuple[float, float]], rounds: list[dict[str, tuple[float, float]]]
) -> dict[str, Any]:
    base = [r["least_requests"] for r in rounds]
    gains = np.array([1.0 - m[1] / b[1] for m, b in zip(mine, base, strict=True)])
    # Student's t at 95 % for few rounds, by its usual approximation.
    width = 1.96 * (1 + 2 / len(gains)) * float(gains.std(ddof=1)) / np.sqrt(len(gains))
    return {
        "distinct_per_layer": float(np.mean([m[0] for m in mine])),
        "step_ms": 1e3 * float(np.mean([m[1] for m in mine])),
        "tpot_reduction": float(gains.mean()),
        "interval": [float(gains.mean() - width), float(gains.mean() + width)],
    }


def _verdict(policies: dict[str, Any], signatures: int, plan: Plan) -> tuple[str, str]:
    best = max(("locality_band", "marginal_cost"), key=lambda p: policies[p]["tpot_reduction"])
    low, high = policies[best]["interval"]
    control = max(policies[c]["tpot_reduction"] for c in ("other_request", "popularity"))
    if signatures < 2 * _ENOUGH:
        return "needs more data", f"{signatures} signatures; record {2 * _ENOUGH} or more"
    if high < plan.worthwhile:
        return "not worth it", f"{best} would save at most {high:.1%} of TPOT"
    if low < plan.worthwhile or low <= control:
        return "needs more data", (
            f"{best} would save {low:.1%} to {high:.1%}, controls {control:.1%}; "
            f"a deployment should save {plan.worthwhile:.1%} and beat the controls"
        )
    return "deploy", f"{best} would save {low:.1%} to {high:.1%} of TPOT, controls {control:.1%}"
