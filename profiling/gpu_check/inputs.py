"""Random inputs of the ops, as the argument lists that the registered ops take."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class Step:
    """One step's accumulation: `requests` prompts of equal length, the first one mid-block."""

    tokens: int
    layers: int
    experts: int
    top_k: int
    block_size: int
    histogram: torch.dtype = torch.uint8
    ids: torch.dtype = torch.int32
    requests: int = 4
    outside: bool = False  # some ids outside [0, E), some tokens masked

    @property
    def name(self) -> str:
        """The shape in words."""
        return (
            f"T={self.tokens} L={self.layers} E={self.experts} K={self.top_k} bs={self.block_size}"
        )


def accumulate_arguments(step: Step, device: torch.device, seed: int) -> list[object]:
    """Arguments of eldr::accumulate_hits; the histograms, last, are written."""
    rng = np.random.default_rng(seed)
    each = step.tokens // step.requests
    blocks_each = -(-each // step.block_size) + 1
    blocks = rng.permutation(step.requests * blocks_each)
    slots = np.full(step.tokens, -1, np.int64)
    for r in range(step.requests):
        own = blocks[r * blocks_each : (r + 1) * blocks_each]
        position = np.arange(each) + (step.block_size // 2 if r == 0 else 0)
        at = own[position // step.block_size] * step.block_size + position % step.block_size
        slots[r * each : (r + 1) * each] = at
    g = torch.Generator(device).manual_seed(seed)  # large inputs are drawn where they are needed
    shape = (step.tokens, step.layers, step.experts)
    ids = torch.rand(shape, generator=g, device=device).topk(step.top_k, dim=2).indices
    if step.outside:
        ids[torch.rand(ids.shape, generator=g, device=device) < 0.05] = step.experts
        slots[rng.random(len(slots)) < 0.05] = -1
    rows = torch.randint(0, 200, (len(blocks), *shape[1:]), generator=g, device=device)
    return [
        ids.to(step.ids), torch.from_numpy(slots).to(device), step.block_size,
        rows.to(step.histogram),
    ]  # fmt: skip


@dataclass(frozen=True, slots=True)
class Question:
    """One decision: `requests` prompts of `blocks` KV blocks against `workers` vectors."""

    requests: int
    workers: int
    layers: int
    experts: int
    blocks: int
    rule: int = 2
    histogram: torch.dtype = torch.uint8
    cached_blocks: int = 4096

    @property
    def name(self) -> str:
        """The shape in words."""
        return (
            f"R={self.requests} W={self.workers} D={self.layers * self.experts} "
            f"blocks={self.blocks} rule={self.rule}"
        )


RULES = {1: [], 2: [0.02], 3: [1e-5, 1e-9, 1e-4, 1.0]}


def decide_arguments(question: Question, device: torch.device, seed: int) -> list[object]:
    """Arguments of eldr::decide; scores, counts, load, state and chosen, last, are written."""
    g = torch.Generator().manual_seed(seed)
    q, cells = question, question.layers * question.experts
    shape = (q.cached_blocks, q.layers, q.experts)
    rows = torch.randint(0, 17, shape, generator=g, dtype=torch.uint8).to(q.histogram)
    ids = torch.randint(0, q.cached_blocks, (q.requests * q.blocks,), generator=g)
    offsets = torch.arange(q.requests + 1) * q.blocks
    vectors = torch.rand(q.workers, cells, generator=g)
    survival = q.rule == 3
    if not survival:  # cosines: a locality band then holds several workers
        vectors /= vectors.norm(dim=1, keepdim=True)
    arguments: list[object] = [
        rows, ids.int(), offsets.int(), vectors,
        torch.rand(q.workers, generator=g) if survival else None,
        None if survival else torch.rand(cells, generator=g),
        torch.randint(1, 4096, (q.requests,), generator=g).int() if survival else None,
        16.0 if survival else 0.0, q.rule, RULES[q.rule],
        torch.ones(q.requests, dtype=torch.int32),
        torch.rand(q.requests, generator=g) * 4096 if survival else None,
        torch.zeros(q.requests, q.workers),
        torch.zeros(q.requests, q.layers, q.experts, dtype=torch.int32),
        torch.randint(0, 9, (q.workers,), generator=g).int(),
        torch.rand(2, q.workers, generator=g) * 1000 if survival else None,
        torch.full((q.requests,), -7, dtype=torch.int32),
    ]  # fmt: skip
    return [a.to(device) if isinstance(a, Tensor) else a for a in arguments]


def copied(arguments: list[object], device: torch.device | None = None) -> list[object]:
    """The same arguments in memory of their own, on `device` or where they were."""
    return [
        a.detach().clone().to(device or a.device) if isinstance(a, Tensor) else a for a in arguments
    ]
