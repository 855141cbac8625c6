"""Which expert-parallel rank of a worker holds which expert, and the rank that reads most.

A placement is `owners`, uint8 [P, L, E]: the rank of every expert; worker j uses number j mod P, so
P = 1 is one placement for all.

In expected-value mode the distinct experts on a rank are a sum of independent draws, one for each
expert with the chance that the step reads it. The expected maximum over ranks follows exactly:

    E[max] = sum over k >= 0 of (1 - product over ranks of P(distinct on the rank <= k))
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from eldr.geometry import Geometry

Owners = npt.NDArray[np.uint8]
Reads = npt.NDArray[np.float64]

# Kinds for studies. linear and round_robin are vLLM's strategies. spread: every layer's experts so
# that the ranks' chances to read are level, over all traffic; clusters: the same for each worker's
# own part of the traffic, after arXiv 2607.00466 (their 40-GPU runs).
PLACEMENTS = ("linear", "round_robin", "spread", "clusters")


def check(owners: Owners, geometry: Geometry, ranks: int) -> None:
    """Raises ValueError unless every expert of every layer has a rank in [0, ranks)."""
    shape = (geometry.layers, geometry.experts)
    if owners.dtype != np.uint8 or owners.ndim != 3 or owners.shape[1:] != shape:
        raise ValueError(
            f"placement: expected uint8 [P, {shape[0]}, {shape[1]}], got {owners.dtype} "
            f"{list(owners.shape)}"
        )
    if not len(owners) or int(owners.max()) >= ranks:
        raise ValueError(f"placement: needs a placement, and ranks below {ranks}")


def linear(geometry: Geometry, ranks: int) -> Owners:
    """Contiguous blocks of experts, uint8 [1, L, E]."""
    return _same_everywhere(geometry, np.arange(geometry.experts) * ranks // geometry.experts)


def round_robin(geometry: Geometry, ranks: int) -> Owners:
    """Expert e on rank e mod R, uint8 [1, L, E]."""
    return _same_everywhere(geometry, np.arange(geometry.experts) % ranks)


def _same_everywhere(geometry: Geometry, rank: npt.NDArray[np.int64]) -> Owners:
    return np.ascontiguousarray(np.tile(rank.astype(np.uint8), (1, geometry.layers, 1)))


def spread(reads: Reads, ranks: int) -> Owners:
    """Level placements for expected reads float64 [P, L, E], uint8 [P, L, E].

    In each layer the experts go, most read first, to the rank with the lowest sum so far among
    those with room; a rank has room for ceil(E / R) experts.
    """
    placements, layers, experts = reads.shape
    room = -(-experts // ranks)
    owners = np.empty(reads.shape, np.uint8)
    for p in range(placements):
        for layer in range(layers):
            total, held = np.zeros(ranks), np.zeros(ranks, np.int64)
            for expert in np.argsort(-reads[p, layer], kind="stable"):
                rank = int(np.argmin(np.where(held < room, total, np.inf)))
                owners[p, layer, expert] = rank
                total[rank] += reads[p, layer, expert]
                held[rank] += 1
    return owners


def counted_slowest(read: Reads, owner: Owners, ranks: int) -> float:
    """Largest rank's distinct experts, summed over layers; `read` [L, E] is 0 or 1."""
    return float(sum(np.bincount(o, r, ranks).max() for r, o in zip(read, owner, strict=True)))


def expected_slowest(read: Reads, owner: Owners, ranks: int) -> float:
    """Expected largest rank's distinct experts, summed over layers.

    Args:
        read: float64 [L, E], chance that a step reads the expert.
        owner: uint8 [L, E], its rank.
        ranks: R.
    """
    return sum(_expected_maximum(r, o, ranks) for r, o in zip(read, owner, strict=True))


def _expected_maximum(read: Reads, owner: Owners, ranks: int) -> float:
    most = int(np.bincount(owner, minlength=ranks).max())
    below = np.ones(most)  # P(no rank reads more than k), k = 0 .. most - 1
    for rank in range(ranks):
        mass = np.zeros(most + 1)
        mass[0] = 1.0
        for chance in read[owner == rank]:
            mass[1:] = mass[1:] * (1.0 - chance) + mass[:-1] * chance
            mass[0] *= 1.0 - chance
        below *= np.cumsum(mass)[:most]
    return float((1.0 - below).sum())
