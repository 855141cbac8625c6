"""The emulation finds planted faults: each mutation must fail where the true sources pass."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from tests.kernels.cuda import emulation, oracle
from tests.kernels.cuda.emulation import LOCALITY_BAND, Device
from tests.kernels.cuda.oracle import Assignment
from tests.kernels.cuda.steps import step_slots, top_k_ids

MUTATIONS = {
    "row written before all ids are counted": (
        "accumulate",
        "    __syncwarp();\n    Row* row",
        "    Row* row",
    ),
    "no upper bound on expert ids": ("accumulate", "if (e >= 0 && e < p.experts)", "if (e >= 0)"),
    "no lower bound on expert ids": (
        "accumulate",
        "if (e >= 0 && e < p.experts)",
        "if (e < p.experts)",
    ),
    "no bound on slots": ("accumulate", "slot >= 0 && slot < p.slot_limit ?", "slot >= 0 ?"),
    "collective under a mask of half a warp": (
        "accumulate",
        "__shfl_sync(kFull, block, source)",
        "__shfl_sync(0xffffu, block, source)",
    ),
    "collective in a branch that some lanes skip": (
        "accumulate",
        "const unsigned inside = __ballot_sync(kFull, s >=",
        "const unsigned inside = s < 0 ? 0u : __ballot_sync(kFull, s >=",
    ),
    "counts read before they are gathered": (
        "decide",
        "counts + q * kCells, warp, lane);\n  __syncthreads();",
        "counts + q * kCells, warp, lane);",
    ),
    "counts gathered before they are cleared": (
        "decide",
        "counts[i] = 0;\n  __syncthreads();",
        "counts[i] = 0;",
    ),
    "ticket taken before all warps have written": (
        "decide",
        "  __threadfence();\n  __syncthreads();\n  if (threadIdx.x == 0) {",
        "  __threadfence();\n  if (threadIdx.x == 0) {",
    ),
    "ticket not set back": ("decide", "if (*last) *ticket = 0;", ""),
    "barrier that one warp does not reach": (
        "decide",
        "  __syncthreads();  // `last` may be written again",
        "  if (threadIdx.x >= 32) __syncthreads();",
    ),
    "next batch fetched while one is assigned": (
        "assign",
        "    __syncthreads();\n  }\n  for (int w = thread;",
        "  }\n  for (int w = thread;",
    ),
    "no check of block ids": (
        "gather",
        "return block < p.num_blocks ? block : -1;",
        "return block;",
    ),
    "list of blocks read past its end": (
        "gather",
        "at < stop ? p.block_ids[at] : -1",
        "p.block_ids[at]",
    ),
}


def accumulate_is_right(device: Device) -> bool:
    rng = np.random.default_rng(0)
    slots = step_slots(rng, 16, 8, ((0, 40), (5, 20), (0, 3)))
    slots[-1] = 8 * 16 + 3  # one block past the cache, in the guard row below
    ids = top_k_ids(rng, len(slots), 9, 8, 512, np.int32)
    rows = np.zeros((10, 9, 512), np.uint8)
    expected = rows.copy()
    expected[1:9] = oracle.accumulate(ids, slots, rows[1:9], 16)
    for seed in range(8):
        got = rows.copy()
        device.reset(seed)
        device.accumulate(ids, slots, got[1:9], 16)
        if not np.array_equal(got, expected):
            return False
    return True


def decide_is_right(device: Device) -> bool:
    rng = np.random.default_rng(1)
    requests, workers, cells = 11, 600, 3 * 512
    memory = rng.integers(0, 17, (14, cells)).astype(np.uint8)
    rows = memory[2:12]  # block ids -1 and 10 would read the rows around
    block_ids = rng.integers(-1, 11, requests * 20).astype(np.int32)
    offsets = np.arange(0, requests * 20 + 1, 20).astype(np.int32)
    vectors = rng.random((workers, cells)).astype(np.float32)
    reference = oracle.scores(oracle.gather(rows, block_ids, offsets), vectors)
    workspace = device.workspace(requests, cells, workers)
    for seed in range(4):
        device.reset(seed)
        ours, theirs = (
            Assignment(LOCALITY_BAND, np.zeros(workers, np.int32), np.ones(requests, np.int32))
            for _ in range(2)
        )
        out = device.decide(rows, block_ids, offsets, vectors, assignment=ours, workspace=workspace)
        if not np.allclose(out.scores, reference, rtol=1e-5):
            return False
        if not np.array_equal(out.chosen, theirs.run(out.scores)):
            return False
    return True


def holds(check: Callable[[Device], bool], device: Device) -> bool:
    try:
        return check(device)
    except RuntimeError:  # the emulator's report of a broken CUDA rule
        return False


def test_the_checks_pass_on_the_true_sources(device: Device) -> None:
    assert accumulate_is_right(device)
    assert decide_is_right(device)


@pytest.mark.parametrize("name", MUTATIONS)
def test_mutation_is_caught(name: str, tmp_path: Path) -> None:
    if reason := emulation.why_not():
        pytest.skip(reason)
    file, old, new = MUTATIONS[name]
    op, check = (
        ("accumulate", accumulate_is_right) if file == "accumulate" else ("decide", decide_is_right)
    )
    library = emulation.mutated(
        tmp_path / "mutant.so", f"cuda/{file}.cuh", old, new, [f"cuda/{op}.cu"]
    )
    assert not holds(check, Device(library)), f"{name}: the mutated kernel passes"
