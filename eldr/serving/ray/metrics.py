"""ELDR's metrics in Ray's own registry: on every node's metrics page and in the dashboard.

Ray exports `eldr_serve_decisions` as `ray_eldr_serve_decisions_total` and so on, and Serve adds the
labels application, deployment and replica.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from eldr.serving.decisions import Record

_SECONDS = [1e-5, 2e-5, 5e-5, 1e-4, 2e-4, 5e-4, 1e-3, 2e-3, 5e-3, 1e-2]
_EXPERTS = [1.0, 2.0, 5.0, 10.0, 20.0, 50.0, 100.0, 200.0, 500.0, 1000.0, 2000.0, 5000.0]


class ProxyMetrics:
    """What a proxy replica decides and repeats."""

    def __init__(self) -> None:
        from ray.serve import metrics

        self._decisions = metrics.Counter(
            "eldr_serve_decisions",
            "decode decisions by policy and branch",
            tag_keys=("policy", "branch"),
        )
        self._fallback = metrics.Counter(
            "eldr_serve_fallback", "decisions made on load alone, by reason", tag_keys=("reason",)
        )
        self._seconds = metrics.Histogram(
            "eldr_serve_decision_seconds", "time of a decision", boundaries=_SECONDS
        )
        self._added = metrics.Histogram(
            "eldr_serve_predicted_added_experts",
            "expected distinct experts, over all layers, that a request adds to a step",
            boundaries=_EXPERTS,
        )
        self._retries = metrics.Counter(
            "eldr_serve_retries", "repeated tries by leg", tag_keys=("leg",)
        )
        self._requests = metrics.Counter(
            "eldr_serve_requests", "requests by outcome", tag_keys=("outcome",)
        )

    def decided(self, record: Record) -> None:
        """Counts a decision."""
        decision = record.decision
        self._decisions.inc(tags={"policy": decision.policy, "branch": decision.branch})
        if decision.reason is not None:
            self._fallback.inc(tags={"reason": str(decision.reason)})
        self._seconds.observe(record.decision_us / 1e6)
        if decision.choice.added_experts is not None:
            self._added.observe(max(decision.choice.added_experts, 0.0))

    def retried(self, leg: str) -> None:
        """Counts a repeated try."""
        self._retries.inc(tags={"leg": leg})

    def ended(self, outcome: str) -> None:
        """Counts a request."""
        self._requests.inc(tags={"outcome": outcome})


class DecodeMetrics:
    """What a decode replica's steps really read."""

    def __init__(self) -> None:
        from ray.serve import metrics

        self._sums = {
            "steps": metrics.Counter("eldr_serve_decode_steps", "decode steps"),
            "tokens": metrics.Counter("eldr_serve_decode_tokens", "sum of their batch sizes"),
            "seconds": metrics.Counter("eldr_serve_decode_seconds", "sum of their times"),
            "distinct": metrics.Counter(
                "eldr_serve_decode_distinct_experts",
                "sum over steps and layers of the distinct experts read",
            ),
        }

    def add(self, sample: Mapping[str, Any]) -> None:
        """Counts an interval; counters do not take zero."""
        for name, counter in self._sums.items():
            if sample[name] > 0:
                counter.inc(float(sample[name]))
