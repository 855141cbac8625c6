"""Per-worker expert load: which experts the running requests are expected to read in a step."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from eldr.routing import fixed


class ExpertLoad:
    """Fixed-point log survival of every worker slot; adding and removing are exact inverses.

    Attributes:
        cells: L*E.
        load: int32 [slots, L*E], -log survival * 2^13.
        survival: uint8 [slots, L*E], 255 * chance that an expert is not read in a step.
        idle: int64 [slots], row sums of `survival`.
    """

    def __init__(self, cells: int) -> None:
        self.cells = cells
        self._allocate(0)
        self.resize(0)

    def _allocate(self, capacity: int) -> None:
        self._load = np.zeros((capacity, self.cells), np.int32)
        self._survival = np.full((capacity, self.cells), fixed.SURVIVAL_ONE, np.uint8)
        self._idle = np.full(capacity, fixed.SURVIVAL_ONE * self.cells, np.int64)

    def resize(self, slots: int) -> None:
        """Makes room for `slots` workers, never fewer than before; new slots are empty."""
        if slots > len(self._idle):
            load, survival, idle = self._load, self._survival, self._idle
            self._allocate(max(slots, 2 * len(idle)))
            self._load[: len(idle)] = load
            self._survival[: len(idle)] = survival
            self._idle[: len(idle)] = idle
        self.load = self._load[:slots]
        self.survival = self._survival[:slots]
        self.idle = self._idle[:slots]

    def add(self, slot: int, activation: fixed.I16) -> None:
        """Adds one running request's activation int16 [L*E] to a slot."""
        self.idle[slot] = fixed.shift(self.load[slot], activation, 1, self.survival[slot])

    def remove(self, slot: int, activation: fixed.I16) -> None:
        """Removes what `add` added, exactly."""
        self.idle[slot] = fixed.shift(self.load[slot], activation, -1, self.survival[slot])

    def clear(self, slot: int) -> None:
        """Forgets everything in a slot."""
        self.load[slot] = 0
        self.survival[slot] = fixed.SURVIVAL_ONE
        self.idle[slot] = fixed.SURVIVAL_ONE * self.cells

    def distinct(self) -> npt.NDArray[np.float64]:
        """Expected distinct experts per step of every slot, summed over layers, float64 [slots]."""
        return np.float64(self.cells) - self.idle / np.float64(fixed.SURVIVAL_ONE)

    def added(self, activation: fixed.I16) -> npt.NDArray[np.float64]:
        """Distinct experts that a request would add to every slot's step, float64 [slots]."""
        scale = 1.0 / (fixed.P_ONE * fixed.SURVIVAL_ONE)
        return fixed.dots(activation, self.survival) * np.float64(scale)
