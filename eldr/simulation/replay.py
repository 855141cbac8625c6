"""A trace laid out for replay: bit sets of every token's experts, and each request's decode."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from eldr.geometry import Geometry
from eldr.workload.traces import ExpertTrace

# -log(1 - p) is counted in units of 2^-20 and capped at p = 1 - exp(-30).
LOG_UNIT = 2.0**-20
_LOG_CAP = 30.0


@dataclass(frozen=True, eq=False)
class Replay:
    """Arrays that a decode pool reads; rows are requests of the trace.

    Attributes:
        geometry: L, E, K.
        bits: experts of each token as a bit set, uint64 [tokens, L, ceil(E / 64)]; bit e of the
            words is expert e.
        first: first decoded token of each request, int64 [N].
        length: decoded tokens of each request, int64 [N].
        logs: -log(1 - p) of each request in LOG_UNIT, int32 [N, L * E]; p = share of the decoded
            tokens that use the expert.
    """

    geometry: Geometry
    bits: npt.NDArray[np.uint64]
    first: npt.NDArray[np.int64]
    length: npt.NDArray[np.int64]
    logs: npt.NDArray[np.int32]

    @classmethod
    def of(cls, trace: ExpertTrace) -> Replay:
        """Lays out a trace: L * ceil(E / 64) words a token, L * E values a request."""
        geometry = trace.geometry
        length = trace.offsets[1:] - trace.cuts
        use = trace.decode_counts.reshape(len(trace), -1) / length[:, None]
        with np.errstate(divide="ignore"):
            logs = np.minimum(-np.log1p(-use), _LOG_CAP)
        return cls(
            geometry=geometry,
            bits=bit_sets(trace.topk, geometry.experts),
            first=np.ascontiguousarray(trace.cuts),
            length=np.ascontiguousarray(length),
            logs=np.rint(logs / LOG_UNIT).astype(np.int32),
        )


def bit_sets(topk: npt.NDArray[np.integer], experts: int) -> npt.NDArray[np.uint64]:
    """Expert ids [tokens, L, K] as bit sets, uint64 [tokens, L, ceil(experts / 64)]."""
    tokens, layers, _ = topk.shape
    words = -(-experts // 64)
    out = np.zeros((tokens, layers, words), np.uint64)
    ids = topk.astype(np.uint64)
    bit = np.left_shift(np.uint64(1), ids & np.uint64(63))
    for word in range(words):
        here = np.where(ids >> np.uint64(6) == word, bit, np.uint64(0))
        out[:, :, word] = np.bitwise_or.reduce(here, axis=2)
    return out
