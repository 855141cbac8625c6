"""Picks the prefill worker: by prompt prefix with bounded load, by load, or in turn."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from hashlib import blake2b
from itertools import count

from eldr.serving.endpoints import Endpoint

# A worker may carry this much more than its fair share before its prefixes go elsewhere.
_LOAD_FACTOR = 1.25
# Long enough to tell system prompts apart, short enough to be shared by one conversation's turns.
PREFIX_BYTES = 1024


class PrefillPool:
    """The prefill workers and their running requests."""

    def __init__(self, endpoints: list[Endpoint], policy: str) -> None:
        self.endpoints = endpoints
        self._policy = policy
        self._turn = count()

    def choose(self, prefix: bytes, exclude: Collection[Endpoint] = ()) -> Endpoint | None:
        """The worker for a prompt that starts with `prefix`; None if there is no candidate."""
        able = [w for w in self.endpoints if w not in exclude]
        if not able:
            return None
        if self._policy == "round_robin":
            return able[next(self._turn) % len(able)]
        if self._policy == "prefix_hash":
            return self._by_prefix(able, prefix)
        start = next(self._turn)  # equal loads take turns
        return min(
            (able[(start + i) % len(able)] for i in range(len(able))), key=lambda w: w.running
        )

    def _by_prefix(self, able: list[Endpoint], prefix: bytes) -> Endpoint:
        """Rendezvous hashing with bounded loads: the best-ranked worker below the bound."""
        bound = math.ceil(_LOAD_FACTOR * (sum(w.running for w in able) + 1) / len(able))
        ranked = sorted(able, key=lambda w: _rank(w.name, prefix), reverse=True)
        return next((w for w in ranked if w.running < bound), ranked[0])

    @contextmanager
    def running(self, worker: Endpoint) -> Iterator[None]:
        """Counts one request on a worker for the duration of the block."""
        worker.running += 1
        try:
            yield
        finally:
            worker.running -= 1


def _rank(name: str, prefix: bytes) -> bytes:
    return blake2b(prefix, digest_size=8, key=name.encode()[-64:]).digest()
