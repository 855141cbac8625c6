"""What the page's figures need of a decision, from a record of the router or a row of its log."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from eldr.serving.decisions import Record


@dataclass(frozen=True, slots=True)
class Fact:
    """One decision.

    Attributes:
        time: seconds since the epoch.
        worker: the decode worker.
        policy: that decided.
        branch: the policy's rule, or `fallback: REASON`.
        decision_us: microseconds it took.
        seconds: life of the request, None while it is not known.
        shadows: what each shadow policy would have chosen.
    """

    time: float
    worker: str
    policy: str
    branch: str
    decision_us: float
    seconds: float | None = None
    shadows: tuple[tuple[str, str | None], ...] = ()


def branch_label(branch: str, reason: str | None) -> str:
    """A decision's branch; a fallback is told by its reason."""
    return branch if reason is None else f"{branch}: {reason}"


def of_record(record: Record) -> Fact:
    """The fact of a decision that the router holds in memory."""
    decision = record.decision
    reason = None if decision.reason is None else str(decision.reason)
    label = branch_label(decision.branch, reason)
    return Fact(record.time, decision.worker.name, decision.policy, label, record.decision_us)


def of_row(row: Mapping[str, Any]) -> Fact:
    """The fact of a row of the decision log.

    Raises:
        ValueError: the row lacks a field, or one has another type.
    """
    try:
        seconds = row.get("seconds")
        shadows = (row.get("shadows") or {}).items()
        return Fact(
            float(row["time"]),
            str(row["worker"]),
            str(row["policy"]),
            branch_label(str(row["branch"]), row["reason"]),
            float(row["decision_us"]),
            None if seconds is None else float(seconds),
            tuple((str(name), chosen) for name, chosen in shadows),
        )
    except (KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"not a decision: {type(error).__name__} {error}") from error
