"""The scheduler's side of the engine hook: which prompts end, which blocks hold them.

Runs in vLLM's engine core process, once per step; nothing here touches the device.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from eldr import tracing
from eldr.engine import config, layout
from eldr.engine.fault import contained, nothing
from eldr.engine.hoststore import Move, StoreTotals
from eldr.engine.restore import NULL_BLOCK, StorePlanner
from eldr.engine.step import Gathered, PromptEnd, StepMetadata, StepResult
from eldr.engine.uncovered import UncoveredBlocks
from eldr.geometry import Geometry
from eldr.signature import Signature, encode

FAILED = StepMetadata(failed=True)
NOTHING_STORED = StoreTotals()


def wants_signature(kv_transfer_params: object) -> bool:
    """Whether a request is a remote decode's prefill, or asks for its counts itself."""
    if not isinstance(kv_transfer_params, Mapping):
        return False
    own = kv_transfer_params.get("eldr")
    asks = isinstance(own, Mapping) and own.get("counts") is True
    return bool(kv_transfer_params.get("do_remote_decode")) or asks


class SchedulerHook:
    """Follows requests that want a signature, from admission to their answer.

    A request is open until its prompt ends, awaited until the step's output comes back,
    and ready until it finishes. Aborted requests leave at the next step.
    """

    def __init__(self, settings: config.EngineConfig, blocks: layout.BlockLayout) -> None:
        self.failed = False
        self._signatures = settings.signatures
        self._decode = settings.decode
        self._form = settings.signature_form
        self._layout = blocks
        self._uncovered = UncoveredBlocks(blocks.block_size)
        self._open: set[str] = set()
        self._awaited: set[str] = set()
        self._ready: dict[str, dict[str, Any]] = {}
        blocks_kept = settings.host_store_blocks if settings.signatures else 0
        self._store = (
            StorePlanner(blocks_kept, blocks.block_size, self._uncovered) if blocks_kept else None
        )
        # By step in flight: request -> (block table, first token, unsettled tokens, drafts).
        self._drafted: dict[int, dict[str, tuple[tuple[int, ...], int, int, int]]] = {}

    @classmethod
    def create(cls, vllm_config: Any, kv_cache_config: Any) -> SchedulerHook:
        """Built once per engine from vLLM's VllmConfig and KVCacheConfig."""
        return cls(
            config.read(vllm_config.additional_config),
            layout.find(kv_cache_config),
        )

    @contained(nothing)
    def blocks_loaded(
        self,
        request: Any,
        tables: Sequence[Sequence[int]],
        local_tokens: int,
        external_tokens: int,
    ) -> None:
        """A connector fills the tokens after the first `local_tokens` of a request.

        Args:
            request: vLLM's Request.
            tables: its block ids per KV cache group.
            local_tokens: tokens found in this engine's own prefix cache.
            external_tokens: tokens that the connector brings.
        """
        if not self._signatures:
            return
        table = tables[self._layout.group]
        end = local_tokens + external_tokens
        self._uncovered.add_tokens(table, local_tokens, end)
        if self._store is not None:
            self._store.loaded(request, table, local_tokens, end)

    @contained(lambda *_: FAILED)
    def build_metadata(
        self, output: Any, requests: Mapping[str, Any], cache: Any
    ) -> StepMetadata | None:
        """What the worker must know about the step that `output` (SchedulerOutput) describes."""
        scheduled: Mapping[str, int] = output.num_scheduled_tokens
        if not scheduled and not output.finished_req_ids:
            return None
        ends: tuple[PromptEnd, ...] = ()
        restores: tuple[Move, ...] = ()
        saves: tuple[Move, ...] = ()
        if self._signatures:
            for request in output.finished_req_ids:
                self._forget(request)
            self._admit(output.scheduled_new_reqs, requests)
            self._follow_blocks(output, requests, cache)
            ends = tuple(self._ends(output, requests, cache))
            if self._store is not None and scheduled:  # a step without tokens runs nothing
                restores = self._store.take_restores()
                saves = self._saves(self._store, output, requests, cache)
        decode, kv_tokens = self._decode and self._is_decode(output), 0
        if decode:
            for name in scheduled:
                kv_tokens += requests[name].num_computed_tokens
        totals = self._store.totals if self._store is not None else NOTHING_STORED
        return StepMetadata(
            ends, decode, len(scheduled), kv_tokens, time.monotonic(), restores, saves, totals
        )

    @contained(nothing)
    def receive(self, output: Any, result: Any) -> None:
        """Takes the step's signatures, and marks blocks that rejected drafts spoilt."""
        if self._drafted:
            self._spoil(output, result)
        if self._store is not None:
            self._store.received(id(output))
        found: StepResult | None = result.eldr_output
        if found is None:
            return
        if tracing.ON:
            tracing.push(tracing.MERGE, len(found.signatures))
        for request, gathered in found.signatures.items():
            if request in self._awaited:
                self._awaited.discard(request)
                self._ready[request] = _payload(gathered, found.geometry, self._form)
        if tracing.ON:
            tracing.pop()

    @contained(lambda request, kv_transfer_params: kv_transfer_params)
    def finish(
        self, request: Any, kv_transfer_params: dict[str, Any] | None
    ) -> dict[str, Any] | None:
        """The answer's kv_transfer_params, with the signature added if there is one."""
        payload = self._ready.pop(request.request_id, None)
        self._forget(request.request_id)
        if payload is None:
            return kv_transfer_params
        return {**(kv_transfer_params or {}), "eldr": payload}

    def _forget(self, request: str) -> None:
        self._open.discard(request)
        self._awaited.discard(request)
        self._ready.pop(request, None)

    def _admit(self, new: Sequence[Any], requests: Mapping[str, Any]) -> None:
        for entry in new:  # a preempted request comes here again when it resumes
            name = entry.req_id
            known = name in self._ready or name in self._awaited
            if not known and wants_signature(requests[name].kv_transfer_params):
                self._open.add(name)

    def _follow_blocks(self, output: Any, requests: Mapping[str, Any], cache: Any) -> None:
        for copy in output.kv_cache_block_copies or ():
            self._uncovered.add((copy.dst_block_id,))
        if output.scheduled_spec_decode_tokens:
            self._drafted[id(output)] = {
                name: (
                    tuple(self._table(cache, name)),
                    requests[name].num_computed_tokens,
                    requests[name].num_in_flight_tokens,
                    len(drafts),
                )
                for name, drafts in output.scheduled_spec_decode_tokens.items()
            }
        if not self._uncovered:
            return
        for name, count in output.num_scheduled_tokens.items():
            start = requests[name].num_computed_tokens
            self._uncovered.computed(self._table(cache, name), start, start + count)

    def _saves(
        self, store: StorePlanner, output: Any, requests: Mapping[str, Any], cache: Any
    ) -> tuple[Move, ...]:
        moves: list[Move] = []
        for name, count in output.num_scheduled_tokens.items():
            start, size = requests[name].num_computed_tokens, self._layout.block_size
            fills = start // size < (start + count) // size
            if fills and name not in output.scheduled_spec_decode_tokens:
                table = self._table(cache, name)
                moves += store.filled(id(output), requests[name], table, start, start + count)
        return tuple(moves)

    def _ends(self, output: Any, requests: Mapping[str, Any], cache: Any) -> Iterator[PromptEnd]:
        scheduled = output.num_scheduled_tokens
        for name in [name for name in self._open if name in scheduled]:
            request = requests[name]
            if request.num_computed_tokens + scheduled[name] >= request.num_prompt_tokens:
                self._open.discard(name)
                self._awaited.add(name)
                # vLLM pads a prompt of which one token is left with drafts, behind that token.
                mixed = name in output.scheduled_spec_decode_tokens
                tokens = request.num_prompt_tokens
                yield self._prompt_end(name, tokens, self._table(cache, name), mixed)

    def _prompt_end(self, name: str, tokens: int, table: Sequence[int], mixed: bool) -> PromptEnd:
        size = self._layout.block_size
        exact = tokens // size if mixed else -(-tokens // size)
        kept = [
            (block, min(size, tokens - index * size))
            for index, block in enumerate(table[:exact])
            if block != NULL_BLOCK and block not in self._uncovered
        ]
        return PromptEnd(name, tuple(b for b, _ in kept), tuple(n for _, n in kept), tokens)

    def _is_decode(self, output: Any) -> bool:
        drafted = output.scheduled_spec_decode_tokens
        tokens: int = output.total_num_scheduled_tokens
        if drafted:
            tokens -= sum(map(len, drafted.values()))
        return 0 < tokens == len(output.num_scheduled_tokens)

    def _table(self, cache: Any, request: str) -> Sequence[int]:
        table: Sequence[int] = cache.get_block_ids(request)[self._layout.group]
        return table

    def _spoil(self, output: Any, result: Any) -> None:
        drafted = self._drafted.pop(id(output), None)
        if drafted is None:
            return
        for name, (table, start, margin, drafts) in drafted.items():
            row = result.req_id_to_index.get(name)
            sampled = len(result.sampled_token_ids[row]) if row is not None else 0
            if sampled <= drafts:
                self._uncovered.add_tokens(table, start + sampled - margin, start + 1 + drafts)


def _payload(found: Gathered, geometry: Geometry, form: str) -> dict[str, Any]:
    signature = Signature(found.counts, found.tokens, found.covered / found.tokens)
    payload = encode(signature, geometry, form)
    if found.scores is not None:
        payload["scores"] = {"digest": found.scores.digest, "values": found.scores.values}
    return payload
