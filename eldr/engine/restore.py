"""The host store's scheduler side: which filled blocks to save, which loaded ones to restore."""

from __future__ import annotations

import logging
from collections.abc import Hashable, Sequence
from typing import Any

from eldr.engine.hoststore import Move, StoreIndex, StoreTotals
from eldr.engine.uncovered import UncoveredBlocks

logger = logging.getLogger("vllm.eldr")
NULL_BLOCK = 0


class StorePlanner:
    """Turns what the scheduler sees into copies for the worker.

    vLLM hashes blocks of one size; where that is not the size of the group that co-indexes
    the histograms, nothing is saved, which is said once.
    """

    def __init__(self, slots: int, block_size: int, uncovered: UncoveredBlocks) -> None:
        self._index = StoreIndex(slots)
        self._size = block_size
        self._uncovered = uncovered
        self._restores: dict[int, int] = {}  # by block: the latest load of a block counts
        self._saving: dict[int, list[tuple[Hashable, int]]] = {}
        self._warned = False

    @property
    def totals(self) -> StoreTotals:
        """Hits, misses, evictions and rows so far."""
        return self._index.totals

    def loaded(self, request: Any, table: Sequence[int], start: int, stop: int) -> None:
        """A connector fills the tokens [start, stop): whole blocks whose row is known come back."""
        hashes = self._hashes(request)
        for index in range(-(-start // self._size), min(stop // self._size, len(hashes))):
            slot = self._index.find(hashes[index])
            if slot is not None:
                self._restores[table[index]] = slot
                self._uncovered.discard(table[index])

    def take_restores(self) -> tuple[Move, ...]:
        """Copies to make before the next step that computes anything."""
        moves = tuple((slot, block) for block, slot in self._restores.items())
        self._restores.clear()
        return moves

    def filled(
        self, step: int, request: Any, table: Sequence[int], start: int, stop: int
    ) -> list[Move]:
        """Copies to make after the step that computes the tokens [start, stop) of a request."""
        moves = []
        for index in range(start // self._size, stop // self._size):
            block = table[index]
            hashes = self._hashes(request)
            if block == NULL_BLOCK or block in self._uncovered or index >= len(hashes):
                continue
            slot = self._index.reserve(hashes[index])
            if slot is not None:
                moves.append((block, slot))
                self._saving.setdefault(step, []).append((hashes[index], slot))
        return moves

    def received(self, step: int) -> None:
        """The step's copies have arrived."""
        self._index.saved(self._saving.pop(step, ()))

    def _hashes(self, request: Any) -> Sequence[Hashable]:
        hashes: Sequence[Hashable] = request.block_hashes
        if len(hashes) <= request.num_tokens // self._size:
            return hashes
        if not self._warned:
            self._warned = True
            logger.warning(
                "ELDR: block hashes are finer than KV blocks; the host store stays empty"
            )
        return ()
