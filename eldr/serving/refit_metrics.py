"""Refits as Prometheus metrics."""

from __future__ import annotations

from collections.abc import Iterable

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from eldr.serving.refit import Refits


class RefitMetrics:
    """Counters and gauges of a router's refits, read when scraped."""

    def __init__(self, refits: Refits) -> None:
        self._refits = refits

    def collect(self) -> Iterable[Metric]:
        """Called by the registry."""
        refits = self._refits
        outcomes = CounterMetricFamily(
            "eldr_router_refits",
            "refits and remaps of the partition by outcome",
            labels=["outcome"],
        )
        for outcome, count in refits.outcomes.items():
            outcomes.add_metric([outcome], count)
        yield outcomes
        for name, text, value in (
            ("refit_window_rows", "signatures in the refit window", refits.rows),
            ("refit_window_bytes", "memory of the refit window", refits.bytes),
            ("partition_paused", "1: its estimated gain is negative, load decides", refits.paused),
        ):
            yield GaugeMetricFamily(f"eldr_router_{name}", text, value=value)
        drift = refits.drift
        if drift is not None:
            yield GaugeMetricFamily(
                "eldr_router_partition_drift",
                "similarity to the nearest centroid lost since the fit, at the last attempt; NaN "
                "if the partition does not say how similar its own traffic was",
                value=drift.fitted - drift.similarity,
            )
            yield GaugeMetricFamily(
                "eldr_router_partition_gain",
                "estimated change of step time against mixing all requests, at the last attempt",
                value=drift.gain,
            )
