"""assign against the same rule as a loop of torch operators and of NumPy operators.

python -m benchmarks.assign [--json] [--rounds N] [--quick] [--clock cpu] [--out FILE]
"""

from __future__ import annotations

import numpy as np
import torch

from benchmarks._harness import Case, arguments, measure, report
from eldr.kernels import LocalityBand, MarginalCost, assign, assign_ref
from eldr.kernels.assign import coefficients

SIZES = ((1, 16), (16, 16), (64, 16), (64, 1024))
BAND = LocalityBand(0.1)


def case(requests: int, workers: int, device: str) -> Case:
    generator = torch.Generator().manual_seed(0)
    scores = torch.rand(requests, workers, generator=generator).to(device)
    load = torch.zeros(workers, dtype=torch.int32, device=device)
    cost = torch.zeros(requests, dtype=torch.int32, device=device)  # so that rounds are alike
    chosen = torch.empty_like(cost)
    state, kv = torch.ones(2, workers, device=device), torch.zeros(requests, device=device)
    dear = MarginalCost(1e-6, 1e-9, 1e-7, 1.0)

    def ours() -> None:
        assign(scores, BAND, load, cost, chosen=chosen)

    def torch_loop() -> None:
        assign_ref(scores, BAND.code, coefficients(BAND), cost, None, load, None, chosen)

    def marginal_cost() -> None:
        assign(scores, dear, load, cost, state=state, request_kv=kv, chosen=chosen)

    peers = {"torch loop": torch_loop, "ours, marginal cost": marginal_cost}
    if device == "cpu":
        s, loads, costs = scores.numpy(), np.zeros(workers, np.int32), np.zeros(requests, np.int32)

        def numpy_loop() -> None:
            for r in range(requests):
                band = np.flatnonzero(s[r] >= s[r].max() - 0.1)
                best = band[np.lexsort((-s[r][band], loads[band]))[0]]
                loads[best] += costs[r]

        peers |= {"numpy loop": numpy_loop}
    return Case(f"R={requests} W={workers} locality_band", ours, peers, 4 * scores.numel())


def main() -> None:
    args = arguments(__doc__ or "")
    sizes = SIZES[:2] if args.quick else SIZES
    report(args, [measure(case(*size, args.device), args) for size in sizes], {})


if __name__ == "__main__":
    main()
