"""OpenTelemetry spans of the prefill leg, the decision and the decode leg (extra `eldr[otel]`).

Spans are made from the times that a request leaves behind, after it has ended: without tracing
nothing is paid, and with it nothing on the way of a request. They are children of the client's
`traceparent`, which the workers get unchanged as well.
"""

from __future__ import annotations

import re
import time
from collections.abc import Mapping
from typing import Any

from eldr.serving.call import Call
from eldr.serving.errors import StartError

# A collector that is away costs its spans; a stop, which sends the last ones, must not wait for it.
_EXPORT_SECONDS = 3.0
_FAILED = frozenset({"worker_error", "router_error", "broken_stream"})


class Spans:
    """Turns ended requests into spans."""

    def __init__(self, tracer: Any, extract: Any) -> None:
        """Where spans go.

        Args:
            tracer: an OpenTelemetry tracer.
            extract: `opentelemetry.propagate.extract`.
        """
        from opentelemetry.trace import StatusCode

        self._tracer = tracer
        self._extract = extract
        self._error = StatusCode.ERROR

    def record(self, call: Call, carrier: Mapping[str, str], outcome: str) -> None:
        """Makes the spans of one request; `carrier` holds the client's headers."""
        now, now_ns = time.perf_counter(), time.time_ns()

        def at(moment: float) -> int:
            return now_ns - int((now - moment) * 1e9)

        parent = self._extract({k.lower(): v for k, v in carrier.items()})
        attributes: dict[str, Any] = {"eldr.request_id": call.request_id, "eldr.outcome": outcome}
        whole = self._tracer.start_span(
            f"POST {call.path}", parent, start_time=at(call.started), attributes=attributes
        )
        inside = self._inside(whole, parent)
        if call.prefilled is not None:
            by = {"eldr.worker": call.prefill_worker}
            self._span("eldr.prefill", inside, at(call.started), at(call.prefilled), by)
        ticket = call.ticket
        if ticket is not None:
            record = ticket.record
            seconds = record.decision_us / 1e6
            decision = {
                "eldr.policy": record.decision.policy,
                "eldr.branch": record.decision.branch,
                "eldr.prompt_tokens": record.prompt_tokens,
            }
            self._span(
                "eldr.decision", inside, at(ticket.decided - seconds), at(ticket.decided), decision
            )
            worker = {"eldr.worker": ticket.endpoint.name}
            self._span("eldr.decode", inside, at(ticket.decided), now_ns, worker)
        if outcome in _FAILED:
            whole.set_status(self._error, outcome)
        whole.end(now_ns)

    @staticmethod
    def _inside(span: Any, parent: Any) -> Any:
        from opentelemetry.trace import set_span_in_context

        return set_span_in_context(span, parent)

    def _span(
        self, name: str, context: Any, start: int, end: int, attributes: dict[str, Any]
    ) -> None:
        span = self._tracer.start_span(name, context, start_time=start, attributes=attributes)
        span.end(end)


def open_spans(endpoint: str) -> Spans:
    """Spans that go to an OTLP/HTTP collector.

    Raises:
        StartError: it is no URL, or the SDK is not installed.
    """
    if not re.match(r"https?://[^/]", endpoint):
        raise StartError(f"--otel-endpoint {endpoint!r}: expected http://HOST:PORT")
    try:
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
        from opentelemetry.propagate import extract
        from opentelemetry.sdk.resources import Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor
    except ImportError as error:
        raise StartError("--otel-endpoint needs `pip install eldr[otel]`") from error
    provider = TracerProvider(resource=Resource.create({"service.name": "eldr-router"}))
    exporter = OTLPSpanExporter(
        endpoint=endpoint.rstrip("/") + "/v1/traces", timeout=_EXPORT_SECONDS
    )
    provider.add_span_processor(BatchSpanProcessor(exporter))
    return Spans(provider.get_tracer("eldr.serving"), extract)
