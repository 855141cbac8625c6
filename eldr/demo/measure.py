"""Turns the decode workers' counters, the client's timings and the router's log into figures."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from eldr.demo.load import Timing

Floats = npt.NDArray[np.float64]
Batches = Mapping[int, tuple[int, int]]  # batch size -> (steps, experts read over all layers)


@dataclass(frozen=True, slots=True)
class DecodeCounters:
    """Cumulative counters of one decode worker over its decode-only steps.

    Attributes:
        steps: decode steps run.
        tokens: sum of their batch sizes.
        seconds: sum of their times.
        distinct: sum over steps of the distinct experts read, per layer [L].
        use: steps in which an expert was read [L, E].
        by_batch: batch size -> (steps, experts read over all layers).
    """

    steps: int
    tokens: int
    seconds: float
    distinct: Floats
    use: Floats
    by_batch: Batches

    @classmethod
    def parse(cls, answer: Mapping[str, Any]) -> DecodeCounters:
        """From the JSON object of `GET /eldr/decode`."""
        return cls(
            int(answer["steps"]),
            int(answer["tokens"]),
            float(answer["seconds"]),
            np.asarray(answer["distinct"], np.float64),
            np.asarray(answer["use"], np.float64),
            {int(b): (int(n), int(reads)) for b, (n, reads) in answer["by_batch"].items()},
        )

    def since(self, before: DecodeCounters) -> DecodeCounters:
        """What was counted after `before`."""
        return DecodeCounters(
            self.steps - before.steps,
            self.tokens - before.tokens,
            self.seconds - before.seconds,
            self.distinct - before.distinct,
            self.use - before.use,
            {
                batch: (steps - early[0], reads - early[1])
                for batch, (steps, reads) in self.by_batch.items()
                if (early := before.by_batch.get(batch, (0, 0)))[0] < steps
            },
        )


@dataclass(frozen=True, slots=True)
class PolicyResult:
    """Everything measured during one policy's replay.

    `use_share` is [W, L, E]; `by_batch` sums the workers' (steps, experts read) per batch size.
    """

    policy: str
    distinct_per_step: float
    distinct_per_token: float
    batch_per_step: float
    step_ms: float
    tpot_ms: dict[str, float]
    decision_us: dict[str, float]
    max_over_mean_load: float
    wall_seconds: float
    use_share: Floats
    by_batch: Batches

    def summary(self) -> dict[str, Any]:
        """The policy's object in summary.json."""
        return {
            "distinct_per_step": round(self.distinct_per_step, 4),
            "tpot_ms": {k: round(v, 3) for k, v in self.tpot_ms.items()},
            "decision_us": {k: round(v, 2) for k, v in self.decision_us.items()},
            "max_over_mean_load": round(self.max_over_mean_load, 4),
            "distinct_per_token": round(self.distinct_per_token, 4),
            "batch_per_step": round(self.batch_per_step, 3),
            "step_ms": round(self.step_ms, 3),
            "wall_seconds": round(self.wall_seconds, 2),
        }


def policy_result(
    policy: str,
    workers: Sequence[DecodeCounters],
    timings: Sequence[Timing],
    decisions: Sequence[Mapping[str, Any]],
) -> PolicyResult:
    """Joins the three sources.

    `distinct_per_step` is the mean over all decode steps of all workers and over the layers;
    `distinct_per_token` divides the same reads by the tokens decoded, so that a policy gains
    nothing by running the same tokens in more, smaller steps.

    Raises:
        RuntimeError: no decode step was counted, or a request has no decision.
    """
    steps = sum(w.steps for w in workers)
    tokens = sum(w.tokens for w in workers)
    if steps == 0 or tokens == 0:
        raise RuntimeError(f"{policy}: the decode workers counted no decode step")
    reads = float(sum(w.distinct.mean() for w in workers))
    tpot = np.array([t.tpot for t in timings if t.tpot is not None]) * 1e3
    if tpot.size == 0:
        raise RuntimeError(f"{policy}: no request arrived in more than one chunk, TPOT unknown")
    times = np.array([d["decision_us"] for d in decisions], np.float64)
    return PolicyResult(
        policy=policy,
        distinct_per_step=reads / steps,
        distinct_per_token=reads / tokens,
        batch_per_step=tokens / steps,
        step_ms=sum(w.seconds for w in workers) / steps * 1e3,
        tpot_ms=_p50_p99(tpot),
        decision_us=_p50_p99(times),
        max_over_mean_load=load_skew(timings, decisions, len(workers)),
        wall_seconds=max(t.end for t in timings) - min(t.start for t in timings),
        use_share=np.stack([w.use / max(w.steps, 1) for w in workers]),
        by_batch=sum_by_batch(workers),
    )


def saving_at_equal_batch(policy: Batches, peer: Batches) -> float | None:
    """Percent fewer experts per step than `peer` over the batch sizes that both ran.

    A larger batch reads more experts whoever is in it, so the plain means also compare batch
    sizes. Here each batch size weighs as many steps as the rarer of the two runs has of it.
    None if the runs share no batch size.
    """
    ours = theirs = 0.0
    for batch in policy.keys() & peer.keys():
        (steps, reads), (peer_steps, peer_reads) = policy[batch], peer[batch]
        weight = min(steps, peer_steps)
        ours += weight * reads / steps
        theirs += weight * peer_reads / peer_steps
    return 100 * (1 - ours / theirs) if theirs else None


def sum_by_batch(workers: Sequence[DecodeCounters]) -> Batches:
    """Steps and experts read, over all workers, for each batch size."""
    total: dict[int, tuple[int, int]] = {}
    for worker in workers:
        for batch, (steps, reads) in worker.by_batch.items():
            before = total.get(batch, (0, 0))
            total[batch] = (before[0] + steps, before[1] + reads)
    return total


def load_skew(
    timings: Sequence[Timing], decisions: Sequence[Mapping[str, Any]], workers: int
) -> float:
    """Time-averaged requests in flight on the busiest worker over the mean worker's."""
    worker_of = {d["request_id"]: d["worker"] for d in decisions}
    missing = [t.request_id for t in timings if t.request_id not in worker_of]
    if missing:
        raise RuntimeError(
            f"the router logged no decision for {missing[0]} ({len(missing)} in all)"
        )
    busy: dict[str, float] = {}
    for timing in timings:
        worker = worker_of[timing.request_id]
        busy[worker] = busy.get(worker, 0.0) + timing.end - timing.start
    return max(busy.values()) / (sum(busy.values()) / workers)


def _p50_p99(values: Floats) -> dict[str, float]:
    p50, p99 = np.percentile(values, [50, 99])
    return {"p50": float(p50), "p99": float(p99)}
