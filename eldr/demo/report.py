"""What the demo tells at its end: the table, summary.json and the sentence to conclude with."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from eldr.demo.config import LOAD_BALANCERS
from eldr.demo.measure import PolicyResult, saving_at_equal_batch
from eldr.geometry import Geometry

_COLUMNS = (
    ("policy", 16),
    ("experts/step", 12),
    ("batch/step", 10),
    ("TPOT p50 ms", 11),
    ("p99", 7),
    ("decision p50 us", 15),
    ("p99", 7),
    ("load max/mean", 13),
)


def table(results: Sequence[PolicyResult]) -> str:
    """One row per policy, fixed-width text."""
    header = "  ".join(f"{n:<{w}}" if n == "policy" else f"{n:>{w}}" for n, w in _COLUMNS)
    lines = [header, "-" * len(header)]
    for r in results:
        cells = (
            f"{r.distinct_per_step:.2f}",
            f"{r.batch_per_step:.1f}",
            f"{r.tpot_ms['p50']:.2f}",
            f"{r.tpot_ms['p99']:.2f}",
            f"{r.decision_us['p50']:.0f}",
            f"{r.decision_us['p99']:.0f}",
            f"{r.max_over_mean_load:.2f}",
        )
        widths = (w for _, w in _COLUMNS[1:])
        row = [f"{r.policy:<{_COLUMNS[0][1]}}"]
        row += [f"{c:>{w}}" for c, w in zip(cells, widths, strict=True)]
        lines.append("  ".join(row))
    return "\n".join(lines)


@dataclass(frozen=True, slots=True)
class Saving:
    """Percent fewer distinct experts per decode step than the run's better load balancer.

    Attributes:
        balancer: the load balancer against which less was saved at equal batch.
        equal_batch: over the batch sizes that both ran; None if they share none.
        percent: from the plain means over all steps, whatever their batches. A balancer that
            spreads its requests badly runs many small steps, and looks good in this figure.
    """

    balancer: str
    equal_batch: float | None
    percent: float


def saving(results: Sequence[PolicyResult], policy: str) -> Saving | None:
    """What `policy` saved; None for a load balancer, or where the run has none to compare with."""
    by_name = {r.policy: r for r in results}
    balancers = [by_name[n] for n in LOAD_BALANCERS if n in by_name]
    if not balancers or policy not in by_name or policy in LOAD_BALANCERS:
        return None
    found = [_saving(by_name[policy], balancer) for balancer in balancers]
    return min(found, key=_judged)


def _saving(ours: PolicyResult, balancer: PolicyResult) -> Saving:
    return Saving(
        balancer.policy,
        saving_at_equal_batch(ours.by_batch, balancer.by_batch),
        100 * (1 - ours.distinct_per_step / balancer.distinct_per_step),
    )


def _judged(found: Saving) -> float:
    return found.percent if found.equal_batch is None else found.equal_batch


def conclusion(results: Sequence[PolicyResult], checks: Mapping[str, Any]) -> str:
    """One sentence on what the run showed, and what it cannot show."""
    savings = {r.policy: s for r in results if (s := saving(results, r.policy))}
    if not savings:
        return "Add a load balancer and another policy to compare."
    policy = max(savings, key=lambda name: _judged(savings[name]))
    found = savings[policy]
    outputs = "equal to" if checks["outputs_equal"] else "DIFFERENT from"
    at = "" if found.equal_batch is None else " of equal batch size"
    return (
        f"{policy} read {_percent(_judged(found))} distinct experts per decode step{at} than "
        f"{found.balancer}, the better load balancer, with outputs {outputs} undisaggregated "
        "serving; on this tiny model a step is mostly fixed cost, so TPOT here does not show what "
        "that saves on a GPU, where a decode step reads those experts' weights from memory."
    )


def _percent(value: float) -> str:
    return f"{value:.1f} % fewer" if value >= 0 else f"{-value:.1f} % more"


def summary(
    geometry: Geometry,
    vllm: str,
    requests: int,
    results: Sequence[PolicyResult],
    checks: Mapping[str, Any],
) -> dict[str, Any]:
    """The object written to summary.json; every number was measured in this run."""
    return {
        "vllm": vllm,
        "model": {
            "layers": geometry.layers,
            "experts": geometry.experts,
            "top_k": geometry.top_k,
        },
        "requests": requests,
        "policies": {r.policy: r.summary() for r in results},
        "saving_pct": {r.policy: asdict(s) for r in results if (s := saving(results, r.policy))},
        "checks": dict(checks),
    }


def write_json(path: Path, value: object) -> None:
    """Writes a whole file or nothing."""
    partial = path.with_suffix(".partial")
    partial.write_text(json.dumps(value, indent=2) + "\n")
    partial.replace(path)
