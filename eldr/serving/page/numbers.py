"""The four numbers at the top of the page; a number that cannot be given says why."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from eldr.serving.page.facts import Fact

Pair = tuple[float, float, str]
NO_COUNTERS = (
    "no decode worker reports counters at GET /eldr/decode; start decode workers of a patched vLLM "
    'with --additional-config \'{"eldr": {"role": "decode"}}\''
)


def quantile(values: Sequence[float], q: float) -> float | None:
    """The smallest value that at least a share q of the values do not exceed; None without any."""
    ordered = sorted(values)
    return ordered[max(0, math.ceil(q * len(ordered)) - 1)] if ordered else None


def decision_time(facts: Sequence[Fact]) -> dict[str, Any]:
    """Median and 99th percentile of the decisions' duration, microseconds."""
    times = [fact.decision_us for fact in facts]
    why = None if times else "no decision yet"
    return {
        "p50_us": quantile(times, 0.5),
        "p99_us": quantile(times, 0.99),
        "n": len(times),
        "why": why,
    }


def load_skew(load: Mapping[str, float], unit: str) -> dict[str, Any]:
    """Largest load over mean load of the decode workers; 1 is even.

    Args:
        load: by worker, >= 0; workers without load count as well.
        unit: what the loads are, for the reader.
    """
    mean = sum(load.values()) / len(load) if load else 0.0
    if mean <= 0:
        why = "nothing is running" if load else "no decode worker"
        return {"max_over_mean": None, "worker": None, "unit": unit, "why": why}
    worker = max(load, key=lambda name: (load[name], name))
    return {
        "max_over_mean": load[worker] / mean,
        "max": load[worker],
        "mean": mean,
        "worker": worker,
        "workers": len(load),
        "unit": unit,
        "why": None,
    }


def mean_running(facts: Sequence[Fact], workers: Sequence[str]) -> dict[str, float]:
    """Mean number of running requests by worker: request seconds over the span (Little's law).

    The span runs from the first decision to the last end; only its ratio matters for the skew.
    """
    load = dict.fromkeys(workers, 0.0)
    known = [f for f in facts if f.seconds is not None]
    if not known:
        return load
    span = max(f.time + (f.seconds or 0.0) for f in known) - min(f.time for f in known)
    for fact in known:
        load[fact.worker] = load.get(fact.worker, 0.0) + (fact.seconds or 0.0) / max(span, 1e-9)
    return load


def prediction_error(pairs: Sequence[Pair]) -> dict[str, Any]:
    """How far expected distinct experts per step are from counted ones.

    Args:
        pairs: (predicted, realised, worker), both per step and layer.

    Returns:
        mae and bias (mean of predicted - realised) in experts, Pearson's correlation or None below
        three pairs or without spread, n.
    """
    n = len(pairs)
    if not n:
        return {"mae": None, "bias": None, "correlation": None, "n": 0, "why": "no pair yet"}
    errors = [p - r for p, r, _ in pairs]
    return {
        "mae": sum(map(abs, errors)) / n,
        "bias": sum(errors) / n,
        "correlation": _correlation([p for p, _, _ in pairs], [r for _, r, _ in pairs]),
        "n": n,
        "why": None,
    }


def _correlation(x: Sequence[float], y: Sequence[float]) -> float | None:
    n = len(x)
    mx, my = sum(x) / n, sum(y) / n
    sxx = sum((a - mx) ** 2 for a in x)
    syy = sum((b - my) ** 2 for b in y)
    if n < 3 or sxx <= 0 or syy <= 0:
        return None
    return sum((a - mx) * (b - my) for a, b in zip(x, y, strict=True)) / math.sqrt(sxx * syy)


def experts(
    realised: float | None,
    expected: float | None,
    shadows: Mapping[str, float],
    measured: Sequence[Mapping[str, Any]] = (),
    why: str | None = None,
) -> dict[str, Any]:
    """Distinct experts per step and layer that a running request's step reads.

    The saving compares like with like: expected under the live policy against expected in the
    shadow's world; it is an estimate until an A/B experiment has measured the difference in time.

    Args:
        realised: counted by the workers.
        expected: by the model, of the live fleet.
        shadows: expected, by shadow policy; the best one (fewest experts) is compared with.
        measured: differences of an experiment: name, against, relative, ci95, verdict.
        why: reason for a missing realised value.
    """
    out: dict[str, Any] = {"realised": realised, "expected": expected, "shadow": None}
    out |= {"saving": None, "basis": None, "measured": list(measured), "notes": []}
    if realised is None:
        out["notes"].append(why or NO_COUNTERS)
    if shadows:
        name = min(shadows, key=lambda key: (shadows[key], key))
        out["shadow"] = {"policy": name, "expected": shadows[name], "others": len(shadows) - 1}
        if expected is not None and shadows[name] > 0:
            out["saving"] = 1.0 - expected / shadows[name]
            out["basis"] = "estimate"
    else:
        out["notes"].append("no shadow to compare with; start the router with --shadow POLICY")
    return out


def measured_differences(experiment: Mapping[str, Any] | None) -> list[dict[str, Any]]:
    """What an A/B experiment has measured: relative change of TPOT, with its 95 % interval."""
    out = []
    for name, found in ((experiment or {}).get("differences") or {}).items():
        tpot = found["tpot_s"]
        base = None if not tpot["relative"] else tpot["estimate"] / tpot["relative"]
        interval = None if base is None else [end / base for end in tpot["ci95"]]
        out.append(
            {
                "name": name,
                "against": found["against"],
                "relative": tpot["relative"],
                "ci95": interval,
                "verdict": tpot["verdict"],
            }
        )
    return out
