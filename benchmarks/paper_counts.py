"""A trace with a real model's geometry and popularity, drawn from published hit counts.

The counts (Qwen3-30B-A3B, eight languages, prefill of MGSM; conctsai/Multilingualism-in-
Mixture-of-Experts-LLMs, MIT) are sums per language, layer and expert. Tokens are drawn so that each
expert is picked with exactly its language's share; beyond that they are independent of each other,
of their request and between layers. So requests of a language are alike but for noise, and how far
languages lie apart is the model's own.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from eldr.workload.traces import ExpertTrace

Shares = npt.NDArray[np.float64]


def inclusion(counts: npt.NDArray[np.integer], top_k: int) -> Shares:
    """Chance that one token picks each expert, [..., E], from hits; sums to K, none above 1."""
    chance = counts / counts.sum(axis=-1, keepdims=True) * float(top_k)
    for _ in range(top_k):  # what exceeds certainty goes to the others, in proportion
        over = chance >= 1.0
        if not (chance > 1.0).any():
            break
        left = top_k - over.sum(axis=-1, keepdims=True)
        rest = np.where(over, 0.0, chance)
        chance = np.where(over, 1.0, rest * left / rest.sum(axis=-1, keepdims=True))
    return np.asarray(chance, np.float64)


def draw_topk(chance: Shares, top_k: int, tokens: int, rng: np.random.Generator) -> npt.NDArray:
    """Expert ids uint8 [tokens, L, K]: systematic sampling in a random order of the experts.

    Args:
        chance: [L, E], as `inclusion` gives it.
        top_k: K.
        tokens: how many.
        rng: source of the draws.
    """
    layers, experts = chance.shape
    out = np.empty((tokens, layers, top_k), np.uint8)
    for layer in range(layers):
        order = np.argsort(rng.random((tokens, experts)), axis=1)
        edges = np.cumsum(chance[layer][order], axis=1)
        points = rng.random((tokens, 1)) + np.arange(top_k)
        # The expert whose interval holds a point: as many edges lie at or below it.
        at = (edges[:, None, :] <= points[:, :, None]).sum(axis=2)
        out[:, layer] = np.take_along_axis(order, np.minimum(at, experts - 1), axis=1)
    return out


def trace_of_counts(
    counts: npt.NDArray[np.integer],
    domains: tuple[str, ...],
    top_k: int,
    *,
    requests: int = 32,
    prompt: int = 96,
    output: int = 64,
    seed: int = 0,
) -> ExpertTrace:
    """`requests` requests of every domain; counts [D, L, E]."""
    rng = np.random.default_rng(seed)
    chance = inclusion(counts, top_k)
    length, total = prompt + output, requests * len(domains)
    parts = [draw_topk(c, top_k, requests * length, rng) for c in chance]
    return ExpertTrace(
        topk=np.concatenate(parts),
        offsets=np.arange(total + 1, dtype=np.int64) * length,
        prompt_tokens=np.full(total, prompt, np.int32),
        domain=np.repeat(np.arange(len(domains)), requests).astype(np.uint8),
        domains=domains,
        num_experts=counts.shape[2],
        model="drawn from hit counts",
    )
