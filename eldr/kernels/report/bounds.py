"""What the report holds every kernel to. A broken bound is a problem, and the report then fails.

* No spills and no scratch, anywhere.
* 128-bit loads where the data allows them: where a thread's share of a tile, and every row the
  tile is read from, is a multiple of 16 bytes.
* Batches: loads that do not depend on each other are issued together, not one trip to memory each.
* Registers: so many that the intended number of thread blocks fits a multiprocessor.
* Global atomics: none but the two tickets of the CUDA decision.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

import torch

from eldr.kernels.device_kernel import Launch
from eldr.kernels.report.row import Row


@dataclass(frozen=True, slots=True)
class Bounds:
    """Limits of one kernel on one target; see `Row` for the fields."""

    registers: int
    wide_loads: int = 0
    batch: int = 0
    global_atomics: int = 0


# Registers per thread. NVIDIA: 65536 / (registers * threads) thread blocks. AMD: 512 / registers
# waves of a SIMD, so 128 leaves four.
_TRITON_REGISTERS = {
    "accumulate_kernel": 80,  # one warp a thread block: 25 of the 32 that fit otherwise
    "gather_kernel": 80,
    "decide_kernel": 96,
    "score_rows_kernel": 80,
    "score_tile_kernel": 128,
    "score_finish_kernel": 48,
    "assign_kernel": 96,
}
_AMD_REGISTERS = 128
# Least number of 128-bit loads: rows; rows and vectors.
_TRITON_WIDE = {
    "gather_kernel": 1,
    "decide_kernel": 2,
    "score_rows_kernel": 2,
    "score_tile_kernel": 2,
}


def of_triton(launch: Launch, target: str) -> Bounds:
    """Bounds of a Triton launch.

    Raises:
        KeyError: a kernel without bounds; give it some above.
    """
    name = launch.kernel.__name__
    amd = target.startswith("gfx")
    registers = _AMD_REGISTERS if amd else _TRITON_REGISTERS[name]
    if name == "accumulate_kernel":
        return Bounds(registers, int(_ids_fill_lanes(launch, 64 if amd else 32)))
    return Bounds(registers, _TRITON_WIDE.get(name, 0))


def _ids_fill_lanes(launch: Launch, lanes: int) -> bool:
    """True where every lane of the warp gets 16 bytes of a tile of ids."""
    given = launch.arguments
    ids = next(v for v in given.values() if isinstance(v, torch.Tensor))
    size = ids.element_size()
    tile_bytes: int = given["STEP"] * given["KP"] * size
    row_bytes: int = given["K"] * size
    return row_bytes % 16 == 0 and tile_bytes // (lanes * launch.options["num_warps"]) >= 16


def of_cuda(kernel: str) -> Bounds:
    """Bounds of an instance of the CUDA kernels, by its name expression.

    Raises:
        ValueError: not one of ours.
    """
    if match := re.fullmatch(r"eldr::accumulate<\w+, \w+, \d+, (\d+)>", kernel):
        return Bounds(48, int(match[1] == "16"))  # 48: five thread blocks of 256 threads
    if match := re.fullmatch(r"eldr::decide<\w+, (true|false), (\d)>", kernel):
        registers = 64 if match[2] == "1" else 128  # two thread blocks of 512 threads, or one
        wide = match[1] == "true"  # then a lane has several rows in flight, and reads vectors too
        return Bounds(registers, 9 if wide else 0, 8 if wide else 0, global_atomics=2)
    raise ValueError(f"{kernel}: no bounds for it")


def problems(row: Row, bounds: Bounds) -> list[str]:
    """Sentences about what is broken."""
    where = f"{row.kernel} ({row.backend}, {row.target})"
    found = []
    if row.spills:
        found.append(f"{where}: spills {row.spills} bytes per thread, expected none")
    if row.registers > bounds.registers:
        found.append(f"{where}: {row.registers} registers, expected at most {bounds.registers}")
    if row.wide_loads < bounds.wide_loads:
        found.append(
            f"{where}: {row.wide_loads} 128-bit loads, expected at least {bounds.wide_loads}"
        )
    if row.batch < bounds.batch:
        found.append(
            f"{where}: {row.batch} 128-bit loads without a branch, expected at least {bounds.batch}"
        )
    if row.global_atomics > bounds.global_atomics:
        found.append(
            f"{where}: {row.global_atomics} global atomics, expected at most "
            f"{bounds.global_atomics}"
        )
    return found
