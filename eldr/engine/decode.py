"""What decode steps read: distinct experts per layer, counted on the device."""

from __future__ import annotations

from collections import Counter, deque
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from eldr import kernels
from eldr.engine.ids import StepIds
from eldr.engine.step import StepMetadata
from eldr.geometry import Geometry

# Batches above this share one row of `by_batch`: the table is for comparing, not for limits.
MOST_BATCH = 1024
_MOST_TOKENS = 65535  # in one step; what a uint16 count can hold
_STEPS_KEPT = 128  # uncounted steps at most


@dataclass(frozen=True, slots=True, eq=False)
class _Mark:
    """The counters at some moment; `use` int64 [L, E] on the device."""

    steps: int
    tokens: int
    kv_tokens: int
    seconds: float
    use: torch.Tensor


class DecodeCounters:
    """Cumulative counts over decode steps, since start, and over a sliding window.

    A decode step is a step in which every request computes exactly one token, plus its draft
    tokens if it speculates. The first step of a request on a P/D decode worker is one: it
    computes the prompt's last token, whose KV it wrote itself. A prompt chunk that happens
    to be a single token counts too: it reads experts exactly as a decode token does.
    Steps that mix in longer chunks of prompts are not counted at all.

    A step's ids are only kept aside; the ids of many steps are counted at once, when there is
    no place left or somebody asks.

    Args:
        geometry: of the model.
        device: where the ids are.
        ids: of the current step; this keeps them.
        window: steps after which the window moves on; it spans the last one to two times that.
    """

    def __init__(
        self, geometry: Geometry, device: torch.device, ids: StepIds, window: int = 1000
    ) -> None:
        self._geometry = geometry
        self._ids = ids
        shape = (geometry.layers, geometry.experts)
        self._sizes: list[int] = []
        self._batches: list[int] = []
        # A step's hits, as if its tokens filled one KV block: a launch, which starts rows anew.
        self._hits = torch.zeros((_STEPS_KEPT, *shape), dtype=torch.uint16, device=device)
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
        self._window = window
        self._next_mark = window
        self._next_count = min(_STEPS_KEPT, window)
        self._marks = deque([self._mark()], maxlen=2)

    def count(self, tokens: int, step: StepMetadata) -> None:
        """Adds the current step, of so many tokens. Enqueues device work, never waits."""
        ids, requests = self._ids, step.requests
        if not ids.fits(tokens):
            self._count_kept()
        ids.keep(tokens)
        self._sizes.append(tokens)
        self._batches.append(requests)
        self.steps += 1
        self.tokens += requests
        self.kv_tokens += step.kv_tokens
        if self.steps == self._next_count:
            self._count_kept()

    def _count_kept(self) -> None:
        """Counts the steps kept aside, with the launches of one."""
        steps = len(self._sizes)
        if steps:
            sizes = np.array(self._sizes)
            starts = np.cumsum(sizes) - sizes
            first = np.arange(steps) * _MOST_TOKENS - starts
            slots = self._staged(np.arange(self._ids.kept) + np.repeat(first, sizes))
            hits = self._hits[:steps]
            kernels.accumulate_hits(self._ids.take(), slots, _MOST_TOKENS, hits)
            read = hits.view(torch.int16) != 0
            self._use += read.sum(dim=0)
            batches = np.minimum(self._batches, MOST_BATCH)
            self._read_by_batch.index_add_(0, self._staged(batches), read.sum(dim=(1, 2)))
            self._steps_by_batch.update(batches.tolist())
            self._sizes.clear()
            self._batches.clear()
        if self.steps == self._next_mark:
            self._marks.append(self._mark())
            self._next_mark += self._window
        self._next_count = min(self.steps + _STEPS_KEPT, self._next_mark)

    def _staged(self, values: Any) -> torch.Tensor:
        staged = torch.from_numpy(values)
        if self._use.device.type == "cuda":
            staged = staged.pin_memory()
        return staged.to(self._use.device, non_blocking=True)

    def _mark(self) -> _Mark:
        return _Mark(self.steps, self.tokens, self.kv_tokens, self.seconds, self._use.clone())

    def ended(self, started: float, ended: float) -> None:
        """Adds a step's time: from its scheduling, or the end of the step before it, to its end.

        Both bounds in seconds of the monotonic clock. With asynchronous scheduling a step
        is scheduled while the one before it still runs; time that the engine spends idle
        is in neither.
        """
        last = self._last_end
        if started < last:
            started = last
        if ended > started:
            self.seconds += ended - started
        self._last_end = ended

    def totals(self) -> dict[str, Any]:
        """The sums as JSON values; waits for the device, so it is for the worker routes."""
        self._count_kept()
        return {
            "steps": self.steps,
            "tokens": self.tokens,
            "kv_tokens": self.kv_tokens,
            "seconds": self.seconds,
            "distinct": self._use.sum(dim=1).tolist(),
        }

    def snapshot(self, window: bool = False) -> dict[str, Any]:
        """`totals`, in how many steps each expert was read, and the reads by batch size.

        Args:
            window: whether the sums over the sliding window go with them.
        """
        totals = self.totals()
        read = self._read_by_batch.tolist()
        return {
            "v": 1,
            "geometry": self._geometry.digest,
            **totals,
            "use": self._use.tolist(),
            "by_batch": {str(b): [n, read[b]] for b, n in sorted(self._steps_by_batch.items())},
            **({"window": self._recent()} if window else {}),
        }

    def _recent(self) -> dict[str, Any]:
        since = self._marks[0]
        use = self._use - since.use
        return {
            "steps": self.steps - since.steps,
            "tokens": self.tokens - since.tokens,
            "kv_tokens": self.kv_tokens - since.kv_tokens,
            "seconds": self.seconds - since.seconds,
            "distinct": use.sum(dim=1).tolist(),
            "use": use.tolist(),
        }
