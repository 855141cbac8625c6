"""The ops on expert histograms: accumulate hits, gather signatures, score, assign, decide.

One file per op: its equation in plain torch (`*_ref`), its Triton kernel, and the launcher that
checks the arguments. All ops write into tensors that the caller gives or that the launcher
allocates, are deterministic, never synchronise on a device, and may be captured in a CUDA graph.
`eldr.kernels.backend` says which implementation serves.
"""

from __future__ import annotations

from eldr.kernels.accumulate import accumulate_hits, accumulate_hits_ref
from eldr.kernels.assign import (
    CLOSED,
    LeastLoad,
    LocalityBand,
    MarginalCost,
    Rule,
    assign,
    assign_ref,
)
from eldr.kernels.decide import Assignment, Decision, decide, decide_ref
from eldr.kernels.gather import gather_signatures, gather_signatures_ref
from eldr.kernels.score import Centroids, Scorer, Survival, score, score_ref

__all__ = [
    "CLOSED",
    "Assignment",
    "Centroids",
    "Decision",
    "LeastLoad",
    "LocalityBand",
    "MarginalCost",
    "Rule",
    "Scorer",
    "Survival",
    "accumulate_hits",
    "accumulate_hits_ref",
    "assign",
    "assign_ref",
    "decide",
    "decide_ref",
    "gather_signatures",
    "gather_signatures_ref",
    "score",
    "score_ref",
]
