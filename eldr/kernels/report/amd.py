"""Reads AMD machine code from the assembly that Triton keeps beside it."""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import dataclass

_FIELD = r"\.{}:\s+(\d+)"
# An instruction's opcode, or a label (the group is then empty).
_LINE = re.compile(r"^(?:\s+([a-z]+_[a-z0-9_]+)\s|\.LBB\w+:)", re.MULTILINE)


@dataclass(frozen=True, slots=True)
class Usage:
    """One kernel."""

    registers: int
    spills: int
    code: list[str]  # opcodes in order, and labels as ""

    @property
    def opcodes(self) -> Counter[str]:
        """How often each occurs."""
        return Counter(op for op in self.code if op)

    @property
    def wide_loads(self) -> int:
        """Loads of 128 bits from global memory."""
        return sum(map(_wide, self.code))

    def batch(self) -> int:
        """Most of them between two branches."""
        most = here = 0
        for opcode in self.code:
            if not opcode or opcode.startswith(("s_cbranch", "s_branch", "s_barrier")):
                here = 0
            elif _wide(opcode):
                here += 1
                most = max(most, here)
        return most


def _wide(opcode: str) -> bool:
    load = opcode.startswith(("global_load", "buffer_load"))
    return load and ("dwordx4" in opcode or opcode.endswith("_b128"))


def kernel(assembly: str) -> Usage:
    """The only kernel in `assembly`.

    Raises:
        ValueError: the metadata at its end lacks a field.
    """

    def field(name: str) -> int:
        match = re.search(_FIELD.format(name), assembly)
        if match is None:
            raise ValueError(f"the assembly has no .{name}")
        return int(match[1])

    spilled = 4 * (field("vgpr_spill_count") + field("sgpr_spill_count"))
    scratch = field("private_segment_fixed_size")
    return Usage(field("vgpr_count"), max(spilled, scratch), _LINE.findall(assembly))
