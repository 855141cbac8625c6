"""gather_signatures: sums each request's block rows into its signature.

counts[r,l,e] = sum over i in [offsets[r], offsets[r+1]) of hist[block_ids[i],l,e]
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from eldr.kernels import checks
from eldr.kernels.arrays import takes_arrays
from eldr.kernels.device_kernel import DeviceFunction, ceil_div, device_kernel
from eldr.kernels.library import declare

if TYPE_CHECKING:
    import triton.language as tl

COLUMNS = 512  # cells of one program: 16 bytes of a row per lane of a warp with uint8
ROWS = 16  # block rows in flight


def gather_signatures_ref(
    histograms: Tensor, block_ids: Tensor, offsets: Tensor, counts: Tensor
) -> None:
    """The equation in plain torch; arguments as `gather_signatures`, `counts` is overwritten."""
    num_blocks, requests = histograms.shape[0], offsets.numel() - 1
    position = torch.arange(block_ids.numel(), device=block_ids.device)
    # Request of each position; positions before the first or after the last offset belong to none.
    request = torch.searchsorted(offsets.long(), position, right=True) - 1
    used = (request >= 0) & (request < requests) & (block_ids >= 0) & (block_ids < num_blocks)
    rows = histograms[block_ids[used].long()].int()
    counts.zero_().index_add_(0, request[used], rows)


@DeviceFunction
def sum_rows(  # type: ignore[no-untyped-def]
    hist_ptr, ids_ptr, offsets_ptr, r, d, num_ids, num_blocks, hist_stride, cells,
    COLUMNS: tl.constexpr, ROWS: tl.constexpr, CAP: tl.constexpr, STAGES: tl.constexpr,
) -> tl.tensor:  # fmt: skip
    """Sums the cells `d` of the rows of request `r`, ROWS rows at a time -> int32 [COLUMNS]."""
    j = tl.arange(0, ROWS)
    begin = tl.maximum(tl.load(offsets_ptr + r), 0)
    end = tl.minimum(tl.load(offsets_ptr + r + 1), num_ids)
    total = tl.zeros([COLUMNS], tl.int32)
    for i in tl.range(begin, end, ROWS, num_stages=STAGES):
        block = tl.load(ids_ptr + i + j, mask=i + j < end, other=-1).to(tl.int64)
        valid = (block >= 0) & (block < num_blocks)
        cell = block[:, None] * hist_stride + d[None, :]
        mask = valid[:, None] & (d < cells)[None, :]
        total += tl.sum(tl.load(hist_ptr + cell, mask=mask, other=0).to(tl.int32), 0)
        total = tl.minimum(total, CAP)
    return total


@device_kernel("num_ids")
def gather_kernel(  # type: ignore[no-untyped-def]
    hist_ptr, ids_ptr, offsets_ptr, counts_ptr, num_ids, num_blocks, hist_stride, cells,
    COLUMNS: tl.constexpr, ROWS: tl.constexpr, CAP: tl.constexpr, STAGES: tl.constexpr,
) -> None:  # fmt: skip
    """counts[r,d] = sum over the request's blocks b of hist[b,d].

    Grid (requests, chunks of COLUMNS cells). Each program sums its columns of the request's rows,
    ROWS at a time, and writes counts[r, chunk] once.
    """
    r = tl.program_id(0)
    d = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    total = sum_rows(
        hist_ptr, ids_ptr, offsets_ptr, r, d, num_ids, num_blocks, hist_stride, cells,
        COLUMNS, ROWS, CAP, STAGES,
    )  # fmt: skip
    tl.store(counts_ptr + r.to(tl.int64) * cells + d, total, mask=d < cells)


def gather_settings(histograms: Tensor) -> tuple[dict[str, int], dict[str, int]]:
    """(constants, launch options) of the kernels that gather; closed form, no tuning."""
    # Sums stop where one more batch of rows could pass int32: they never wrap.
    cap = checks.INT32_MAX - ROWS * torch.iinfo(histograms.dtype).max
    # The ROCm compiler keeps every stage in registers.
    stages = 1 if torch.version.hip else 3
    return {"COLUMNS": COLUMNS, "ROWS": ROWS, "CAP": cap, "STAGES": stages}, {"num_warps": 4}


def gather_signatures_triton(
    histograms: Tensor, block_ids: Tensor, offsets: Tensor, counts: Tensor
) -> None:
    """Launches `gather_kernel`; arguments as `gather_signatures`, already checked."""
    num_blocks, layers, experts = histograms.shape
    constants, options = gather_settings(histograms)
    grid = (offsets.numel() - 1, ceil_div(layers * experts, COLUMNS))
    gather_kernel[grid](
        histograms, block_ids, offsets, counts, block_ids.numel(), num_blocks,
        histograms.stride(0), layers * experts, **constants, **options,
    )  # fmt: skip


_op = declare(
    "gather_signatures(Tensor histograms, Tensor block_ids, Tensor offsets, Tensor(a!) counts)"
    " -> ()",
    gather_signatures_ref,
)


def check_blocks(histograms: Tensor, block_ids: Tensor, offsets: Tensor) -> int:
    """Checks the ragged block lists and returns the number of requests R.

    Raises:
        TypeError, ValueError: as `gather_signatures`.
    """
    checks.histograms(histograms)
    checks.tensor("block_ids", block_ids, torch.int32, ("N",))
    checks.tensor("offsets", offsets, torch.int32, ("R + 1",))
    if offsets.numel() == 0:
        raise ValueError("offsets: empty, expected R + 1 ascending positions in block_ids")
    checks.contiguous(block_ids=block_ids, offsets=offsets)
    checks.same_device("histograms", histograms.device, block_ids=block_ids, offsets=offsets)
    checks.within("block_ids", block_ids, 0, histograms.shape[0] - 1, "the blocks")
    checks.within("offsets", offsets, 0, block_ids.numel(), "the positions in block_ids")
    if offsets.device.type == "cpu":
        _check_lengths(histograms, offsets)
    return offsets.numel() - 1


def _check_lengths(histograms: Tensor, offsets: Tensor) -> None:
    lengths = offsets.diff()
    checks.within("offsets", lengths, 0, checks.INT32_MAX, "offsets must ascend (differences)")
    most = checks.INT32_MAX // torch.iinfo(histograms.dtype).max
    checks.within("offsets", lengths, 0, most, "the blocks whose sum fits int32 (differences)")


@takes_arrays
def gather_signatures(
    histograms: Tensor, block_ids: Tensor, offsets: Tensor, *, counts: Tensor | None = None
) -> Tensor:
    """Signatures of R requests as raw counts.

    Devices add nothing for block ids that do not exist, since telling would need a synchronisation.

    Args:
        histograms: uint8 or uint16 [num_blocks, L, E], each block's [L, E] dense.
        block_ids: int32 [N], the requests' blocks one after the other.
        offsets: int32 [R + 1], ascending: request r owns block_ids[offsets[r]:offsets[r + 1]].
        counts: int32 [R, L, E] to write into; allocated when None.

    Returns:
        counts, int32 [R, L, E].

    Raises:
        TypeError: an argument of another type or dtype.
        ValueError: another shape, device or layout; on a CPU also a block id outside
            [0, num_blocks), offsets that do not ascend within [0, N], or so many blocks that a
            count could pass int32.
    """
    requests = check_blocks(histograms, block_ids, offsets)
    shape = (requests, *histograms.shape[1:])
    if counts is None:
        counts = torch.empty(shape, dtype=torch.int32, device=histograms.device)
    else:
        checks.tensor("counts", counts, torch.int32, shape)
        checks.contiguous(counts=counts)
        checks.same_device("histograms", histograms.device, counts=counts)
    if requests:
        _op(histograms, block_ids, offsets, counts)
    return counts
