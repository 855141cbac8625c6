"""What decode steps read: distinct experts per layer, counted on the device."""

from __future__ import annotations

from collections import Counter
from typing import Any

import torch

from eldr import kernels
from eldr.engine.step import StepMetadata
from eldr.geometry import Geometry

# Batches above this share one row of `by_batch`: the table is for comparing, not for limits.
MOST_BATCH = 1024
_MOST_TOKENS = 65535  # in one step; what a uint16 count can hold


class DecodeCounters:
    """Cumulative counts over decode steps, since start.

    A decode step is a step in which every request computes exactly one token, plus its draft
    tokens if it speculates. The first step of a request on a P/D decode worker is one: it
    computes the prompt's last token, whose KV it wrote itself. A prompt chunk that happens
    to be a single token counts too: it reads experts exactly as a decode token does.
    Steps that mix in longer chunks of prompts are not counted at all.
    """

    def __init__(self, geometry: Geometry, device: torch.device) -> None:
        self._geometry = geometry
        shape = (geometry.layers, geometry.experts)
        # The step's hits, as if its tokens filled one KV block: one launch, which starts anew.
        self._hits = torch.zeros((1, *shape), dtype=torch.uint16, device=device)
        self._slots = torch.arange(_MOST_TOKENS, device=device)
        self._read = torch.zeros(shape, dtype=torch.bool, device=device)
        self._use = torch.zeros(shape, dtype=torch.int64, device=device)
        # Row b: experts read (over all layers) by the steps of b requests. Two policies can only
        # be compared at equal batch, since a larger batch reads more experts whoever is in it.
        self._read_by_batch = torch.zeros(MOST_BATCH + 1, dtype=torch.int64, device=device)
        self._steps_by_batch: Counter[int] = Counter()
        self.steps = 0
        self.tokens = 0
        self.kv_tokens = 0
        self.seconds = 0.0
        self._last_end = 0.0

    def count(self, topk_ids: torch.Tensor, step: StepMetadata) -> None:
        """Adds one decode step; ids int32 [T, L, K]. Enqueues device work, never waits."""
        slots = self._slots[: topk_ids.shape[0]]
        kernels.accumulate_hits(topk_ids, slots, _MOST_TOKENS, self._hits)
        torch.ne(self._hits[0].view(torch.int16), 0, out=self._read)
        self._use.add_(self._read)
        batch = min(step.requests, MOST_BATCH)
        self._read_by_batch[batch].add_(self._read.sum())
        self._steps_by_batch[batch] += 1
        self.steps += 1
        self.tokens += step.requests
        self.kv_tokens += step.kv_tokens

    def ended(self, started: float, ended: float) -> None:
        """Adds a step's time: from its scheduling, or the end of the step before it, to its end.

        Both bounds in seconds of the monotonic clock. With asynchronous scheduling a step
        is scheduled while the one before it still runs; time that the engine spends idle
        is in neither.
        """
        self.seconds += max(0.0, ended - max(started, self._last_end))
        self._last_end = ended

    def totals(self) -> dict[str, Any]:
        """The sums as JSON values; waits for the device, so it is for the worker routes."""
        return {
            "steps": self.steps,
            "tokens": self.tokens,
            "kv_tokens": self.kv_tokens,
            "seconds": self.seconds,
            "distinct": self._use.sum(dim=1).tolist(),
        }

    def snapshot(self) -> dict[str, Any]:
        """`totals`, in how many steps each expert was read, and the reads by batch size."""
        read = self._read_by_batch.tolist()
        return {
            "v": 1,
            "geometry": self._geometry.digest,
            **self.totals(),
            "use": self._use.tolist(),
            "by_batch": {str(b): [n, read[b]] for b, n in sorted(self._steps_by_batch.items())},
        }
