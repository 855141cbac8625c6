"""The router's Prometheus metrics; label sets are closed, so their number is bounded."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import product
from typing import TYPE_CHECKING

from prometheus_client import CollectorRegistry, Counter, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from eldr import __version__
from eldr.routing.decision import Decision
from eldr.routing.request import Reason
from eldr.serving.condition import State
from eldr.serving.endpoints import Endpoint
from eldr.serving.histogram import Histogram, Tally
from eldr.serving.policy import BY_SIGNATURE
from eldr.serving.shadow import distinct_per_request

if TYPE_CHECKING:
    from eldr.serving.state import Router

_LATENCY = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300, 600)
_TPOT = (0.001, 0.0025, 0.005, 0.01, 0.02, 0.03, 0.05, 0.075, 0.1, 0.2, 0.5, 1, 5)
_DECISION = (1e-5, 2e-5, 5e-5, 1e-4, 2e-4, 5e-4, 1e-3, 2e-3, 5e-3, 1e-2)
_BAND = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 64, 128)
_EXPERTS = (0, 1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000)
ENDPOINTS = ("/v1/completions", "/v1/chat/completions")
OUTCOMES = ("ok", "client_error", "worker_error", "router_error", "cancelled", "broken_stream")
_ROLES = ("prefill", "decode")
_EVENTS = ("ejected", "down", "returned", "restarted", "joined", "left")
_WHOLE = (
    *("batch_of_prompts", "prompt_logprobs", "beam_search"),
    *("several_choices", "no_prefill_worker"),
)
# Workers beyond this many share one label value, whatever joins and leaves.
_MOST_WORKERS = 1000


class Metrics:
    """All metrics of one router process, in a registry of their own."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self.requests = self._tally(
            "requests",
            f"requests by endpoint and outcome ({', '.join(OUTCOMES)})",
            "endpoint",
            "outcome",
        )
        self.duration = self._histogram(
            "request_duration_seconds", "life of a request", _LATENCY, "endpoint"
        )
        self.ttft = self._histogram(
            "first_byte_seconds", "to the first byte of a streamed answer", _LATENCY
        )
        self.tpot = self._histogram(
            "time_per_output_event_seconds", "between a stream's first and last event", _TPOT
        )
        self.prefill = self._histogram("prefill_seconds", "the prefill leg", _LATENCY)
        self.decode_pending = self._histogram(
            "decode_pending_seconds", "from a decode leg's start to its answer's head", _LATENCY
        )
        self.leg_requests = {
            role: self._tally(f"{role}_requests", f"{role} legs sent to workers")
            for role in ("prefill", "decode")
        }
        self.pending_decode = 0
        self.decisions = self._tally(
            "decisions", "decode decisions by policy and branch", "policy", "branch"
        )
        self.locality_hits = self._tally(
            "locality_hits", "decisions that a signature decided, not load alone"
        )
        self.signature_missing = self._tally(
            "signature_missing", "decisions for which a policy wanted a signature and got none"
        )
        self.band_size = self._histogram(
            "band_size", "workers in the locality band of a decision", _BAND
        )
        self.fallback = self._counter(
            "fallback", "decisions made on load alone, by reason", "reason"
        )
        self.decision_time = self._histogram(
            "decision_seconds", "from the raw signature to the reserved worker", _DECISION
        )
        self.predicted = self._histogram(
            "predicted_added_experts",
            "expected distinct experts, over all layers, that a request adds to its worker's step",
            _EXPERTS,
        )
        self.prompt_tokens = self._tally(
            "prompt_tokens",
            "prompt tokens of prefill legs: cached by the prefill worker, or computed",
            "kind",
        )
        self.retries = self._counter(
            "retries", "repeated tries by leg, or refused ones (no_budget)", "leg", "outcome"
        )
        self.kv_releases = self._counter(
            "kv_releases", "KV freed for requests that reached no decode worker", "outcome"
        )
        self.kv_missing = self._counter(
            "kv_missing", "prefills that left no KV; the decode worker computes the prompt again"
        )
        self.worker_events = self._counter(
            "worker_events",
            f"workers {', '.join(_EVENTS)}",
            "role",
            "event",
        )
        self.whole = self._counter(
            "whole",
            "requests served whole on a decode worker, without prefill, by reason",
            "reason",
        )

        self._begin_at_zero()

    def _begin_at_zero(self) -> None:
        """Closed sets are there from the start: the first of its kind is an increase, too."""
        self.requests.counts |= dict.fromkeys(product(ENDPOINTS, OUTCOMES), 0)
        self.prompt_tokens.counts |= dict.fromkeys((("cached",), ("computed",)), 0)
        for counter, *labels in (
            (self.fallback, tuple(Reason)),
            (self.retries, _ROLES, ("retried", "no_budget")),
            (self.kv_releases, ("released", "failed", "dropped")),
            (self.worker_events, _ROLES, _EVENTS),
            (self.whole, _WHOLE),
        ):
            for values in product(*labels):
                counter.labels(*values)

    def _counter(self, name: str, text: str, *labels: str) -> Counter:
        return Counter(f"eldr_router_{name}", text, labels, registry=self.registry)

    def _tally(self, name: str, text: str, *labels: str) -> Tally:
        return Tally(f"eldr_router_{name}", text, labels, self.registry)

    def _histogram(
        self, name: str, text: str, buckets: tuple[float, ...], *labels: str
    ) -> Histogram:
        return Histogram(f"eldr_router_{name}", text, buckets, labels, self.registry)

    def request_ended(self, endpoint: str, outcome: str, seconds: float) -> None:
        """Counts a request."""
        self.requests.add(endpoint, outcome)
        self.duration.observe(seconds, endpoint)

    def decided(self, policy: str, branch: str, seconds: float) -> None:
        """Counts a decision."""
        self.decisions.add(policy, branch)
        self.decision_time.observe(seconds)

    def explained(self, decision: Decision) -> None:
        """Counts why a decision fell as it did."""
        reason, choice = decision.reason, decision.choice
        if reason is not None:
            self.fallback.labels(str(reason)).inc()
            if reason is Reason.NO_SIGNATURE:
                self.signature_missing.add()
        elif decision.policy in BY_SIGNATURE:
            self.locality_hits.add()
        if choice.added_experts is not None:
            self.predicted.observe(choice.added_experts)
        if choice.band is not None and decision.policy in BY_SIGNATURE:
            self.band_size.observe(len(choice.band))

    def count_worker_event(self, endpoint: Endpoint, event: str) -> None:
        """Counts what happened to a worker."""
        self.worker_events.labels(endpoint.role, event).inc()

    def watch(self, router: Router) -> None:
        """Adds gauges that are read from the router at each scrape."""
        self.registry.register(_Gauges(router))

    def render(self) -> bytes:
        """The text exposition."""
        return bytes(generate_latest(self.registry))


class _Gauges:
    """Values that exist elsewhere already: read when scraped, never stored twice."""

    def __init__(self, router: Router) -> None:
        self._router = router

    def collect(self) -> Iterable[Metric]:
        """Called by the registry."""
        router = self._router
        info = GaugeMetricFamily(
            "eldr_router_build_info",
            "1, labelled with version and policy",
            labels=["version", "policy"],
        )
        info.add_metric([__version__, router.decode.fleet.policy.name], 1)
        yield info
        yield GaugeMetricFamily(
            "eldr_router_running_requests", "requests being served", value=router.admission.running
        )
        yield GaugeMetricFamily(
            "eldr_router_waiting_requests", "requests in the queue", value=router.admission.waiting
        )
        yield GaugeMetricFamily(
            "eldr_router_pending_decode_requests",
            "decode legs whose worker has not answered yet",
            value=router.metrics.pending_decode,
        )
        for pool in (router.prefill, router.decode):
            yield GaugeMetricFamily(
                f"eldr_router_active_{pool.role}_requests",
                f"{pool.role} legs that run",
                value=sum(endpoint.running for endpoint in pool.endpoints),
            )
        yield from self._workers()
        yield from self._policies()

    def _policies(self) -> Iterable[Metric]:
        decode = self._router.decode
        experts = GaugeMetricFamily(
            "eldr_router_expected_distinct_experts",
            "expected distinct experts per step, over all layers, seen by a running request",
            labels=["policy", "kind"],
        )
        agreed = CounterMetricFamily(
            "eldr_router_shadow_decisions",
            "shadow decisions by whether they chose the live worker",
            labels=["policy", "agreed"],
        )
        live = distinct_per_request(decode.fleet)
        if live is not None:
            experts.add_metric([decode.fleet.policy.name, "live"], live)
        for shadow in decode.shadows:
            value = distinct_per_request(shadow.fleet)
            if value is not None:
                experts.add_metric([shadow.name, "shadow"], value)
            for same in (False, True):
                agreed.add_metric([shadow.name, str(same).lower()], shadow.agreed[same])
        yield experts
        yield agreed

    def _workers(self) -> Iterable[Metric]:
        active = GaugeMetricFamily(
            "eldr_router_active_requests", "requests by worker", labels=["role", "worker"]
        )
        states = GaugeMetricFamily(
            "eldr_router_workers", "workers by role and state", labels=["role", "state"]
        )
        described = self._router.describe_workers()
        others = GaugeMetricFamily(
            "eldr_router_others_requests",
            "requests of others that workers were seen to run, by role",
            labels=["role"],
        )
        for role in ("prefill", "decode"):
            rows = described[role]
            others.add_metric([role], sum(row["others"] for row in rows))
            for row in rows[:_MOST_WORKERS]:
                active.add_metric([role, row["name"]], row["requests"])
            rest = rows[_MOST_WORKERS:]
            if rest:
                active.add_metric([role, "other"], sum(row["requests"] for row in rest))
            for state in State:
                states.add_metric([role, str(state)], sum(row["state"] == state for row in rows))
        yield active
        yield states
        yield others
