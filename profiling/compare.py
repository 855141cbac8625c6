"""Step by step against the engine without ELDR: nothing more is copied or waited for."""

from __future__ import annotations

from collections import Counter

from eldr import tracing
from profiling.facts import Facts
from profiling.steps import DECODE, MIXED
from profiling.verdict import Check, judge

FEWEST_STEPS = 20
TOLERANCE = 0.02  # copies or waits per step
_KERNELS_MAY_DIFFER = 0.05


def per_step(facts: Facts, kind: str) -> dict[str, float] | None:
    """Steps of a kind, and per step: copies to the host, waits, engine kernels, ELDR's own copies.

    Copies and waits of the canary are left out. None if there are no such steps.
    """
    steps = sum(found.counts()[kind] for found in facts.steps.values())
    if not steps:
        return None
    own = _own(facts, kind)
    of_kind = {
        "copies": _sum(facts.copies, kind) - own["canary copies"],
        "waits": _sum(facts.waits, kind) - own["canary waits"],
        "kernels": _sum(facts.kernels_in_steps, kind),
        "output copies": own["output copies"],
    }
    return {"steps": float(steps), **{name: value / steps for name, value in of_kind.items()}}


def _own(facts: Facts, kind: str) -> Counter[str]:
    own = Counter[str]()
    for hit in facts.hits:
        steps = facts.steps.get(hit.process)
        if steps is None or steps.kind_at(hit.start) != kind:
            continue
        if hit.range == tracing.CANARY:
            own["canary copies"] += hit.kind == "copy"
            own["canary waits"] += hit.kind == "wait" or hit.blocking
        elif hit.range == tracing.COPY:
            own["output copies"] += hit.kind == "copy"
    return own


def _sum(counter: Counter[tuple[int, str]], kind: str) -> int:
    return sum(number for (_, of_kind), number in counter.items() if of_kind == kind)


def against_baseline(facts: Facts, base: Facts) -> Check:
    """More copies or waits per step than the baseline, the accounted output copies aside?"""
    faults, doubts, proof = list[str](), list[str](), list[str]()
    if base.ranges.counts():
        doubts.append("the baseline has ranges of the domain eldr: it is not one")
    for kind in (DECODE, MIXED):
        ours, theirs = per_step(facts, kind), per_step(base, kind)
        if ours is None or theirs is None or min(ours["steps"], theirs["steps"]) < FEWEST_STEPS:
            continue
        if _differ(ours["kernels"], theirs["kernels"]):
            doubts.append(
                f"{kind} steps are not comparable: {ours['kernels']:.1f} engine kernels per step "
                f"against {theirs['kernels']:.1f}"
            )
        excess = {
            "copies": ours["copies"] - ours["output copies"] - theirs["copies"],
            "waits": ours["waits"] - theirs["waits"],
        }
        for what, more in excess.items():
            text = f"{kind} steps: {ours[what]:.3f} {what} per step against {theirs[what]:.3f}"
            (faults if more > TOLERANCE else proof).append(text)
    if not proof and not faults:
        doubts.append(f"no kind of step occurs {FEWEST_STEPS} times in both captures")
    return judge("against-baseline", faults, doubts, proof)


def _differ(ours: float, theirs: float) -> bool:
    return abs(ours - theirs) > _KERNELS_MAY_DIFFER * max(theirs, 1.0)
