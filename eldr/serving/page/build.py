"""Puts the page's data together; the same shape from a log file and from a running router."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from eldr.serving.decision_log import COUNTERS
from eldr.serving.page import branches, numbers
from eldr.serving.page.counters import Counters, realised
from eldr.serving.page.explanation import explanation
from eldr.serving.page.facts import Fact, of_row
from eldr.serving.page.heat import heat
from eldr.serving.page.snapshots import Seen
from eldr.serving.page.window import expected_means

VERSION = 1
SHOWN_DECISIONS = 30
SHOWN_PAIRS = 400
# Of one decision: the best ones, and the chosen one wherever it ranks.
SHOWN_CANDIDATES = 12
# Of a page with every layer's heat map.
_MOST_CELLS = 48_000
_SHOWN = (
    "time",
    "request_id",
    "prefill_worker",
    "worker",
    "policy",
    "branch",
    "reason",
    "added_experts",
    "decision_us",
    "prompt_tokens",
    "coverage",
    "outcome",
    "ttft_s",
    "tpot_s",
    "seconds",
    "arm",
)
_NOT_IN_LOG = "this log holds no decode counters (see --decision-log-counters)"
_ASK_ROUTER = (
    f"{_NOT_IN_LOG}; the running router has them: eldr report http://ROUTER:PORT -o report.html"
)


def from_log(rows: Iterable[Mapping[str, Any]], name: str) -> dict[str, Any]:
    """The page's data from the rows of a decision log, oldest first.

    Raises:
        ValueError: a row is no decision and no counters; the message has its number.
    """
    facts: list[Fact] = []
    workers: dict[str, None] = {}
    last: deque[Mapping[str, Any]] = deque(maxlen=SHOWN_DECISIONS)
    seen = Seen()
    for number, row in enumerate(rows, 1):
        try:
            if row.get("kind") == COUNTERS:
                seen.add(row)
                continue
            facts.append(of_row(row))
            workers |= dict.fromkeys(row["candidates"])
        except (ValueError, KeyError, TypeError) as error:
            text = str(error).removeprefix("not a decision: ")
            raise ValueError(f"{name}: row {number}: not a decision: {text}") from error
        workers[facts[-1].worker] = None
        last.append(row)
    agreement = _agreement(facts)
    heat_map = heat(seen.changes, None, seen.problems)
    if not seen.seconds:
        heat_map["why"] = _ASK_ROUTER
    why = heat_map["why"] and (_NOT_IN_LOG if not seen.seconds else heat_map["why"])
    source = {"kind": "log", "name": name, "time": max((f.time for f in facts), default=0.0)}
    wrong = numbers.prediction_error(list(seen.pairs))
    if not seen.pairs:
        wrong["why"] = why or "no interval of the log has decode steps"
    out: dict[str, Any] = {
        "v": VERSION,
        "source": source,
        "policy": sorted({f.policy for f in facts}),
        "decisions_total": len(facts),
        "numbers": {
            "experts": _logged_experts(seen, agreement, why),
            "error": wrong,
            "decision": numbers.decision_time(facts),
            "skew": _logged_skew(seen, facts, list(workers)),
        },
        "heat": heat_map,
        "pairs": _shown_pairs(list(seen.pairs)),
        "branches": branches.over_time(facts),
        "decisions": [public(r) for r in sorted(last, key=lambda r: -float(r["time"]))],
        "agreement": agreement,
    }
    if seen.seconds:
        source["window"] = f"over {seen.seconds:.0f} s of the log"
        out |= every_layer(heat_map, seen.changes, seen.problems)
    return out


def _logged_experts(
    seen: Seen, agreement: Sequence[Mapping[str, Any]], why: str | None
) -> dict[str, Any]:
    expected, shadows = expected_means(seen.sums, seen.layers)
    counted = realised(list(seen.changes.values()))
    found = numbers.experts(
        counted, expected, shadows, seen.measured, why or "no decode step in the log"
    )
    if agreement and not shadows:
        found["notes"][-1:] = [_agreement_text(agreement)]
    return found


def _logged_skew(seen: Seen, facts: Sequence[Fact], workers: Sequence[str]) -> dict[str, Any]:
    if seen.seconds:
        return numbers.load_skew(seen.load(), "mean running requests")
    load = numbers.mean_running(facts, workers)
    return numbers.load_skew(load, "mean running requests over the log")


def every_layer(
    heat_map: Mapping[str, Any], changes: Mapping[str, Counters], problems: Mapping[str, str]
) -> dict[str, Any]:
    """`layers`: cells and distinct experts of single layers, evenly spread if all are too many."""
    if heat_map["why"] is not None:
        return {}
    count = heat_map["layers"]
    fit = min(count, _MOST_CELLS // (len(heat_map["workers"]) * heat_map["experts"]))
    chosen = sorted({round(i * (count - 1) / max(fit - 1, 1)) for i in range(fit)})
    maps = {str(at): heat(changes, at, problems) for at in chosen}
    return {"layers": {at: {k: m[k] for k in ("cells", "distinct")} for at, m in maps.items()}}


def _shown_pairs(pairs: Sequence[numbers.Pair]) -> list[list[Any]]:
    return [[round(p, 4), round(r, 4), w] for p, r, w in pairs[-SHOWN_PAIRS:]]


def live(
    *,
    name: str,
    now: float,
    policy: str,
    total: int,
    facts: Sequence[Fact],
    rows: Iterable[Mapping[str, Any]],
    load: Mapping[str, float],
    experts: Mapping[str, Any],
    pairs: Sequence[numbers.Pair],
    heat_map: Mapping[str, Any],
    window: str,
) -> dict[str, Any]:
    """The page's data of a running router; see `eldr.serving.operator_page` for the parts."""
    error = numbers.prediction_error(pairs)
    if not pairs:
        error["why"] = heat_map.get("why") or "waiting for a decode interval with steps in it"
    return {
        "v": VERSION,
        "source": {"kind": "live", "name": name, "time": now, "window": window},
        "policy": [policy],
        "decisions_total": total,
        "numbers": {
            "experts": dict(experts),
            "error": error,
            "decision": numbers.decision_time(facts),
            "skew": numbers.load_skew(load, "mean running requests"),
        },
        "heat": dict(heat_map),
        "pairs": _shown_pairs(pairs),
        "branches": branches.over_time(facts),
        "decisions": [public(row) for row in rows],
        "agreement": [],
    }


def public(row: Mapping[str, Any]) -> dict[str, Any]:
    """A decision for the page: explained, without its signature, with values that JSON has."""
    kept = {name: row.get(name) for name in _SHOWN}
    found = explanation(row)
    candidates = found["candidates"]
    shown = [c for i, c in enumerate(candidates) if i < SHOWN_CANDIDATES or c["chosen"]]
    found |= {"candidates": shown, "left_out": len(candidates) - len(shown)}
    return {**kept, "explanation": found}


def _agreement(facts: Sequence[Fact]) -> list[dict[str, Any]]:
    """How often each shadow policy chose the live worker."""
    counts: dict[str, list[int]] = {}
    for fact in facts:
        for name, chosen in fact.shadows:
            pair = counts.setdefault(name, [0, 0])
            pair[0] += chosen == fact.worker
            pair[1] += 1
    return [{"policy": n, "same": same, "of": of} for n, (same, of) in sorted(counts.items())]


def _agreement_text(agreement: Sequence[Mapping[str, Any]]) -> str:
    parts = [f"{a['policy']} {100 * a['same'] / a['of']:.0f} %" for a in agreement]
    return f"shadow choices that were the live one: {', '.join(parts)}"
