"""Decisions as the router logs them."""

from __future__ import annotations

from typing import Any

EVIL = (
    "</script><script>document.title='owned'</script><img src=x onerror=\"document.title='owned'\">"
)


def row(**changed: Any) -> dict[str, Any]:
    """A decision of locality_band among three workers."""
    out: dict[str, Any] = {
        "v": 1,
        "time": 1_800_000_000.0,
        "request_id": "r1",
        "prefill_worker": "http://p0:8100",
        "worker": "http://d1:8200",
        "policy": "locality_band",
        "branch": "band",
        "reason": None,
        "candidates": ["http://d0:8200", "http://d1:8200", "http://d2:8200"],
        "scores": {"http://d0:8200": 0.9, "http://d1:8200": 0.85, "http://d2:8200": 0.2},
        "band": ["http://d0:8200", "http://d1:8200"],
        "added_experts": None,
        "decision_us": 80.0,
        "prompt_tokens": 12,
        "coverage": 1.0,
        "arm": None,
        "shadows": {"round_robin": "http://d2:8200", "least_requests": "http://d1:8200"},
        "outcome": "ok",
        "ttft_s": 0.1,
        "tpot_s": 0.02,
        "seconds": 2.0,
    }
    return {**out, **changed}


def marginal(**changed: Any) -> dict[str, Any]:
    """A decision of marginal_cost; one worker is over the load limit (null in JSON)."""
    costs = {"http://d0:8200": 0.003, "http://d1:8200": 0.002, "http://d2:8200": None}
    return row(
        policy="marginal_cost",
        branch="marginal",
        band=None,
        added_experts=5.5,
        **{"scores": costs, **changed},
    )


def fallback(**changed: Any) -> dict[str, Any]:
    """A decision on load alone."""
    load = {"http://d0:8200": 3.0, "http://d1:8200": 1.0, "http://d2:8200": 2.0}
    return row(
        branch="fallback", reason="no_signature", band=None, coverage=None,
        **{"scores": load, **changed},
    )  # fmt: skip
