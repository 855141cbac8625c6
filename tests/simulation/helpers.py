"""Small random traces and drivers shared by the simulator's tests."""

from __future__ import annotations

import numpy as np

from eldr.simulation.pool import Completion, Pool
from eldr.workload.traces import ExpertTrace


def random_trace(
    seed: int = 0,
    requests: int = 24,
    layers: int = 3,
    experts: int = 70,
    k: int = 4,
    domains: int = 4,
    spread: float = 2.0,
    tokens: tuple[int, int] = (8, 40),
) -> ExpertTrace:
    """A trace whose domains prefer different experts."""
    rng = np.random.default_rng(seed)
    taste = rng.normal(0, spread, (domains, layers, experts))
    lengths = rng.integers(*tokens, requests)
    domain = np.arange(requests) % domains
    rows = []
    for length, d in zip(lengths, domain, strict=True):
        noise = rng.gumbel(size=(length, layers, experts))
        rows.append(np.argsort(-(taste[d] + noise), axis=2)[:, :, :k])
    prompt = np.where(rng.random(requests) < 0.5, 0, lengths // 2)
    return ExpertTrace(
        topk=np.concatenate(rows).astype(np.uint8),
        offsets=np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64),
        prompt_tokens=prompt.astype(np.int32),
        domain=domain.astype(np.uint8),
        domains=tuple(f"d{i}" for i in range(domains)),
        num_experts=experts,
    )


def drive(pool: Pool, rows: int, workers: int, requests: int, seed: int) -> list[Completion]:
    """Random deliveries, some of them at the same instant; returns every completion."""
    rng = np.random.default_rng(seed)
    for _ in range(workers):
        pool.add_worker(0.0)
    now, done = 0.0, []
    for i in range(requests):
        now += float(rng.choice([0.0, rng.exponential(0.02)]))
        done += pool.advance(now)
        steps, context = int(rng.integers(1, 40)), int(rng.integers(0, 300))
        ready = now + float(rng.choice([0.0, 0.05 * rng.random()]))
        pool.submit(int(rng.integers(workers)), i, int(rng.integers(rows)), steps, context, ready)
    return done + pool.advance(float("inf"))
