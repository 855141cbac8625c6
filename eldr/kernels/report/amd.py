"""Reads AMD machine code from the assembly that Triton keeps beside it."""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import dataclass

_FIELD = r"\.{}:\s+(\d+)"
_INSTRUCTION = re.compile(r"^\s+([a-z]+_[a-z0-9_]+)\s", re.MULTILINE)


@dataclass(frozen=True, slots=True)
class Usage:
    """One kernel."""

    registers: int
    spills: int
    opcodes: Counter[str]


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
    return Usage(
        field("vgpr_count"), max(spilled, scratch), Counter(_INSTRUCTION.findall(assembly))
    )
