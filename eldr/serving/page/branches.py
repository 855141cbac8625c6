"""Decisions by branch over time, in equal slices."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

from eldr.serving.page.facts import Fact

# More branches than colours that people can tell apart are summed up.
MOST_BRANCHES = 7
OTHER = "other"


def over_time(facts: Sequence[Fact], slices: int = 48) -> dict[str, Any]:
    """Counts of each branch in each of `slices` equal slices from first to last decision.

    Returns:
        start (seconds since the epoch) and width (seconds) of the slices, names (most frequent
        first; beyond MOST_BRANCHES summed up as `other`), counts [slices][names], totals [names].
    """
    if not facts:
        return {"start": 0.0, "width": 0.0, "names": [], "counts": [], "totals": []}
    start, end = min(f.time for f in facts), max(f.time for f in facts)
    width = max((end - start) / slices, 1e-3)
    totals = Counter(f.branch for f in facts)
    ranked = sorted(totals, key=lambda name: (-totals[name], name))
    if len(ranked) > MOST_BRANCHES:
        ranked = [*ranked[: MOST_BRANCHES - 1], OTHER]
    column = {name: i for i, name in enumerate(ranked)}
    counts = [[0] * len(ranked) for _ in range(slices)]
    for fact in facts:
        at = min(slices - 1, int((fact.time - start) / width))
        counts[at][column.get(fact.branch, len(ranked) - 1)] += 1
    sums = [sum(row[i] for row in counts) for i in range(len(ranked))]
    return {"start": start, "width": width, "names": ranked, "counts": counts, "totals": sums}
