"""Picks the prefill worker: by prompt prefix with bounded load, by load, or in turn."""

from __future__ import annotations

import logging
import math
from collections.abc import Iterable, Set
from itertools import count
from zlib import crc32

from eldr.serving.endpoints import Endpoint
from eldr.serving.pool import Pool

log = logging.getLogger(__name__)

_MIX, _MASK = 0x9E3779B1, 0xFFFFFFFF
# A worker may carry this much more than its fair share before its prefixes go elsewhere.
_LOAD_FACTOR = 1.25
# Long enough to tell system prompts apart, short enough to be shared by one conversation's turns.
PREFIX_BYTES = 1024


class PrefillPool(Pool):
    """The prefill workers and their running requests."""

    def __init__(self, endpoints: Iterable[Endpoint], policy: str) -> None:
        super().__init__("prefill", endpoints)
        self._policy = policy
        self._turn = count()
        self._without_kv: set[str] = set()

    def choose(self, prefix: bytes, failed: Set[str] = frozenset()) -> Endpoint | None:
        """The worker for a prompt that starts with `prefix`; None if there is no candidate."""
        for out in self.exclusions(failed):
            able = [e for name, e in self._members.items() if name not in out]
            if able:
                return self._pick(able, prefix)
        return None

    def _pick(self, able: list[Endpoint], prefix: bytes) -> Endpoint:
        if len(able) == 1:
            return able[0]
        if self._policy in ("prefix_hash", "cache_aware"):
            return _by_prefix(able, prefix)
        start = next(self._turn)
        if self._policy == "round_robin":
            return able[start % len(able)]
        turned = (able[(start + i) % len(able)] for i in range(len(able)))
        return min(turned, key=lambda e: e.running + e.others)  # equal loads take turns

    def answered(self, endpoint: Endpoint, engine: bytes) -> None:
        """Notices a restart: another engine answers at the URL, and connections were lost.

        An engine that never leaves a KV handle is told of, once.
        """
        known, lost = endpoint.engine
        if not engine and not known and endpoint.name not in self._without_kv:
            self._without_kv.add(endpoint.name)
            log.warning(
                "prefill worker %s leaves no KV handle in its answer: unless workers share KV by "
                "storage, every prompt is computed again by decode. Connectors that push KV "
                "(Mooncake, P2pNccl, LMCache's PD) cannot work here; use the NIXL connector in "
                "pull mode",
                endpoint.name,
            )
        now_lost = endpoint.origin.lost
        if engine == known:
            return
        endpoint.engine = (engine, now_lost)
        if known and now_lost > lost:
            log.info("prefill worker %s was restarted", endpoint.name)
            endpoint.restarted_at = self._now()
            self.on_event(endpoint, "restarted")

    def ended(self, endpoint: Endpoint) -> None:
        """One request less runs on a worker."""
        endpoint.running -= 1
        if endpoint.leaving:
            self.settle(endpoint)


def _by_prefix(able: list[Endpoint], prefix: bytes) -> Endpoint:
    """Rendezvous hashing with bounded loads: the best-ranked worker below the bound."""
    load = 1.0
    for endpoint in able:
        load += endpoint.running + endpoint.others
    bound = math.ceil(_LOAD_FACTOR * load / len(able))
    key = crc32(prefix)
    best, first, highest, top = None, able[0], -1, -1
    for endpoint in able:
        # A worker's rank for a prefix: the name's checksum continued from the prefix's, then mixed,
        # since checksums of equal-length names differ by a constant.
        rank = (crc32(endpoint.salt, key) * _MIX) & _MASK
        if rank > top:
            first, top = endpoint, rank
        if rank > highest and endpoint.running + endpoint.others < bound:
            best, highest = endpoint, rank
    return best or first
