"""An independent account of routing: the ids of every KV slot, and whose token wrote them.

It shares nothing with the signature cache but vLLM's block tables: own capture callbacks, ids
per slot instead of histograms per block, no rule about when a block starts anew. A slot's
entry is valid for a prompt if the slot was last written with the same token after the same
prefix, only once since its block's first slot was (a rejected draft is overwritten), and not loaded
from elsewhere since. With an unbounded host store a loaded token whose
prefix was ever computed here is valid as well, with the ids of that time.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from eldr.engine.testing import inprocess

_EXTERNAL = 0


@dataclass(frozen=True, slots=True)
class Expected:
    """What a prompt's signature must be.

    Attributes:
        counts: uint32 [L, E], hits of the tokens in wholly valid blocks.
        coverage: share of the prompt's tokens in those blocks.
        prefixes: names of the prompt's first 1, 2, ... tokens, for `SlotLog.foreign`.
    """

    counts: npt.NDArray[np.uint32] = field(repr=False)
    coverage: float
    prefixes: tuple[int, ...] = field(repr=False)


class SlotLog:
    """Watches an engine made by `inprocess.start`.

    Args:
        llm: the engine.
        remembers: whether it has a host store that never runs full.
    """

    def __init__(self, llm: Any, remembers: bool = False) -> None:
        self._remembers = remembers
        self._seen: dict[int, npt.NDArray[Any]] = {}
        self._computed: dict[int, set[bytes]] = {}
        self._scheduler = inprocess.scheduler(llm)
        self._runner = inprocess.worker(llm).model_runner
        hook = self._runner.eldr
        self._group = hook._layout.group
        self._block_size: int = hook._layout.block_size
        self._experts = int(self._runner.model_config.get_num_experts())
        self._step: dict[int, npt.NDArray[Any]] = {}
        self._owner: dict[int, int] = {}
        self._writes: dict[int, int] = {}
        self._ids: dict[int, npt.NDArray[Any]] = {}
        self._prefixes: dict[str, list[int]] = {}
        self.expected: dict[str, Expected] = {}
        self.preemptions = 0
        self.loaded_tokens = 0
        self._bind()
        self._after_forward = hook.after_forward
        hook.after_forward = self._watch
        self._blocks_loaded = self._scheduler.eldr.blocks_loaded
        self._scheduler.eldr.blocks_loaded = self._loads

    def _bind(self) -> None:
        from vllm.model_executor.layers.fused_moe.layer import MoERunner

        for module in self._runner.model.modules():
            if isinstance(module, MoERunner):
                router = module.router
                record = partial(self._record, module.layer_id, router.capture_fn)
                router.set_capture_fn(record)

    def _record(
        self, layer: int, following: Callable[[torch.Tensor], None], ids: torch.Tensor
    ) -> None:
        self._step[layer] = ids.detach().to(torch.int16).cpu().numpy().copy()
        following(ids)

    def _watch(self, slot_mappings: Any, num_tokens: int, output: Any) -> None:
        self.preemptions += len(output.preempted_req_ids or ())
        slots = slot_mappings[self._group][:num_tokens].tolist()
        ids = np.stack([self._step[layer][:num_tokens] for layer in sorted(self._step)], axis=1)
        row = {slot: index for index, slot in enumerate(slots)}
        for request, count in output.num_scheduled_tokens.items():
            done = self._scheduler.requests[request].num_computed_tokens
            drafts = output.scheduled_spec_decode_tokens.get(request, ())
            table, prefix = self._table(request), self._prefix(request, done, drafts)
            for position in range(done - count, done):
                slot = self._slot(table, position)
                self._ids[slot] = self._seen[prefix[position]] = ids[row[slot]]
                self._write(slot, prefix[position])
                self._computed.setdefault(prefix[position], set()).add(_choice(ids[row[slot]]))
        for end in output.eldr_metadata.ends if output.eldr_metadata else ():
            self.expected[end.request] = self._expect(end.request)
        self._after_forward(slot_mappings, num_tokens, output)

    def _loads(self, request: Any, tables: Any, local: int, external: int) -> None:
        """A connector fills some of a request's slots; called when they are allocated."""
        table = tables[self._group]
        prefix = self._prefix(request.request_id, local + external)
        size = self._block_size
        for position in range(local, local + external):
            slot = self._slot(table, position)
            whole = (position // size + 1) * size <= local + external
            known = self._seen.get(prefix[position]) if self._remembers and whole else None
            self._write(slot, _EXTERNAL if known is None else prefix[position])
            if known is not None:
                self._ids[slot] = known
        self.loaded_tokens += external
        self._blocks_loaded(request, tables, local, external)

    def _write(self, slot: int, owner: int) -> None:
        if slot % self._block_size == 0:
            for other in range(slot, slot + self._block_size):
                self._writes[other] = 0
        self._writes[slot] += 1
        self._owner[slot] = owner

    def _valid(self, table: Sequence[int], position: int, owner: int) -> bool:
        slot = self._slot(table, position)
        dropped = table[position // self._block_size] == 0
        return not dropped and self._owner.get(slot) == owner and self._writes[slot] == 1

    def _expect(self, request: str) -> Expected:
        state = self._scheduler.requests[request]
        tokens, size = state.num_prompt_tokens, self._block_size
        table, prefix = self._table(request), self._prefix(request, tokens)
        valid = [self._valid(table, p, prefix[p]) for p in range(tokens)]
        kept: list[int] = []
        for start in range(0, tokens, size):
            stop = min(start + size, tokens)
            # Drafts behind the prompt's last token share its block: no row tells them apart.
            behind = range(self._slot(table, stop - 1) + 1, self._slot(table, start) + size)
            if all(valid[start:stop]) and not any(self._writes.get(slot) for slot in behind):
                kept += [self._slot(table, p) for p in range(start, stop)]
        layers = len(self._step)
        counts = np.zeros((layers, self._experts), np.uint32)
        for slot in kept:
            for layer in range(layers):
                np.add.at(counts[layer], self._ids[slot][layer], 1)
        return Expected(counts, len(kept) / tokens, tuple(prefix[:tokens]))

    def foreign(self, prefixes: Sequence[int], ids: npt.NDArray[Any]) -> int:
        """Tokens with ids [tokens, L, K] that no computation of them in this engine had.

        A block that is computed twice, in other chunks, may be routed otherwise the second time
        where attention is not stable to the bit; the caches and stores of others may then hold
        the ids of either time.
        """
        return sum(
            _choice(own) not in self._computed.get(prefix, ())
            for prefix, own in zip(prefixes, ids, strict=True)
        )

    def _table(self, request: str) -> Sequence[int]:
        blocks: Sequence[int] = self._scheduler.kv_cache_manager.get_block_ids(request)[self._group]
        return blocks

    def _slot(self, table: Sequence[int], position: int) -> int:
        size = self._block_size
        block: int = table[position // size]
        return block * size + position % size

    def _prefix(self, request: str, tokens: int, drafts: Sequence[int] = ()) -> list[int]:
        """Hashes of the request's first 1, 2, ... tokens; 0 never occurs.

        Args:
            request: vLLM's request id.
            tokens: how many at least.
            drafts: tokens that it may go on with, which are forgotten again.
        """
        known = self._prefixes.setdefault(request, [])
        ids = self._scheduler.requests[request].all_token_ids
        while len(known) < min(tokens, len(ids)):
            known.append(_hashed(known, ids[len(known)]))
        found = known.copy() if len(known) < tokens else known
        for token in drafts[len(drafts) - (tokens - len(known)) :] if tokens > len(known) else ():
            found.append(_hashed(found, token))
        return found


def _choice(ids: npt.NDArray[Any]) -> bytes:
    """One token's ids [L, K], whatever their type and the order within a layer."""
    return np.sort(ids.astype(np.int16), axis=1).tobytes()


def _hashed(prefix: Sequence[int], token: int) -> int:
    return hash((prefix[-1] if prefix else 1, token)) or 1
