"""One line of the report."""

from __future__ import annotations

from dataclasses import asdict, dataclass


@dataclass(frozen=True, slots=True)
class Row:
    """What one compiler made of one kernel for one target.

    Attributes:
        kernel: name, with the shape or the instance.
        backend: `triton` or `cuda`.
        target: `sm_90`, `gfx942`, ...
        compiler: name and version.
        registers: per thread (vector registers on AMD).
        spills: bytes of local memory per thread: stack, spilled registers, scratch.
        shared: static shared memory of a thread block, in bytes.
        wide_loads: instructions that load 128 bits from global memory, also asynchronously.
        batch: most of them between two branches: loads that one trip to memory can serve.
        loads: all instructions that load from global memory.
        global_atomics: instructions that update global memory atomically.
        instructions: in the whole kernel.
    """

    kernel: str
    backend: str
    target: str
    compiler: str
    registers: int
    spills: int
    shared: int
    wide_loads: int
    batch: int
    loads: int
    global_atomics: int
    instructions: int

    def as_dict(self) -> dict[str, object]:
        """Plain data for JSON."""
        return asdict(self)

    @property
    def key(self) -> tuple[str, str, str]:
        """What identifies the row in a report."""
        return self.backend, self.kernel, self.target
