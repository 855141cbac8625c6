"""Finished prompts at the shape of Qwen3-30B-A3B: blocks, vectors, and the peers' ways."""

from __future__ import annotations

import torch
from torch import Tensor

from eldr.kernels import Centroids

LAYERS, EXPERTS, TOP_K, BLOCK = 48, 128, 8, 16
PER_REQUEST = 128  # blocks: 2,048 tokens
POOL = 4096  # blocks in the cache: 25 MB, more than the caches of most CPUs


class Prompts:
    """R requests of PER_REQUEST random blocks each, and W centroids."""

    def __init__(self, requests: int, workers: int, device: str) -> None:
        generator = torch.Generator().manual_seed(0)
        cells = LAYERS * EXPERTS
        # Counts as 16 tokens with 8 of 128 experts make them: mean 1.
        chance = torch.full((POOL, LAYERS, EXPERTS), TOP_K / EXPERTS)
        counts = torch.zeros(chance.shape)
        for _ in range(BLOCK):
            counts += torch.bernoulli(chance, generator=generator)
        self.histograms = counts.to(torch.uint8).to(device)
        blocks = torch.randint(0, POOL, (requests, PER_REQUEST), generator=generator)
        self.table = blocks.to(device)
        self.block_ids = blocks.flatten().to(torch.int32).to(device)
        ends = torch.arange(0, requests * PER_REQUEST + 1, PER_REQUEST, dtype=torch.int32)
        self.offsets = ends.to(device)
        centroids = torch.rand(workers, cells, generator=generator).to(device)
        self.scorer = Centroids(centroids, torch.ones(cells, device=device))

    @property
    def bytes(self) -> int:
        """Rows and vectors, read once."""
        row = self.histograms[0].numel() * self.histograms.element_size()
        return self.block_ids.numel() * row + self.scorer.vectors.numel() * 4

    def torch_counts(self) -> Tensor:
        """Signatures [R, D] by indexing and a sum."""
        return self.histograms[self.table].sum(1, dtype=torch.int32).flatten(1)

    def torch_scores(self) -> None:
        """Cosine scores by indexing, a sum and a matrix product."""
        x = self.torch_counts().float()
        _ = (x @ self.scorer.vectors.T) / x.norm(dim=1, keepdim=True)

    def numpy_scores(self) -> None:
        """The same in NumPy, request by request."""
        rows, table = self.histograms.numpy(), self.table.numpy()
        vectors = self.scorer.vectors.numpy().T
        for blocks in table:
            x = rows[blocks].sum(0, dtype="int32").ravel().astype("float32")
            _ = (x @ vectors) / (x @ x) ** 0.5
