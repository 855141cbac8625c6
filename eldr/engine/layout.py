"""Which KV cache group co-indexes the block histograms."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class BlockLayout:
    """The group that keeps a request's whole prefix.

    Attributes:
        group: index of the KV cache group.
        block_size: tokens per block of that group.
        blocks: blocks in the pool that all groups share; block 0 is vLLM's null block.
    """

    group: int
    block_size: int
    blocks: int


def find(kv_cache_config: Any) -> BlockLayout:
    """The first full-attention group (MLA counts), or the first attention group.

    A model whose attention layers all slide keeps no whole prefix: the blocks it dropped
    count as uncovered.
    """
    from vllm.v1.kv_cache_interface import AttentionSpec, FullAttentionSpec

    groups = kv_cache_config.kv_cache_groups
    for kind in (FullAttentionSpec, AttentionSpec):
        for index, group in enumerate(groups):
            if all(isinstance(spec, kind) for spec in _specs(group.kv_cache_spec)):
                size = int(group.kv_cache_spec.block_size)
                return BlockLayout(index, size, int(kv_cache_config.num_blocks))
    raise ValueError(
        "ELDR needs a KV cache with attention blocks, and this model has "
        f"{len(groups)} KV cache groups without any"
    )


def _specs(spec: Any) -> list[Any]:
    """A group's specs: one, or one per layer where they differ in size only."""
    return list(getattr(spec, "kv_cache_specs", {"": spec}).values())
