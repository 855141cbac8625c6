"""Which layers to compare: forward-greedy selection by Spearman's rank correlation.

arXiv 2607.00466, section 4.2: rho between the cosine distances of pairs of prompt signatures and
those of the same requests' decode counts; layers are added one by one, and the prefix with the
highest rho is kept.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from eldr.routing.recorded import Recorded


def layer_mask(
    recorded: Recorded,
    weights: npt.NDArray[np.float32],
    *,
    pairs: int = 4000,
    seed: int = 1,
) -> tuple[npt.NDArray[np.bool_], float]:
    """Selected layers bool [L] and their rho.

    Args:
        recorded: at least 3 requests, with decode counts.
        weights: float32 [L, E], e.g. IDF.
        pairs: random pairs of requests.
        seed: of the pairs.

    Raises:
        ValueError: no decode counts, or too few requests.
    """
    if recorded.decode is None or len(recorded) < 3:
        raise ValueError("layer mask: needs decode counts of at least 3 requests")
    rng = np.random.default_rng(seed)
    left = rng.integers(len(recorded), size=pairs)
    right = (left + rng.integers(1, len(recorded), size=pairs)) % len(recorded)
    target = _ranks(_distance(*_products(recorded.decode.astype(np.float32), left, right)))
    dots, squares = _products(recorded.counts * weights, left, right)
    return _greedy(dots, squares, target)


def _products(
    counts: npt.NDArray[np.float32], left: npt.NDArray[np.int64], right: npt.NDArray[np.int64]
) -> tuple[npt.NDArray[np.float64], npt.NDArray[np.float64]]:
    """Per layer and pair: dot products [L, P]; and the two squared lengths [2, L, P]."""
    layers = counts.shape[1]
    dots = np.empty((layers, len(left)))
    squares = np.empty((2, layers, len(left)))
    for layer in range(layers):
        rows = counts[:, layer].astype(np.float64)
        norm = (rows**2).sum(axis=1)
        dots[layer] = np.einsum("ij,ij->i", rows[left], rows[right])
        squares[0, layer], squares[1, layer] = norm[left], norm[right]
    return dots, squares


def _distance(
    dots: npt.NDArray[np.float64], squares: npt.NDArray[np.float64]
) -> npt.NDArray[np.float64]:
    length = np.sqrt(squares[0].sum(axis=0) * squares[1].sum(axis=0))
    return np.asarray(1.0 - dots.sum(axis=0) / np.maximum(length, 1e-30))


def _ranks(values: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    """Average ranks, centred and of unit length: a dot product of two is Spearman's rho."""
    _, inverse, count = np.unique(values, return_inverse=True, return_counts=True)
    ranks = (np.cumsum(count) - (count - 1) / 2.0)[inverse]
    ranks = ranks - ranks.mean()
    return np.asarray(ranks / max(float(np.linalg.norm(ranks)), 1e-30))


def _greedy(
    dots: npt.NDArray[np.float64],
    squares: npt.NDArray[np.float64],
    target: npt.NDArray[np.float64],
) -> tuple[npt.NDArray[np.bool_], float]:
    layers = len(dots)
    chosen: list[int] = []
    sums = np.zeros(dots.shape[1]), np.zeros((2, dots.shape[1]))
    best_rho, best_count = -np.inf, 0
    while len(chosen) < layers:
        rest = [layer for layer in range(layers) if layer not in chosen]
        rhos = [
            float(_ranks(_distance((sums[0] + dots[c])[None], (sums[1] + squares[:, c])[:, None]))
                  @ target)
            for c in rest
        ]  # fmt: skip
        at = int(np.argmax(rhos))
        chosen.append(rest[at])
        sums = sums[0] + dots[rest[at]], sums[1] + squares[:, rest[at]]
        if rhos[at] > best_rho:
            best_rho, best_count = rhos[at], len(chosen)
    mask = np.zeros(layers, np.bool_)
    mask[chosen[:best_count]] = True
    return mask, best_rho
