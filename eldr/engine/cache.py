"""The signature cache: block histograms on the device, and the signatures gathered from them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from eldr import kernels
from eldr.engine.layout import BlockLayout
from eldr.engine.step import Gathered, PromptEnd, Scores
from eldr.engine.vectors import Vectors
from eldr.geometry import Geometry


class SignatureCache:
    """Histograms [blocks + 1, L, E], row b = hits of the tokens in KV block b; the last stays 0.

    uint8 up to block size 255, uint16 above: a token picks an expert at most once. Blocks that
    are evicted, reused or shared need no message, because a token in a block's first slot
    starts its row anew and a prefix hit reads the row that is there.
    """

    def __init__(self, layout: BlockLayout, geometry: Geometry, device: torch.device) -> None:
        self.layout = layout
        self.geometry = geometry
        self.vectors: Vectors | None = None  # replaced between two steps, never within one
        self.tally = dict.fromkeys(("full", "partial", "none", "guarded_blocks"), 0)
        self.histograms = torch.zeros(
            (layout.blocks + 1, geometry.layers, geometry.experts),
            dtype=torch.uint8 if layout.block_size <= 255 else torch.uint16,
            device=device,
        )

    @property
    def bytes(self) -> int:
        """Device memory of the histograms."""
        return self.histograms.numel() * self.histograms.element_size()

    def accumulate(self, topk_ids: torch.Tensor, slots: torch.Tensor) -> None:
        """Adds one step's hits: ids int32 [T, L, K], slots int64 [T]; one launch."""
        kernels.accumulate_hits(topk_ids, slots, self.layout.block_size, self.histograms)

    def gather(self, ends: Sequence[PromptEnd]) -> GatheredOnDevice:
        """Signatures of the prompts that end in this step, and their scores; never waits.

        The guard: every row used must hold K hits per token and layer. A block whose row does
        not is left out of the sum, and its tokens count as uncovered.
        """
        fills = np.array([n for end in ends for n in end.fills], np.int32)
        blocks = np.array([b for end in ends for b in end.blocks], np.int32)
        offsets = np.cumsum([0, *(len(end.blocks) for end in ends)], dtype=np.int32)
        tokens = np.array([end.tokens for end in ends], np.int32)
        ids, filled, bounds, lengths = self._stage(blocks, fills, offsets, tokens)
        whole = self._guard(ids, filled)
        used = torch.where(whole, ids, self.layout.blocks)
        vectors, scores = self.vectors, None
        if vectors is None:
            counts = kernels.gather_signatures(self.histograms, used, bounds)
        else:
            shape = (len(ends), *self.histograms.shape[1:])
            counts = torch.empty(shape, dtype=torch.int32, device=self.histograms.device)
            scores = kernels.decide(
                self.histograms,
                used,
                bounds,
                vectors.scorer,
                tokens=lengths if vectors.kind == "survival" else None,
                counts=counts,
            ).scores
        digest = vectors.digest if vectors is not None else None
        return GatheredOnDevice(
            self.tally, ends, fills, offsets, OnDevice(counts, whole, scores, digest)
        )

    def _stage(self, *arrays: npt.NDArray[np.int32]) -> tuple[torch.Tensor, ...]:
        """Copies small arrays to the device in one transfer, without waiting for it."""
        staged = torch.from_numpy(np.concatenate(arrays))
        if self.histograms.device.type == "cuda":
            staged = staged.pin_memory()
        staged = staged.to(self.histograms.device, non_blocking=True)
        ends = np.cumsum([len(array) for array in arrays])
        return tuple(
            staged[int(end) - len(array) : int(end)]
            for end, array in zip(ends, arrays, strict=True)
        )

    def _guard(self, ids: torch.Tensor, fills: torch.Tensor) -> torch.Tensor:
        """Whether (bool [N]) block `ids[i]`'s row holds `fills[i]` tokens in every layer."""
        rows = self.histograms
        if rows.dtype is torch.uint16:  # torch indexes int16; a count is at most the block size
            rows = rows.view(torch.int16)
        hits = rows.index_select(0, ids).sum(dim=2, dtype=torch.int32)
        return (hits == (fills * self.geometry.top_k)[:, None]).all(dim=1)


@dataclass(frozen=True, slots=True, eq=False)
class OnDevice:
    """Results of `SignatureCache.gather` before they are copied to the host.

    Attributes:
        counts: int32 [R, L, E].
        whole: bool [N], which blocks passed the guard.
        scores: float32 [R, W], or None without vectors.
        digest: which vectors, or None.
    """

    counts: torch.Tensor
    whole: torch.Tensor
    scores: torch.Tensor | None
    digest: str | None


class GatheredOnDevice:
    """Counts of some prompts, on their way to the host with the engine's own output copy."""

    def __init__(
        self,
        tally: dict[str, int],
        ends: Sequence[PromptEnd],
        fills: npt.NDArray[np.int32],
        offsets: npt.NDArray[np.int32],
        device: OnDevice,
    ) -> None:
        self._tally = tally
        self._ends = ends
        self._fills = fills
        self._offsets = offsets
        self._device = device

    def enqueue_copy(self) -> None:
        """Copies to the host on the current stream, without waiting; keeps the originals."""
        found = self._device
        self._counts = found.counts.to("cpu", non_blocking=True)
        self._whole = found.whole.to("cpu", non_blocking=True)
        self._scores = (
            found.scores.to("cpu", non_blocking=True) if found.scores is not None else None
        )

    def result(self) -> dict[str, Gathered]:
        """The signatures by request; the copy must be complete."""
        counts, whole = self._counts.numpy(), self._whole.numpy()
        scores = self._scores.tolist() if self._scores is not None else None
        found = {}
        for row, end in enumerate(self._ends):
            part = slice(self._offsets[row], self._offsets[row + 1])
            covered = int(self._fills[part][whole[part]].sum())
            found[end.request] = Gathered(
                counts[row].astype(np.uint32),
                covered,
                end.tokens,
                Scores(self._device.digest or "", scores[row]) if scores is not None else None,
            )
            self._count(covered, end.tokens, int(np.count_nonzero(~whole[part])))
        return found

    def _count(self, covered: int, tokens: int, guarded: int) -> None:
        kind = "full" if covered == tokens else "partial" if covered else "none"
        self._tally[kind] += 1
        self._tally["guarded_blocks"] += guarded
