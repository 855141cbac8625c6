"""What decode steps read: distinct experts per layer, counted on the device."""

from __future__ import annotations

from typing import Any

import torch

from eldr.engine.step import StepMetadata
from eldr.geometry import Geometry


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
        self._read = torch.zeros(shape, dtype=torch.int64, device=device)
        self._use = torch.zeros(shape, dtype=torch.int64, device=device)
        self.steps = 0
        self.tokens = 0
        self.kv_tokens = 0
        self.seconds = 0.0
        self._last_end = 0.0

    def count(self, topk_ids: torch.Tensor, step: StepMetadata) -> None:
        """Adds one decode step; ids int32 [T, L, K]. Enqueues device work, never waits."""
        flat = topk_ids.permute(1, 0, 2).reshape(self._geometry.layers, -1).long()
        self._read.zero_()
        self._read.scatter_(1, flat, 1)
        self._use.add_(self._read)
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
        """`totals`, and in how many steps each expert was read."""
        header = {"v": 1, "geometry": self._geometry.digest}
        return {**header, **self.totals(), "use": self._use.tolist()}
