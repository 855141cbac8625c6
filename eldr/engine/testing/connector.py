"""A KV connector that keeps every full block in this process's memory and brings it back.

vLLM's ExampleConnector stores whole prompts at once and answers a negative number of tokens for
a prompt of one, so it takes neither chunked prefill nor arbitrary traffic. This one works block by
block, under vLLM's own block hashes: prefixes that another prompt shares come back too, and so do
blocks that decoding filled. One engine per process; both of its sides share `_STORED`.
"""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass
from typing import Any

import torch
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorMetadata,
)

_STORED: dict[Hashable, dict[str, torch.Tensor]] = {}
Named = tuple[Hashable, int]


@dataclass(frozen=True)
class BlockMoves(KVConnectorMetadata):  # type: ignore[misc]  # vLLM is not typed
    """(block hash, block id) to fill before a step's forward, and to keep after it."""

    loads: tuple[Named, ...]
    saves: tuple[Named, ...]


class BlockMemory(KVConnectorBase_V1):  # type: ignore[misc]
    """Named in `kv_transfer_config` as a connector of this module."""

    def __init__(self, vllm_config: Any, role: Any, kv_cache_config: Any) -> None:
        super().__init__(vllm_config=vllm_config, role=role, kv_cache_config=kv_cache_config)
        self._size = int(vllm_config.cache_config.block_size)
        self._requests: dict[str, Any] = {}
        self._tables: dict[str, list[int]] = {}
        self._local: dict[str, int] = {}
        self._loads: list[Named] = []
        self._kept: set[Hashable] = set()
        self._caches: dict[str, torch.Tensor] = {}

    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        """The worker's caches by layer, first dimension = block."""
        self._caches = kv_caches

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        """Fills the step's loaded blocks."""
        for name, block in self._get_connector_metadata().loads:
            for layer, cache in self._caches.items():
                cache[block].copy_(_STORED[name][layer])

    def wait_for_layer_load(self, layer_name: str) -> None:
        """Loads are done when `start_load_kv` returns."""

    def save_kv_layer(self, layer_name: str, *args: Any, **kwargs: Any) -> None:
        """Blocks are kept all layers at once, in `wait_for_save`."""

    def wait_for_save(self) -> None:
        """Keeps the blocks that the step filled."""
        for name, block in self._get_connector_metadata().saves:
            _STORED[name] = {layer: cache[block].clone() for layer, cache in self._caches.items()}

    def get_num_new_matched_tokens(self, request: Any, computed: int) -> tuple[int, bool]:
        """Tokens of kept blocks right after the `computed` ones; the last token never counts."""
        self._requests[request.request_id] = request
        self._local[request.request_id] = computed
        first, limit = computed // self._size, (request.num_tokens - 1) // self._size
        last = first
        while last < limit and request.block_hashes[last] in self._kept:
            last += 1
        return (last - first) * self._size, False

    def update_state_after_alloc(self, request: Any, blocks: Any, external: int) -> None:
        """Plans the load of `external` tokens into the request's new blocks."""
        first = self._local[request.request_id] // self._size
        table = blocks.get_block_ids()[0]
        for index in range(first, first + external // self._size):
            self._loads.append((request.block_hashes[index], table[index]))

    def build_connector_meta(self, output: Any) -> BlockMoves:
        """The loads planned since the last step, and the blocks that this one fills."""
        saves: list[Named] = []
        for new in output.scheduled_new_reqs:
            self._tables[new.req_id] = list(new.block_ids[0])
            saves += self._filled(new.req_id, new.num_computed_tokens, output)
        cached = output.scheduled_cached_reqs
        for index, name in enumerate(cached.req_ids):
            fresh = cached.new_block_ids[index]
            table = [] if name in cached.resumed_req_ids else self._tables[name]
            self._tables[name] = table + list(fresh[0] if fresh else ())
            saves += self._filled(name, cached.num_computed_tokens[index], output)
        self._kept.update(name for name, _ in saves)
        loads, self._loads = tuple(self._loads), []
        return BlockMoves(loads, tuple(saves))

    def _filled(self, request: str, start: int, output: Any) -> list[Named]:
        stop = start + output.num_scheduled_tokens[request]
        hashes, table = self._requests[request].block_hashes, self._tables[request]
        last = min(stop // self._size, len(hashes))
        return [(hashes[index], table[index]) for index in range(start // self._size, last)]
