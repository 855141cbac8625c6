"""gather_signatures against torch and NumPy indexing; 128 blocks per request.

python -m benchmarks.gather [--json] [--rounds N] [--quick] [--clock cpu] [--out FILE]
"""

from __future__ import annotations

import numpy as np
import torch

from benchmarks._harness import Case, arguments, measure, report
from benchmarks._prompts import EXPERTS, LAYERS, PER_REQUEST, Prompts
from eldr.kernels import gather_signatures


def case(requests: int, device: str) -> Case:
    p = Prompts(requests, 1, device)
    counts = torch.empty(requests, LAYERS, EXPERTS, dtype=torch.int32, device=device)
    request = torch.arange(requests, device=device).repeat_interleave(PER_REQUEST)
    flat = p.table.flatten()

    def index_add() -> None:
        counts.zero_().index_add_(0, request, p.histograms[flat].int())

    peers = {"torch index + sum": p.torch_counts, "torch.index_add_": index_add}
    if device == "cpu":
        rows, table = p.histograms.numpy(), p.table.numpy()
        peers |= {"numpy index + sum": lambda: rows[table].sum(1, dtype=np.int32)}
    ours = lambda: gather_signatures(p.histograms, p.block_ids, p.offsets, counts=counts)  # noqa: E731
    return Case(f"R={requests} blocks={PER_REQUEST}", ours, peers, p.bytes)


def main() -> None:
    args = arguments(__doc__ or "")
    results = [measure(case(r, args.device), args) for r in ((4,) if args.quick else (1, 16, 64))]
    report(args, results, {})


if __name__ == "__main__":
    main()
