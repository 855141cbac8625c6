"""The worker's counters in Prometheus' text form; closed label sets only."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

CONTENT_TYPE = CONTENT_TYPE_LATEST
_DECODE = {
    "steps": "Decode steps: every request computed one token, plus its drafts.",
    "tokens": "Requests in those steps, summed.",
    "kv_tokens": "KV tokens that those steps attended to.",
    "seconds": "Time of those steps, scheduling to sampled tokens, idle time excluded.",
}

_STORE = {
    "hits": "Loaded KV blocks whose row was in the host store.",
    "misses": "Loaded KV blocks whose row was not.",
    "evictions": "Rows pushed out by newer ones.",
}


def render(counters: Mapping[str, Any]) -> bytes:
    """Text of what `WorkerHook.counters` returns."""
    registry = CollectorRegistry()
    registry.register(_Collector(counters))
    text: bytes = generate_latest(registry)
    return text


class _Collector:
    def __init__(self, counters: Mapping[str, Any]) -> None:
        self._counters = counters

    def collect(self) -> Iterable[Metric]:
        yield GaugeMetricFamily(
            "eldr_failed",
            "1 after a fault of ELDR's, which switched it off; the worker's log has it.",
            value=self._counters["failed"],
        )
        if (signatures := self._counters.get("signatures")) is not None:
            yield from _signatures(signatures)
        if (decode := self._counters.get("decode")) is not None:
            yield from _decode(decode)
        if (store := self._counters.get("store")) is not None:
            yield from _store(store)


def _signatures(found: Mapping[str, int]) -> Iterable[Metric]:
    made = CounterMetricFamily(
        "eldr_signatures", "Signatures, by the share of the prompt they cover.", labels=["coverage"]
    )
    for coverage in ("full", "partial", "none"):
        made.add_metric([coverage], found[coverage])
    yield made
    yield CounterMetricFamily(
        "eldr_guarded_blocks",
        "KV blocks left out of a signature because their row could not be right.",
        value=found["guarded_blocks"],
    )


def _decode(found: Mapping[str, Any]) -> Iterable[Metric]:
    for name, text in _DECODE.items():
        yield CounterMetricFamily(f"eldr_decode_{name}", text, value=found[name])
    distinct = CounterMetricFamily(
        "eldr_decode_distinct_experts",
        "Distinct experts that those steps read, summed.",
        labels=["layer"],
    )
    for layer, value in enumerate(found["distinct"]):
        distinct.add_metric([str(layer)], value)
    yield distinct


def _store(found: Mapping[str, int]) -> Iterable[Metric]:
    for name, text in _STORE.items():
        yield CounterMetricFamily(f"eldr_host_store_{name}", text, value=found[name])
    yield GaugeMetricFamily("eldr_host_store_rows", "Rows held.", value=found["rows"])
    yield GaugeMetricFamily("eldr_host_store_bytes", "Memory reserved.", value=found["bytes"])
