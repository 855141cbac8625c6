"""Where a step's top-k ids lie between the layers that route and the launches that count them."""

from __future__ import annotations

from itertools import accumulate
from typing import Protocol

import torch


class StepIds(Protocol):
    """Ids of the current step, layer by layer, and of earlier steps kept for later."""

    kept: int

    def store(self, place: int, topk_ids: torch.Tensor) -> None:
        """Takes one layer's ids [at least the step's tokens, K]."""

    def of_step(self, tokens: int) -> torch.Tensor:
        """The step's ids [tokens, L, K], valid until the next step."""

    def fits(self, tokens: int) -> bool:
        """Whether one more step of so many tokens can be kept."""

    def keep(self, tokens: int) -> None:
        """Keeps the step's ids, `kept` tokens in all."""

    def take(self) -> torch.Tensor:
        """All that was kept, [kept, L, K], and forgets it; valid until the next `keep`."""


class CopiedIds:
    """Copies into a buffer of fixed address, which CUDA graphs can record.

    Args:
        rows: tokens of the largest step.
        layers: L.
        top_k: K.
        experts: E.
        device: of the router's ids.
    """

    def __init__(
        self, rows: int, layers: int, top_k: int, experts: int, device: torch.device
    ) -> None:
        shape = (rows, layers, top_k)
        # A layer that nobody captures shows as one without hits, which the guard finds.
        self.buffer = torch.full(shape, -1, dtype=torch.int32, device=device)
        self._places = [self.buffer[:, place] for place in range(layers)]
        # -1, which some routers write for padding, must not become an expert.
        small = torch.uint8 if experts <= 255 else torch.int32
        self._aside = torch.zeros(shape, dtype=small, device=device)
        self.kept = 0

    def store(self, place: int, topk_ids: torch.Tensor) -> None:
        """Copies one layer's ids into the buffer."""
        self._places[place][: topk_ids.shape[0]].copy_(topk_ids)

    def of_step(self, tokens: int) -> torch.Tensor:
        """A view of the buffer."""
        return self.buffer[:tokens]

    def fits(self, tokens: int) -> bool:
        """Whether there is place for so many tokens more."""
        return self.kept + tokens <= self._aside.shape[0]

    def keep(self, tokens: int) -> None:
        """Copies the step's ids aside, in one launch."""
        end = self.kept + tokens
        self._aside[self.kept : end].copy_(self.buffer[:tokens])
        self.kept = end

    def take(self) -> torch.Tensor:
        """A view of what was copied aside."""
        kept, self.kept = self.kept, 0
        return self._aside[:kept]


class LayerIds(list[torch.Tensor]):
    """The routers' tensors of the current step, by place."""


class ReferredIds:
    """Only refers to the routers' own tensors: on a CPU, where no graph reuses their memory.

    A torch call costs as much there as half a layer of a small model does.
    """

    def __init__(self, layers: int) -> None:
        self.step = LayerIds([torch.empty(0)] * layers)
        self._aside: list[list[torch.Tensor]] = []
        self._sizes: list[int] = []
        self.kept = 0

    def store(self, place: int, topk_ids: torch.Tensor) -> None:
        """Refers to one layer's ids."""
        self.step[place] = topk_ids

    def of_step(self, tokens: int) -> torch.Tensor:
        """The layers' ids side by side."""
        return torch.stack(self.step, dim=1)[:tokens]

    def fits(self, tokens: int) -> bool:
        """Always."""
        return True

    def keep(self, tokens: int) -> None:
        """Goes on to refer to the step's ids."""
        self._aside.append(self.step[:])
        self._sizes.append(tokens)
        self.kept += tokens

    def take(self) -> torch.Tensor:
        """The steps' ids one after the other, the layers' side by side."""
        ids = torch.stack([torch.cat(layer) for layer in zip(*self._aside, strict=True)], dim=1)
        if ids.shape[0] != self.kept:  # the routers saw padding
            ends = accumulate(layers[0].shape[0] for layers in self._aside)
            starts = zip((0, *ends), self._sizes, strict=False)
            ids = torch.cat([ids[start : start + n] for start, n in starts])
        self._aside.clear()
        self._sizes.clear()
        self.kept = 0
        return ids
