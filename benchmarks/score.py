"""score against NumPy's and torch's matrix product on materialised signatures.

python -m benchmarks.score [--json] [--rounds N] [--quick] [--clock cpu] [--out FILE]
"""

from __future__ import annotations

import numpy as np
import torch

from benchmarks._harness import Case, Function, arguments, measure, report
from benchmarks._prompts import EXPERTS, LAYERS
from eldr.kernels import Centroids, score

SIZES = ((1, 16), (16, 16), (64, 16), (1, 1024), (64, 256), (256, 1024))


def case(requests: int, workers: int, device: str) -> Case:
    generator = torch.Generator().manual_seed(0)
    cells = LAYERS * EXPERTS
    counts = torch.randint(0, 500, (requests, LAYERS, EXPERTS), generator=generator)
    counts = counts.to(torch.int32).to(device)
    vectors = torch.rand(workers, cells, generator=generator).to(device)
    scorer = Centroids(vectors, torch.ones(cells, device=device))
    scores = torch.empty(requests, workers, device=device)

    def torch_matmul() -> None:
        x = counts.flatten(1).float()
        _ = (x @ vectors.T) / x.norm(dim=1, keepdim=True)

    peers: dict[str, Function] = {"torch matmul": torch_matmul}
    if device == "cpu":
        c, v = counts.numpy().reshape(requests, -1), vectors.numpy().T

        def numpy_matmul() -> None:
            x = c.astype(np.float32)
            _ = (x @ v) / np.linalg.norm(x, axis=1, keepdims=True)

        peers |= {"numpy matmul": numpy_matmul}
    size = 4 * (counts.numel() + vectors.numel() + scores.numel())
    ours = lambda: score(counts, scorer, scores=scores)  # noqa: E731
    return Case(f"R={requests} W={workers}", ours, peers, size)


def main() -> None:
    args = arguments(__doc__ or "")
    sizes = SIZES[:2] if args.quick else SIZES
    report(args, [measure(case(*size, args.device), args) for size in sizes], {})


if __name__ == "__main__":
    main()
