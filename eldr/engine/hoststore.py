"""The optional host store: a prefix that returns from elsewhere has its signature again.

The row of a full KV block is copied to the host when the block fills, on the engine's own
output copy, and kept under vLLM's KV block hash, which names the block's tokens and all before
them. When a connector brings a block with that hash back, the row is copied to the block's new
place. The index lives with the scheduler, which knows hashes and loads; the rows live with the
worker. The index decides everything, so the two agree about slot numbers only.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass, replace

import torch

Move = tuple[int, int]


@dataclass(frozen=True, slots=True)
class StoreTotals:
    """Loaded blocks whose row was there (hits) or not (misses), rows pushed out, rows held."""

    hits: int = 0
    misses: int = 0
    evictions: int = 0
    rows: int = 0


class StoreIndex:
    """Which hash is in which slot; the least recently used makes room. Not thread-safe.

    A slot is found only once `saved` says that its row has arrived.
    """

    def __init__(self, slots: int) -> None:
        self._free = list(range(slots - 1, -1, -1))
        self._slots: OrderedDict[Hashable, int] = OrderedDict()
        self._arrived: set[Hashable] = set()
        self.totals = StoreTotals()

    def reserve(self, key: Hashable) -> int | None:
        """A slot for a row to come; None if the key has one already."""
        if key in self._slots:
            self._slots.move_to_end(key)
            return None
        if not self._free:
            oldest, slot = self._slots.popitem(last=False)
            self._arrived.discard(oldest)
            self._free.append(slot)
            self.totals = replace(self.totals, evictions=self.totals.evictions + 1)
        slot = self._slots[key] = self._free.pop()
        self.totals = replace(self.totals, rows=len(self._slots))
        return slot

    def saved(self, entries: Iterable[tuple[Hashable, int]]) -> None:
        """The rows of these (key, slot) have arrived; those pushed out meanwhile do not count."""
        self._arrived.update(key for key, slot in entries if self._slots.get(key) == slot)

    def find(self, key: Hashable) -> int | None:
        """The slot that holds the key's row, or None; counts a hit or a miss."""
        if key not in self._arrived:
            self.totals = replace(self.totals, misses=self.totals.misses + 1)
            return None
        self._slots.move_to_end(key)
        self.totals = replace(self.totals, hits=self.totals.hits + 1)
        return self._slots[key]


class HostRows:
    """The rows [slots, L, E] on the host, page-locked beside a GPU, and where they come from."""

    def __init__(self, slots: int, histograms: torch.Tensor) -> None:
        # torch indexes int16 but not uint16; the bits are the same.
        wide = histograms.dtype is torch.uint16
        self._device = histograms.view(torch.int16) if wide else histograms
        shape = (slots, *histograms.shape[1:])
        self._pinned = histograms.device.type == "cuda"
        self._rows = torch.zeros(shape, dtype=self._device.dtype, pin_memory=self._pinned)

    @property
    def bytes(self) -> int:
        """Host memory of the rows."""
        return self._rows.numel() * self._rows.element_size()

    def restore(self, moves: Sequence[Move]) -> None:
        """Copies host slots to blocks, before the step's hits are added.

        Args:
            moves: (slot, block).
        """
        slots, blocks = (torch.tensor(column) for column in zip(*moves, strict=True))
        rows = self._rows.index_select(0, slots)
        if self._pinned:
            rows, blocks = rows.pin_memory(), blocks.pin_memory()
        device = self._device.device
        self._device.index_copy_(
            0, blocks.to(device, non_blocking=True), rows.to(device, non_blocking=True)
        )

    def save(self, moves: Sequence[Move]) -> RowsOnDevice:
        """Takes the rows of blocks, after the step's hits are added.

        Args:
            moves: (block, slot).
        """
        blocks, slots = (torch.tensor(column) for column in zip(*moves, strict=True))
        if self._pinned:
            blocks = blocks.pin_memory()
        blocks = blocks.to(self._device.device, non_blocking=True)
        return RowsOnDevice(self._rows, slots, self._device.index_select(0, blocks))


class RowsOnDevice:
    """Rows on their way to the host, with the engine's own output copy."""

    def __init__(self, target: torch.Tensor, slots: torch.Tensor, rows: torch.Tensor) -> None:
        self._target, self._slots, self._rows = target, slots, rows

    def enqueue_copy(self) -> None:
        """Copies on the current stream, without waiting."""
        self._host = self._rows.to("cpu", non_blocking=True)

    def finish(self) -> None:
        """Puts the rows into their slots; the copy must be complete."""
        self._target.index_copy_(0, self._slots, self._host)
