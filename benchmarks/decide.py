"""The fused decision against gathering with torch and a matrix product; bar at R=16, W=16.

python -m benchmarks.decide [--json] [--rounds N] [--quick] [--clock cpu] [--out FILE]
"""

from __future__ import annotations

import torch

from benchmarks._harness import Case, arguments, measure, report
from benchmarks._prompts import Prompts
from eldr.kernels import Assignment, LocalityBand, decide, gather_signatures, score

# R, W; the first is the bar's
SIZES = ((16, 16), (1, 16), (4, 16), (64, 16), (1, 256), (16, 256))


def case(requests: int, workers: int, device: str) -> Case:
    p = Prompts(requests, workers, device)
    scores = torch.empty(requests, workers, device=device)
    load = torch.zeros(workers, dtype=torch.int32, device=device)
    cost = torch.zeros(requests, dtype=torch.int32, device=device)
    chosen = torch.empty_like(cost)
    assignment = Assignment(LocalityBand(0.1), load, cost)

    def ours() -> None:
        decide(p.histograms, p.block_ids, p.offsets, p.scorer, scores=scores)

    def with_assignment() -> None:
        decide(
            p.histograms, p.block_ids, p.offsets, p.scorer, assignment=assignment, scores=scores,
            chosen=chosen,
        )  # fmt: skip

    def separate() -> None:
        counts = gather_signatures(p.histograms, p.block_ids, p.offsets)
        score(counts, p.scorer, scores=scores)

    peers = {
        "torch gather + matmul": p.torch_scores,
        "ours, gather then score": separate,
        "ours, with assignment": with_assignment,
    }
    if device == "cpu":
        peers |= {"numpy gather + matmul": p.numpy_scores}
    return Case(f"R={requests} W={workers} blocks=128", ours, peers, p.bytes)


def main() -> None:
    args = arguments(__doc__ or "")
    sizes = SIZES[:1] if args.quick else SIZES
    results = [measure(case(*size, args.device), args) for size in sizes]
    bars = {"times_torch_gather_and_matmul": results[0].ratios["torch gather + matmul"]}
    report(args, results, bars)


if __name__ == "__main__":
    main()
