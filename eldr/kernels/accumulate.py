"""accumulate_hits: adds a step's expert choices to the block histograms, all layers at once.

    fresh(b)    = some token t of the step has slots[t] == b * block_size
    hist[b,l,e] = (0 if fresh(b) else hist[b,l,e])
                  + #{(t, k) : slots[t] // block_size == b and ids[t,l,k] == e}

A block that gets its first slot written starts anew, so the histograms follow the KV cache through
reuse, eviction, preemption and chunked prefill without any message. Counts stop at the dtype's
maximum; they never wrap.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from eldr.kernels import checks
from eldr.kernels.arrays import takes_arrays
from eldr.kernels.device_kernel import ceil_div, device_kernel, power_of_two
from eldr.kernels.library import declare

if TYPE_CHECKING:
    import triton.language as tl

ID_DTYPES = (torch.int32, torch.uint8, torch.uint16, torch.int64)


def accumulate_hits_ref(
    topk_ids: Tensor, slot_mapping: Tensor, block_size: int, histograms: Tensor
) -> None:
    """The equation in plain torch, for any order of tokens; arguments as `accumulate_hits`."""
    num_blocks, layers, experts = histograms.shape
    valid = (slot_mapping >= 0) & (slot_mapping < num_blocks * block_size)
    slots, ids = slot_mapping[valid], topk_ids[valid].long()
    # Same bits under a dtype that torch can index-assign; uint16 cannot.
    rows = histograms.view(torch.int16) if histograms.dtype == torch.uint16 else histograms
    rows[slots[slots % block_size == 0] // block_size] = 0

    touched, row = torch.unique(slots // block_size, return_inverse=True)
    layer = torch.arange(layers, device=ids.device)[:, None]
    cell = (row[:, None, None] * layers + layer) * experts + ids
    hits = cell[(ids >= 0) & (ids < experts)]
    added = torch.bincount(hits, minlength=touched.numel() * layers * experts)
    total = histograms[touched].long() + added.view(-1, layers, experts)
    limit = torch.iinfo(histograms.dtype).max
    rows[touched] = total.clamp(max=limit).to(histograms.dtype).view(rows.dtype)


@device_kernel("tokens")
def accumulate_kernel(  # type: ignore[no-untyped-def]
    ids_ptr, slots_ptr, hist_ptr, tokens, hist_stride, num_blocks,
    STRIDE_T: tl.constexpr, STRIDE_L: tl.constexpr, LAYERS: tl.constexpr, K: tl.constexpr,
    E: tl.constexpr, BS: tl.constexpr, LIMIT: tl.constexpr, KP: tl.constexpr, EP: tl.constexpr,
    BSP: tl.constexpr, TILE: tl.constexpr, STEP: tl.constexpr, LC: tl.constexpr,
) -> None:  # fmt: skip
    """hist[b,l,:] = min((0 if fresh(b) else hist[b,l,:]) + histogram(ids of b's tokens), LIMIT).

    Grid (tiles of TILE tokens, groups of LC layers). A block belongs to the program whose tile
    holds its first token of the step; that program reads the block's tokens (within BS positions
    from there), counts their ids on chip and writes each row [E] once. No other program writes it,
    so there are no atomics in global memory.
    """
    first_token = tl.program_id(0) * TILE
    t = first_token + tl.arange(0, TILE)
    slot = tl.load(slots_ptr + t, mask=t < tokens, other=-1)
    before = tl.load(slots_ptr + t - 1, mask=(t > 0) & (t < tokens), other=-1)
    block = slot // BS
    same = (before >= block * BS) & (before < block * BS + BS)
    # A candidate's predecessor is elsewhere; it may still follow its block across padding.
    candidate = (slot >= 0) & (block < num_blocks) & (same == 0)
    position = tl.arange(0, BSP)
    k = tl.arange(0, KP)
    e = tl.arange(0, EP)
    last = first_token - 1
    for _ in range(tl.sum(candidate.to(tl.int32), 0)):
        head = tl.min(tl.where(candidate & (t > last), t, 0x7FFFFFFF), 0)
        last = head
        base = (tl.load(slots_ptr + head) // BS) * BS
        back = head - 1 - position
        earlier = tl.load(slots_ptr + back, mask=(position < BS - 1) & (back >= 0), other=-1)
        seen = tl.sum(((earlier >= base) & (earlier < base + BS)).to(tl.int32), 0)
        ahead = head + position
        s = tl.load(slots_ptr + ahead, mask=(position < BS) & (ahead < tokens), other=-1)
        fresh = tl.sum((s == base).to(tl.int32), 0)
        keep = tl.where(fresh > 0, 0, E)  # cells of the old row that count
        if seen == 0:
            for i in range(LC):
                layer = tl.program_id(1) * LC + i
                if layer < LAYERS:
                    total = tl.zeros([EP], tl.int32)
                    for step in range(0, BSP, STEP):
                        token = head + step + tl.arange(0, STEP)
                        if STEP == BSP:  # one step: the block's slots are already here
                            at = s
                        else:
                            inside = (step + tl.arange(0, STEP) < BS) & (token < tokens)
                            at = tl.load(slots_ptr + token, mask=inside, other=-1)
                        mine = (at >= base) & (at < base + BS)
                        cell = token.to(tl.int64)[:, None] * STRIDE_T
                        cell += layer.to(tl.int64) * STRIDE_L
                        used = mine[:, None] & (k < K)[None, :]
                        ids = tl.load(ids_ptr + cell + k[None, :], mask=used, other=0)
                        if ids.dtype.primitive_bitwidth < 32:  # E may not fit the ids' own dtype
                            ids = ids.to(tl.int32)
                        hit = used & (ids >= 0) & (ids < E)
                        flat = tl.reshape(tl.where(hit, ids, 0).to(tl.int32), [STEP * KP])
                        total += tl.histogram(flat, EP, mask=tl.reshape(hit, [STEP * KP]))
                    row = hist_ptr + (base // BS) * hist_stride + layer * E + e
                    total += tl.load(row, mask=e < keep, other=0).to(tl.int32)
                    total = tl.minimum(total, LIMIT)
                    tl.store(row, total.to(hist_ptr.dtype.element_ty), mask=e < E)


def accumulate_settings(
    topk_ids: Tensor, block_size: int, histograms: Tensor
) -> tuple[dict[str, int], dict[str, int]]:
    """(constants, launch options) of `accumulate_kernel`; closed form, no tuning at run time."""
    _, layers, top_k = topk_ids.shape
    experts = histograms.shape[2]
    kp, bsp = power_of_two(top_k), power_of_two(block_size)
    constants = {
        "STRIDE_T": topk_ids.stride(0),
        "STRIDE_L": topk_ids.stride(1),
        "LAYERS": layers,
        "K": top_k,
        "E": experts,
        "BS": block_size,
        "LIMIT": torch.iinfo(histograms.dtype).max,
        "KP": kp,
        "EP": power_of_two(experts, least=32),
        "BSP": bsp,
        "TILE": 16,
        "STEP": min(bsp, max(1, 512 // kp)),  # ids held at once: at most 512
        "LC": min(4, layers),
    }
    # One warp: more would split a row of ids and lose the 128-bit loads.
    return constants, {"num_warps": 1, "num_stages": 1}


def accumulate_hits_triton(
    topk_ids: Tensor, slot_mapping: Tensor, block_size: int, histograms: Tensor
) -> None:
    """Launches `accumulate_kernel`; arguments as `accumulate_hits`, already checked."""
    constants, options = accumulate_settings(topk_ids, block_size, histograms)
    tokens, layers, _ = topk_ids.shape
    grid = (ceil_div(tokens, constants["TILE"]), ceil_div(layers, constants["LC"]))
    num_blocks = histograms.shape[0]
    launch: Any = accumulate_kernel[grid]
    launch(
        topk_ids, slot_mapping, histograms, tokens, histograms.stride(0), num_blocks,
        **constants, **options,
    )  # fmt: skip


_op = declare(
    "accumulate_hits(Tensor topk_ids, Tensor slot_mapping, int block_size, Tensor(a!) histograms)"
    " -> ()",
    accumulate_hits_ref,
)


@takes_arrays
def accumulate_hits(
    topk_ids: Tensor, slot_mapping: Tensor, block_size: int, histograms: Tensor
) -> None:
    """Adds the hits of one step to `histograms`, in place.

    On a device the tokens of one block must lie within `block_size` consecutive positions of the
    step, padding allowed between them, as a scheduler lays them out; on a CPU any order is exact.
    Devices ignore slots of blocks that do not exist, since telling would need a synchronisation.

    Args:
        topk_ids: logical expert ids [T, L, K]; int32, uint8, uint16 or int64; the last dimension
            dense, the others strided as you like. Ids outside [0, E) are ignored.
        slot_mapping: int64 [T], block * block_size + offset of each token's KV; -1 = padding.
        block_size: tokens per KV block, at most what the histograms' dtype can count.
        histograms: uint8 or uint16 [num_blocks, L, E], each block's [L, E] dense; blocks may be
            strided (one layer of a larger array).

    Raises:
        TypeError: an argument of another type or dtype.
        ValueError: another shape, device or layout; block_size out of range; on a CPU also a slot
            outside [-1, num_blocks * block_size).
    """
    checks.histograms(histograms)
    num_blocks, layers, _ = histograms.shape
    checks.tensor("topk_ids", topk_ids, ID_DTYPES, ("T", layers, "K"))
    tokens, _, top_k = topk_ids.shape
    checks.tensor("slot_mapping", slot_mapping, torch.int64, (tokens,))
    limit = torch.iinfo(histograms.dtype).max
    checks.integer("block_size", block_size, 1, limit, f", what {histograms.dtype} can count")
    if tokens and top_k > 1 and topk_ids.stride(2) != 1:
        raise ValueError(f"topk_ids: the last dimension must be dense, got {topk_ids.stride()}")
    checks.contiguous(slot_mapping=slot_mapping)
    checks.same_device(
        "histograms", histograms.device, topk_ids=topk_ids, slot_mapping=slot_mapping
    )
    checks.within("slot_mapping", slot_mapping, -1, num_blocks * block_size - 1, "the KV slots")
    if tokens:
        _op(topk_ids, slot_mapping, block_size, histograms)
