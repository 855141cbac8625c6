"""accumulate_hits against what NumPy and torch offer; bars at T=8192, L=48, E=128, K=8, block 16.

On a GPU the peers are torch's operators and the way over the host that vLLM's own capture offers.

python -m benchmarks.accumulate [--json] [--rounds N] [--quick] [--out FILE]
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from benchmarks._harness import Case, Function, arguments, measure, report, thread_scaling
from eldr.kernels import accumulate_hits
from eldr.kernels.recipes import SHAPES, Shape
from profiling.gpu_check import host_capture


class Step:
    """One prefill step of `tokens` tokens whose blocks all start anew, and the peers' operands."""

    def __init__(self, shape: Shape, tokens: int, device: str) -> None:
        generator = torch.Generator().manual_seed(0)
        self.shape, self.tokens = shape, tokens
        ranks = torch.rand(tokens, shape.layers, shape.experts, generator=generator)
        ids = ranks.topk(shape.top_k, dim=2).indices.to(torch.int32)
        self.ids = ids.to(device)
        blocks = -(-tokens // shape.block_size)
        order = torch.randperm(blocks, generator=generator)
        place = torch.arange(tokens)
        slots = order[place // shape.block_size] * shape.block_size + place % shape.block_size
        self.slots = slots.to(device)
        size = (blocks, shape.layers, shape.experts)
        self.histograms = torch.zeros(size, dtype=shape.histogram, device=device)

    @property
    def bytes(self) -> int:
        """Ids read once, slots read once, rows written once."""
        parts = (self.ids, self.slots, self.histograms)
        return sum(t.numel() * t.element_size() for t in parts)

    def ours(self) -> None:
        accumulate_hits(self.ids, self.slots, self.shape.block_size, self.histograms)

    def torch_peers(self) -> dict[str, Function]:
        """Block histograms by torch's own operators; index arithmetic is part of the work."""
        cells, blocks = self.shape.layers * self.shape.experts, self.histograms.shape[0]
        layer = torch.arange(self.shape.layers, device=self.ids.device) * self.shape.experts
        ones = torch.ones(self.ids.numel(), dtype=torch.int32, device=self.ids.device)

        def cell() -> Tensor:
            block = (self.slots // self.shape.block_size) * cells
            return (block[:, None, None] + layer[None, :, None] + self.ids).flatten()

        def zeros(dtype: torch.dtype) -> Tensor:
            return torch.zeros(blocks * cells, dtype=dtype, device=self.ids.device)

        def index_put() -> Tensor:
            return zeros(torch.int32).index_put_((cell(),), ones, accumulate=True)

        return {
            "torch.bincount": lambda: torch.bincount(cell(), minlength=blocks * cells),
            "torch.scatter_add_": lambda: zeros(torch.int32).scatter_add_(0, cell(), ones),
            "torch.index_put_": index_put,
        }

    def one_hot(self) -> Tensor:
        """One-hot and sum, block by block: [T, L, K, E] at once would not fit."""
        size, experts = self.shape.block_size, self.shape.experts
        rows = [
            torch.nn.functional.one_hot(self.ids[t : t + size].long(), experts).sum((0, 2))
            for t in range(0, self.tokens, size)
        ]
        return torch.stack(rows)

    def host_peer(self) -> dict[str, Function]:
        """The whole step as one request, by way of the host."""
        capture = host_capture.HostCapture(self.ids, self.shape.experts, [self.tokens])
        return {host_capture.NAME: lambda: capture(self.ids)}

    def numpy_peers(self) -> dict[str, Function]:
        """np.bincount per block (the same result) and over the whole request (less: one row)."""
        ids, size = self.ids.cpu().numpy(), self.shape.block_size
        cells = self.shape.layers * self.shape.experts
        layer = (np.arange(self.shape.layers) * self.shape.experts)[None, :, None]

        def per_block() -> None:
            for t in range(0, self.tokens, size):
                np.bincount((ids[t : t + size] + layer).ravel(), minlength=cells)

        return {
            "np.bincount per block": per_block,
            "np.bincount per request": lambda: np.bincount((ids + layer).ravel(), minlength=cells),
        }


def main() -> None:
    args = arguments(__doc__ or "")
    on_cpu = args.device == "cpu"
    tokens = 1024 if args.quick else 8192
    results = []
    for shape in SHAPES[:1] if args.quick else SHAPES:
        step = Step(shape, tokens, args.device)
        main_shape = shape is SHAPES[0]
        peers = step.torch_peers() if main_shape or not on_cpu else {}
        if main_shape:
            peers |= {"torch one_hot sum": step.one_hot}
        peers |= step.numpy_peers() if on_cpu else step.host_peer()
        name = f"{shape.name} T={tokens} block={shape.block_size}"
        results.append(measure(Case(name, step.ours, peers, step.bytes), args))
    bars: dict[str, object] = {}
    if on_cpu:
        bars = cpu_bars(results[0].ratios, Step(SHAPES[0], tokens, "cpu"))
    report(args, results, bars)


def cpu_bars(ratios: dict[str, float], step: Step) -> dict[str, object]:
    """The bars of the main shape."""
    torch_best = min(ratio for name, ratio in ratios.items() if name.startswith("torch"))
    return {
        "times_np_bincount_per_block": ratios["np.bincount per block"],
        "times_best_torch_peer": torch_best,
        "two_threads_scale": thread_scaling(step.ours),
    }


if __name__ == "__main__":
    main()
