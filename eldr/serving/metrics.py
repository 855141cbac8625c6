"""The router's Prometheus metrics; label sets are closed, so their number is bounded."""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from eldr.serving.endpoints import Endpoint

_LATENCY = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300, 600)
_DECISION = (1e-5, 2e-5, 5e-5, 1e-4, 2e-4, 5e-4, 1e-3, 2e-3, 5e-3, 1e-2)


class Metrics:
    """All metrics of one router process, in a registry of their own."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        r = self.registry
        self.requests = Counter(
            "eldr_router_requests",
            "requests by endpoint and outcome (ok, client_error, worker_error, router_error, "
            "cancelled, broken_stream)",
            ("endpoint", "outcome"),
            registry=r,
        )
        self.duration = Histogram(
            "eldr_router_request_duration_seconds",
            "from the request's last byte to the answer's last byte",
            ("endpoint",),
            registry=r,
            buckets=_LATENCY,
        )
        self.ttft = Histogram(
            "eldr_router_first_byte_seconds",
            "from the request's last byte to the answer's first byte, streamed requests",
            registry=r,
            buckets=_LATENCY,
        )
        self.prefill = Histogram(
            "eldr_router_prefill_seconds", "the prefill leg", registry=r, buckets=_LATENCY
        )
        self.decisions = Counter(
            "eldr_router_decisions",
            "decode decisions by policy and branch",
            ("policy", "branch"),
            registry=r,
        )
        self.fallback = Counter(
            "eldr_router_fallback",
            "decisions made on load alone, by reason",
            ("reason",),
            registry=r,
        )
        self.decision_time = Histogram(
            "eldr_router_decision_seconds",
            "from the raw signature to the reserved worker",
            registry=r,
            buckets=_DECISION,
        )
        self.decode_running = Gauge(
            "eldr_router_active_decode_requests",
            "reservations by decode worker",
            ("worker",),
            registry=r,
        )
        self.prefill_running = Gauge(
            "eldr_router_active_prefill_requests",
            "running prefills by worker",
            ("worker",),
            registry=r,
        )

        self.retries = Counter(
            "eldr_router_retries",
            "repeated tries by leg; no_budget: a retry that the budget refused",
            ("leg", "outcome"),
            registry=r,
        )
        self.kv_releases = Counter(
            "eldr_router_kv_releases",
            "KV freed at prefill workers for requests that never reached a decode worker",
            ("outcome",),
            registry=r,
        )
        self.worker_events = Counter(
            "eldr_router_worker_events",
            "workers ejected, down, returned, restarted, joined, left",
            ("role", "event"),
            registry=r,
        )

    def count_worker_event(self, endpoint: Endpoint, event: str) -> None:
        """Counts what happened to a worker."""
        self.worker_events.labels(endpoint.role, event).inc()

    def render(self) -> bytes:
        """The text exposition."""
        return bytes(generate_latest(self.registry))
