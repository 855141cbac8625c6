"""What must hold for the demo to mean anything: equal outputs, no recomputation, exact counts."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from eldr.demo.config import MODEL_NAME
from eldr.demo.http import post_json

_OUTPUT_TOKENS = 32


@dataclass(frozen=True, slots=True)
class OutputCheck:
    """Greedy outputs through the router against the prefill worker serving alone."""

    compared: int
    different: tuple[str, ...]


def compare_outputs(
    router: str, alone: str, prompts: Sequence[str], progress: Callable[[int], None]
) -> OutputCheck:
    """Token ids of both ways of serving, one request at a time; lists the prompts that differ."""
    different: list[str] = []
    for done, prompt in enumerate(prompts, 1):
        if _greedy_tokens(router, prompt) != _greedy_tokens(alone, prompt):
            different.append(prompt)
        progress(done)
    return OutputCheck(len(prompts), tuple(different))


def signature_mismatches(recorded: Path, reference: Path) -> tuple[int, int]:
    """Compares two recorded-signature files request by request: (compared, mismatching).

    Raises:
        RuntimeError: the files do not hold the same number of requests.
    """
    ours, theirs = _load_counts(recorded), _load_counts(reference)
    if ours.shape != theirs.shape:
        raise RuntimeError(
            f"signatures: {recorded} has shape {ours.shape}, {reference} has {theirs.shape}"
        )
    return len(ours), int((ours != theirs).any(axis=(1, 2)).sum())


def _load_counts(path: Path) -> np.ndarray[Any, np.dtype[np.int64]]:
    with np.load(path, allow_pickle=False) as file:
        counts: np.ndarray[Any, np.dtype[np.int64]] = file["counts"].astype(np.int64)
    return counts


def _greedy_tokens(url: str, prompt: str) -> list[int]:
    body = {
        "model": MODEL_NAME,
        "prompt": prompt,
        "max_tokens": _OUTPUT_TOKENS,
        "temperature": 0,
        "ignore_eos": True,
        "return_token_ids": True,
    }
    return [int(t) for t in post_json(f"{url}/v1/completions", body)["choices"][0]["token_ids"]]
