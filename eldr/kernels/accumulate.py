"""accumulate_hits: adds a step's expert choices to the block histograms, all layers at once.

    fresh(b)    = some token t of the step has slots[t] == b * block_size
    hist[b,l,e] = (0 if fresh(b) else hist[b,l,e])
                  + #{(t, k) : slots[t] // block_size == b and ids[t,l,k] == e}

A block that gets its first slot written starts anew, so the histograms follow the KV cache through
reuse, eviction, preemption and chunked prefill without any message. Counts stop at the dtype's
maximum; they never wrap.
"""

from __future__ import annotations

import torch
from torch import Tensor

from eldr.kernels import checks
from eldr.kernels.library import declare

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


_op = declare(
    "accumulate_hits(Tensor topk_ids, Tensor slot_mapping, int block_size, Tensor(a!) histograms)"
    " -> ()",
    accumulate_hits_ref,
)


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
    if top_k > 1 and topk_ids.stride(2) != 1:
        raise ValueError(f"topk_ids: the last dimension must be dense, got {topk_ids.stride()}")
    checks.contiguous(slot_mapping=slot_mapping)
    checks.same_device(
        "histograms", histograms.device, topk_ids=topk_ids, slot_mapping=slot_mapping
    )
    checks.within("slot_mapping", slot_mapping, -1, num_blocks * block_size - 1, "the KV slots")
    if tokens:
        _op(topk_ids, slot_mapping, block_size, histograms)
