"""The numbers of a report: time per range, kernels, steps, copies; plain values, no judgement."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from profiling import schema
from profiling.export import Export
from profiling.facts import Facts
from profiling.steps import DECODE, MIXED

_TOP = 15


def quantile(values: Sequence[float], share: float) -> float:
    """The value below which a share of the values lies; nearest rank, of sorted values."""
    return values[min(len(values) - 1, int(share * len(values)))]


def range_rows(facts: Facts) -> list[dict[str, Any]]:
    """Per range name: occurrences, host time, and device time of the kernels launched inside."""
    durations = dict[str, list[int]]()
    for thread in facts.ranges.threads.values():
        for index, number in enumerate(thread.names):
            duration = thread.ends[index] - thread.starts[index]
            durations.setdefault(facts.ranges.names[number], []).append(duration)
    rows = []
    for name, spent in durations.items():
        spent.sort()
        rows.append(
            {
                "range": name,
                "count": len(spent),
                "host_ms": sum(spent) / 1e6,
                "host_us_p50": quantile(spent, 0.5) / 1e3,
                "host_us_p99": quantile(spent, 0.99) / 1e3,
                "device_ms": facts.range_gpu[name] / 1e6,
            }
        )
    return sorted(rows, key=lambda row: -float(row["host_ms"]))


def kernel_rows(facts: Facts) -> list[dict[str, Any]]:
    """The kernels that take most time, and all of ELDR's whatever they take."""
    total = sum(kernel.total for kernel in facts.kernels.values()) or 1
    ranked = sorted(facts.kernels.items(), key=lambda item: -item[1].total)
    shown = ranked[:_TOP] + [item for item in ranked[_TOP:] if item[1].eldr]
    return [
        {
            "kernel": name,
            "count": kernel.count,
            "eldr": kernel.eldr,
            "total_ms": kernel.total / 1e6,
            "mean_us": kernel.total / kernel.count / 1e3,
            "longest_us": kernel.longest / 1e3,
            "share": kernel.total / total,
        }
        for name, kernel in shown
    ]


def step_rows(facts: Facts) -> list[dict[str, Any]]:
    """Per kind of step: how many and how long, start to start."""
    rows = []
    for kind in (DECODE, MIXED):
        spent = sorted(d for steps in facts.steps.values() for d in steps.durations(kind))
        if spent:
            rows.append(
                {
                    "kind": kind,
                    "count": len(spent),
                    "ms_p50": quantile(spent, 0.5) / 1e6,
                    "ms_p99": quantile(spent, 0.99) / 1e6,
                }
            )
    return rows


def copy_rows(export: Export) -> list[dict[str, Any]]:
    """Copies by kind, with the capture's own names for the kinds."""
    labels = dict(export.rows("ENUM_CUDA_MEMCPY_OPER", "id", "label"))
    known = {1: "Host-to-Device", 2: "Device-to-Host", 8: "Device-to-Device"}
    rows = dict[int, dict[str, Any]]()
    for kind, size, start, end in export.rows(
        "CUPTI_ACTIVITY_KIND_MEMCPY", "copyKind", "bytes", "start", "end"
    ):
        label = labels.get(kind) or known.get(kind) or f"kind {kind}"
        fresh = {"kind": label, "count": 0, "bytes": 0, "ms": 0.0, "host": kind in schema.TO_HOST}
        row = rows.setdefault(kind, fresh)
        row["count"] += 1
        row["bytes"] += size
        row["ms"] += (end - start) / 1e6
    return sorted(rows.values(), key=lambda row: -int(row["bytes"]))
