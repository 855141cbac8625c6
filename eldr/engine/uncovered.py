"""KV blocks whose histogram row does not hold what the block holds.

A row is right when every token of its block was computed here, each once. That fails for
blocks that a connector filled, blocks made by copying part of another one, and blocks in which
rejected draft tokens were overwritten. The device cannot see any of this, the scheduler can.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence


class UncoveredBlocks:
    """The set of such blocks; a block leaves it when its first slot is computed again.

    That is the rule by which the device starts a row anew, so both stay in step.
    """

    def __init__(self, block_size: int) -> None:
        self._block_size = block_size
        self._blocks: set[int] = set()

    def __len__(self) -> int:
        return len(self._blocks)

    def __contains__(self, block: int) -> bool:
        return block in self._blocks

    def add(self, blocks: Iterable[int]) -> None:
        """Marks blocks whose content came from elsewhere."""
        self._blocks.update(blocks)

    def add_tokens(self, table: Sequence[int], start: int, stop: int) -> None:
        """Marks the blocks of `table` that hold any token of [start, stop)."""
        if start < stop:
            first, last = start // self._block_size, (stop - 1) // self._block_size
            self.add(table[first : last + 1])

    def discard(self, block: int) -> None:
        """Unmarks a block whose row was put in order otherwise."""
        self._blocks.discard(block)

    def computed(self, table: Sequence[int], start: int, stop: int) -> None:
        """Unmarks the blocks of `table` whose first slot is among the tokens [start, stop)."""
        if self._blocks:
            first = -(-start // self._block_size)
            self._blocks.difference_update(table[first : -(-stop // self._block_size)])
