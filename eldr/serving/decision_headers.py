"""The opt-in response headers that tell a client where its request went and why."""

from __future__ import annotations

from eldr.routing.decision import Decision


def decision_headers(prefill_worker: str, decision: Decision) -> dict[str, str]:
    """Headers of one decision; `eldr explain REQUEST_ID` tells the rest.

    Both workers, policy and branch are always there. The rest only where it exists: the reason of a
    decision by load alone, how many candidates and how many of them in the band, and of the chosen
    worker its score, its running requests before, and the experts that the request adds there.
    """
    told = decision.explain()
    worker, added = told["worker"], told["added_experts"]
    out = {
        "x-eldr-prefill-worker": prefill_worker,
        "x-eldr-decode-worker": worker,
        "x-eldr-policy": told["policy"],
        "x-eldr-branch": told["branch"],
        "x-eldr-candidates": str(len(told["candidates"])),
    }
    optional = {
        "x-eldr-reason": told["reason"],
        "x-eldr-band": None if told["band"] is None else len(told["band"]),
        "x-eldr-score": _short((told["scores"] or {}).get(worker)),
        "x-eldr-load": (told.get("load") or {}).get(worker),
        "x-eldr-added-experts": _short(added),
    }
    return out | {name: str(value) for name, value in optional.items() if value is not None}


def _short(value: float | None) -> str | None:
    return None if value is None else f"{value:.6g}"
