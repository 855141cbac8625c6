"""Fits how far a prompt's counts can be trusted to predict decoding.

Squared error of p = g + weight(t) * (c / t - g) against the decoded tokens' own shares, summed over
cells, is minimised over (k, limit) of `Shrinkage`. The error of a request is quadratic in its
weight, so three numbers per request are enough:

    error = |d - g|^2 - 2 * weight * <d - g, c / t - g> + weight^2 * |c / t - g|^2

Without decode counts the noise is split off by the method of moments: of the variance of c / t
around g, p (1 - p) / t is sampling noise, and the rest is what requests really differ by. That
takes tokens for independent, which they are not, and cannot see `limit`: prefer decode counts.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from eldr.routing.activation import Shrinkage
from eldr.routing.recorded import Recorded

# Grid of the search; the error is flat around its minimum.
_KS = np.geomspace(1.0, 4096.0, 61)
_LIMITS = np.linspace(0.05, 1.0, 96)


def fit_shrinkage(recorded: Recorded) -> Shrinkage:
    """The shrinkage that predicts decoding best, or the method of moments without `decode`.

    Raises:
        ValueError: fewer than two requests.
    """
    if len(recorded) < 2:
        raise ValueError(f"shrinkage: needs two requests or more, got {len(recorded)}")
    own = recorded.counts.reshape(len(recorded), -1).astype(np.float64)
    covered = recorded.tokens.astype(np.float64) * recorded.coverage
    mean = own.sum(axis=0) / covered.sum()
    share = own / covered[:, None]
    if recorded.decode is None:
        return _moments(share, covered, mean)
    top_k, layers = recorded.geometry.top_k, recorded.geometry.layers
    decode = recorded.decode.reshape(len(recorded), -1).astype(np.float64)
    length = decode.sum(axis=1) / (top_k * layers)
    used = length > 0
    if used.sum() < 2:
        raise ValueError("shrinkage: fewer than two requests have decode counts")
    target = decode[used] / length[used, None] - mean
    return _search(share[used] - mean, target, covered[used])


def _search(
    share: npt.NDArray[np.float64], target: npt.NDArray[np.float64], tokens: npt.NDArray[np.float64]
) -> Shrinkage:
    cross = np.einsum("ij,ij->i", target, share)
    square = np.einsum("ij,ij->i", share, share)
    best, at = np.inf, (32.0, 1.0)
    for k in _KS:
        base = tokens / (tokens + k)
        error = _LIMITS[:, None] ** 2 * base**2 * square - 2 * _LIMITS[:, None] * base * cross
        total = error.sum(axis=1)
        i = int(np.argmin(total))
        if total[i] < best:
            best, at = float(total[i]), (float(k), float(_LIMITS[i]))
    return Shrinkage(*at)


def _moments(
    share: npt.NDArray[np.float64], tokens: npt.NDArray[np.float64], mean: npt.NDArray[np.float64]
) -> Shrinkage:
    spread = float(((share - mean) ** 2).sum(axis=1).mean())
    unit = float((mean * (1.0 - mean)).clip(0).sum())  # noise of one token
    signal = spread - unit * float((1.0 / tokens).mean())
    if signal <= 0.0:
        return Shrinkage(float(_KS[-1]), 1.0)
    return Shrinkage(float(np.clip(unit / signal, _KS[0], _KS[-1])), 1.0)


def prediction_error(recorded: Recorded, shrinkage: Shrinkage) -> dict[str, Any]:
    """Mean squared error per request of the prediction, beside its two controls.

    Returns:
        `shrunk`, `own` (counts as they are) and `popularity` (the mean alone), sums over cells.

    Raises:
        ValueError: no decode counts.
    """
    if recorded.decode is None:
        raise ValueError("prediction error: needs decode counts")
    own = recorded.counts.reshape(len(recorded), -1).astype(np.float64)
    covered = recorded.tokens.astype(np.float64) * recorded.coverage
    mean = own.sum(axis=0) / covered.sum()
    decode = recorded.decode.reshape(len(recorded), -1).astype(np.float64)
    length = decode.sum(axis=1) / (recorded.geometry.top_k * recorded.geometry.layers)
    target = decode / np.maximum(length, 1)[:, None] - mean
    share = own / covered[:, None] - mean
    weight = np.array([shrinkage.weight(t) for t in covered])[:, None]
    errors = {"shrunk": weight * share, "own": share, "popularity": np.zeros_like(share)}
    return {
        name: float(((target - guess) ** 2).sum(axis=1).mean()) for name, guess in errors.items()
    }
