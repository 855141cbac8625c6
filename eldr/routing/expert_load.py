"""Per-worker expert load: which experts the running requests are expected to read in a step."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from eldr.routing import fixed


class ExpertLoad:
    """Fixed-point log survival of every worker slot; adding and removing are exact inverses.

    Attributes:
        cells: L*E.
        load: int32 [slots, L*E], -log survival * 2^13, of the running requests and `other`.
        other: int32 [slots, L*E], part of `load` that measurements add to (or take from) what the
            running requests predict: requests of other routers, and errors of prediction.
        survival: uint8 [slots, L*E], 255 * chance that an expert is not read in a step.
        idle: int64 [slots], row sums of `survival`.
    """

    def __init__(self, cells: int) -> None:
        self.cells = cells
        self._allocate(0)
        self.resize(0)

    def _allocate(self, capacity: int) -> None:
        self._load = np.zeros((capacity, self.cells), np.int32)
        self._other = np.zeros((capacity, self.cells), np.int32)
        self._survival = np.full((capacity, self.cells), fixed.SURVIVAL_ONE, np.uint8)
        self._idle = np.full(capacity, fixed.SURVIVAL_ONE * self.cells, np.int64)

    def resize(self, slots: int) -> None:
        """Makes room for `slots` workers, never fewer than before; new slots are empty."""
        if slots > len(self._idle):
            load, survival, idle = self._load, self._survival, self._idle
            other = self._other
            self._allocate(max(slots, 2 * len(idle)))
            self._load[: len(idle)] = load
            self._other[: len(idle)] = other
            self._survival[: len(idle)] = survival
            self._idle[: len(idle)] = idle
        self.load = self._load[:slots]
        self.other = self._other[:slots]
        self.survival = self._survival[:slots]
        self.idle = self._idle[:slots]

    def add(self, slot: int, step: fixed.U16) -> None:
        """Adds one running request to a slot: the costs uint16 [L*E] of its activation."""
        fixed.shift(self.load, self.survival, self.idle, slot, step, 1)

    def remove(self, slot: int, step: fixed.U16) -> None:
        """Removes what `add` added, exactly."""
        fixed.shift(self.load, self.survival, self.idle, slot, step, -1)

    def clear(self, slot: int) -> None:
        """Forgets everything in a slot."""
        self.load[slot] = self.other[slot] = 0
        self.survival[slot] = fixed.SURVIVAL_ONE
        self.idle[slot] = fixed.SURVIVAL_ONE * self.cells

    def measured(self, slot: int, use: npt.NDArray[np.float64], trust: float) -> None:
        """Blends in the share of recent steps in which each expert was read.

        Args:
            slot: the worker's.
            use: float64 [L*E] in [0, 1].
            trust: 0 keeps the prediction, 1 takes the measurement; in between in log survival.
        """
        top = 1.0 - np.exp(-65535 / fixed.LOG_ONE)
        seen = np.rint(-np.log1p(-np.clip(use, 0.0, top)) * fixed.LOG_ONE)
        own = self.load[slot] - self.other[slot]
        other = np.rint(trust * (seen - own)).astype(np.int32)
        self.load[slot] = own + other
        self.other[slot] = other
        last = len(fixed.SURVIVAL) - 1
        self.survival[slot] = fixed.SURVIVAL[np.clip(self.load[slot], 0, last)]
        self.idle[slot] = int(self.survival[slot].sum(dtype=np.int64))

    def distinct(self) -> npt.NDArray[np.float64]:
        """Expected distinct experts per step of every slot, summed over layers, float64 [slots]."""
        return np.float64(self.cells) - self.idle / np.float64(fixed.SURVIVAL_ONE)
