"""From a signature to activation probabilities: counts shrunk towards the fleet's mean.

p = g + weight * (c / t - g),  weight = limit * t / (t + k)

with c the counts, t the tokens they cover and g the mean over requests. `k` stands for sampling
noise, which longer prompts average out; `limit` for what even an endless prompt does not tell about
decoding. Both are fitted (`eldr.routing.shrinkage`), not guessed; the defaults come from the traces
named there.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from eldr.geometry import Geometry
from eldr.routing import fixed
from eldr.signature import Signature


@dataclass(frozen=True, slots=True)
class Shrinkage:
    """Strength of the shrinkage.

    Attributes:
        k: tokens at which a prompt's own counts get half of their final weight, >= 0.
        limit: weight of an endless prompt's counts, in (0, 1].
    """

    k: float = 8.0
    limit: float = 1.0

    def __post_init__(self) -> None:
        if not (np.isfinite(self.k) and self.k >= 0):
            raise ValueError(f"shrinkage: k must be finite and >= 0, got {self.k}")
        if not 0 < self.limit <= 1:
            raise ValueError(f"shrinkage: limit must be in (0, 1], got {self.limit}")

    def weight(self, tokens: float) -> float:
        """Weight of the own counts of a prompt with this many covered tokens."""
        return self.limit * tokens / (tokens + self.k)


# The mean forgets: when this many tokens were seen, all weights halve.
WINDOW = 1 << 22
REFRESH = 32


class ActivationModel:
    """Activation probabilities of requests, with a running mean of the requests seen."""

    def __init__(self, geometry: Geometry, shrinkage: Shrinkage | None = None) -> None:
        self.geometry = geometry
        self.shrinkage = shrinkage or Shrinkage()
        self._counts = np.zeros(geometry.cells, np.float64)
        self._pending = np.zeros(geometry.cells, np.uint32)
        self._tokens = 0.0
        self._mean = np.full(geometry.cells, geometry.top_k / geometry.experts, np.float32)
        self._age = 0

    @property
    def mean(self) -> npt.NDArray[np.float32]:
        """g, float32 [L*E]: K / E until requests were observed."""
        return self._mean

    def admit(self, signature: Signature) -> tuple[fixed.I16, fixed.U16] | None:
        """Activation and costs of a request that joins the running mean.

        The mean itself moves every few requests.

        Returns:
            New arrays: fixed-point probabilities int16 [L*E] and their costs uint16 [L*E] (see
            `eldr.routing.fixed`). None if the signature holds no hit.
        """
        covered = signature.covered
        weight = self.shrinkage.weight(covered)
        scale, keep = fixed.P_ONE * weight / covered, fixed.P_ONE * (1.0 - weight)
        x = np.empty(self.geometry.cells, np.int16)
        step = np.empty(self.geometry.cells, np.uint16)
        if not fixed.admit(signature.counts, scale, self._mean, keep, x, step, self._pending):
            return None
        self._tokens += covered
        self._age += 1
        # Until the first refresh the mean is uniform; counts stay far below 2^32 in between.
        if self._age >= REFRESH:
            self._refresh()
        return x, step

    def _refresh(self) -> None:
        self._counts += self._pending
        self._pending[:] = 0
        geometry = self.geometry
        # One block of 256 tokens' worth of uniform use keeps an early mean from being extreme.
        uniform = geometry.top_k / geometry.experts
        self._mean = ((self._counts + 256 * uniform) / (self._tokens + 256)).astype(np.float32)
        self._age = 0
        if self._tokens > WINDOW:
            self._counts *= 0.5
            self._tokens *= 0.5
