"""Cuts a captured trace down to what may be shipped: domains with permissive texts, a few requests.

python -m eldr.workload.training.bundle TRACE.npz eldr/workload/tiny_trace/trace.npz
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np

from eldr.workload import traces
from eldr.workload.training.sources import SOURCES


def bundle(trace: traces.ExpertTrace, per_domain: int, seed: int) -> traces.ExpertTrace:
    """`per_domain` requests, drawn at random, of each domain whose text may be shipped.

    Raises:
        ValueError: the trace has no such domain, or a domain has fewer requests.
    """
    permissive = [d for d in trace.domains if d in SOURCES and SOURCES[d].permissive]
    if not permissive:
        raise ValueError(f"no domain of {trace.domains} may be shipped")
    rng = np.random.default_rng(seed)
    rows = []
    for domain in permissive:
        requests = np.flatnonzero(trace.domain == trace.domains.index(domain))
        if len(requests) < per_domain:
            raise ValueError(f"{domain}: {len(requests)} requests, need {per_domain}")
        rows.append(np.sort(rng.choice(requests, per_domain, replace=False)))
    chosen = trace.select(np.concatenate(rows))
    labels = np.repeat(np.arange(len(permissive), dtype=np.uint8), per_domain)
    return replace(chosen, domain=labels, domains=tuple(permissive))


def main(argv: Sequence[str] | None = None) -> int:
    """Command line of this module."""
    parser = argparse.ArgumentParser(
        prog="python -m eldr.workload.training.bundle",
        description="Cut a captured trace down to what may be shipped.",
    )
    parser.add_argument("trace", type=Path, help="trace from training.capture")
    parser.add_argument("out", type=Path, help="file to write (.npz)")
    parser.add_argument("--per-domain", type=int, default=60, help="requests of each domain")
    parser.add_argument("--seed", type=int, default=20607)
    args = parser.parse_args(argv)
    try:
        small = bundle(traces.load(args.trace), args.per_domain, args.seed)
        small.save(args.out)
    except (OSError, ValueError) as error:
        print(f"bundle: {error}", file=sys.stderr)
        return 2
    print(f"{args.out}: {len(small)} requests, {args.out.stat().st_size / 1e6:.2f} MB")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
