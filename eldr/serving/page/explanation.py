"""Why a request went where it went: one sentence, and a table of the candidates."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

COST, SIMILARITY, LOAD, KV, NONE = "cost", "similarity", "load", "kv_tokens", "none"
_KINDS = {
    "marginal": COST,
    "nearest": SIMILARITY,
    "band": SIMILARITY,
    "overflow": SIMILARITY,
    "least_requests": LOAD,
    "fallback": LOAD,
    "least_kv": KV,
}
MEANING = {
    COST: "added cost, as a multiple of the least (lower is better)",
    SIMILARITY: "similarity to the worker's centroid, 0 to 1 (higher is better)",
    LOAD: "running requests per weight (lower is better)",
    KV: "KV tokens per weight (lower is better)",
    NONE: "this policy scores no candidates",
}
_REASONS = {
    "no_signature": "its prefill sent no signature",
    "version": "its signature has an unknown version",
    "geometry": "its signature does not fit the model the router knows",
    "malformed": "its signature could not be read",
    "empty": "its signature holds no counts",
    "low_coverage": "its signature covers too little of the prompt",
    "no_partition": "no partition is loaded",
    "no_centroid": "no candidate has a centroid",
    "partition_paused": "the partition is paused",
    "no_session": "it names no session",
    "no_domain": "it has no domain label",
    "policy_error": "the policy failed, see the log",
}


def explanation(row: Mapping[str, Any]) -> dict[str, Any]:
    """Explains a decision, from a row of the log or of GET /eldr/decisions.

    Returns:
        sentence; score (kind) and meaning of the scores; candidates: best first, each with worker,
        score (None: not eligible), why_not, band (None: the policy has none), load (running
        requests when it was decided, if recorded), shadows (policies that would have chosen it),
        chosen.

    Raises:
        ValueError: not a decision.
    """
    try:
        kind = score_kind(row)
        scores = {name: _finite(s) for name, s in (row["scores"] or {}).items()}
        band = None if row["band"] is None else set(row["band"])
        shadows = row.get("shadows") or {}
        candidates = [
            {
                "worker": name,
                "score": scores.get(name),
                "why_not": _why_not(kind, name, scores),
                "band": None if band is None else name in band,
                "load": (row.get("load") or {}).get(name),
                "shadows": sorted(s for s, chosen in shadows.items() if chosen == name),
                "chosen": name == row["worker"],
            }
            for name in row["candidates"]
        ]
        if kind == COST:
            _relative(candidates)
        candidates.sort(key=lambda c: _rank(c, kind))
        sentence = _sentence(row, kind, candidates, band)
    except (KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"not a decision: {type(error).__name__} {error}") from error
    return {
        "sentence": sentence,
        "score": kind,
        "meaning": MEANING[kind],
        "candidates": candidates,
    }


def score_kind(row: Mapping[str, Any]) -> str:
    """What the scores of a decision are."""
    if row["scores"] is None:
        return NONE
    if row["branch"] == "pair":
        return SIMILARITY  # power_of_two has pairs as well, but no scores
    return _KINDS.get(row["branch"], NONE)


def _finite(value: Any) -> float | None:
    return float(value) if isinstance(value, int | float) and math.isfinite(value) else None


def _why_not(kind: str, name: str, scores: Mapping[str, float | None]) -> str | None:
    if not scores or scores.get(name) is not None:
        return None
    return {COST: "over the load limit", SIMILARITY: "no centroid"}.get(kind, "not eligible")


def _relative(candidates: list[dict[str, Any]]) -> None:
    least = min((c["score"] for c in candidates if c["score"] is not None), default=0.0)
    for candidate in candidates:
        if candidate["score"] is not None and least > 0:
            candidate["score"] /= least


def _rank(candidate: Mapping[str, Any], kind: str) -> tuple[bool, float, bool]:
    """Best first; of equals, the chosen one."""
    score, other = candidate["score"], not candidate["chosen"]
    if score is None:
        return (other if kind == NONE else True, 0.0, other)
    return (False, -score if kind == SIMILARITY else score, other)


def _sentence(
    row: Mapping[str, Any],
    kind: str,
    candidates: list[dict[str, Any]],
    band: set[str] | None,
) -> str:
    worker, count = row["worker"], len(candidates)
    of = f"of {count} candidate{'s' * (count != 1)}"
    if row["reason"] is not None:
        why = _REASONS.get(row["reason"], str(row["reason"]))
        return f"Placed on load alone, because {why}: {worker} had the least load {of}."
    other = next((c for c in candidates if not c["chosen"] and c["score"] is not None), None)
    if kind == COST:
        most = sum(c["why_not"] is not None for c in candidates)
        text = f"{worker} makes steps least slower {of}"
        if other is not None:
            text += f"; the next best, {other['worker']}, costs {other['score']:.3g} times as much"
        return text + (f"; {most} over the load limit." if most else ".")
    if kind == SIMILARITY:
        return _similarity(row, of, band or set())
    return {
        "least_requests": f"{worker} had the fewest running requests per weight {of}.",
        "least_kv": f"{worker} held the fewest KV tokens per weight {of}.",
        "turn": f"It was {worker}'s turn {of}.",
        "draw": f"{worker} was drawn by weight {of}.",
        "single": f"{worker} was the only candidate.",
        "pair": f"{worker} was the less loaded of two drawn candidates {of}.",
        "home": f"{worker} is the home of the request's session {of}.",
        "overflow": f"The home of the request's session was overloaded; {worker} is next {of}.",
        "pool": f"{worker} was the least loaded of its domain's pool {of}.",
    }.get(row["branch"], f"Rule {row['branch']} of {row['policy']} chose {worker} {of}.")


def _similarity(row: Mapping[str, Any], of: str, band: set[str]) -> str:
    worker, branch = row["worker"], row["branch"]
    if branch == "nearest":
        return f"{worker} is the most similar {of}; no other is close enough to compare loads."
    if branch == "overflow":
        return f"More similar workers were over the load limit; {worker} is the best {of} below it."
    if branch == "pair":
        return f"{worker} was the less loaded of the two most similar {of}."
    return f"{worker} was the least loaded of {len(band)} in the similarity band, {of}."
