"""Policies that follow a label of the request: its session, or its domain (an oracle)."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from typing import ClassVar

import numpy as np

from eldr.routing.decision import Choice, Context
from eldr.routing.policies.base import Policy, least, least_requests, relative_load
from eldr.routing.request import Reason


class SessionAffinity(Policy):
    """A session keeps its worker while that worker's load is bounded.

    Rendezvous hashing: workers joining or leaving move only the sessions that they gain or lose.
    A worker above `bound` times the mean load passes its session on to the next in hash order.
    """

    name: ClassVar[str] = "session"

    def __init__(self, bound: float = 1.25) -> None:
        if not bound >= 1.0:
            raise ValueError(f"session: bound must be >= 1, got {bound}")
        self.bound = bound

    def choose(self, context: Context) -> Choice:
        """The first worker in the session's hash order that is not overloaded."""
        session = context.request.session
        if session is None:
            return least_requests(context, Reason.NO_SESSION)
        slots = context.candidates
        load = relative_load(context, slots)
        # With the request itself counted, some worker is always at or below the mean.
        room = load <= self.bound * (load.sum() + 1.0) / len(slots)
        names = context.table.names
        order = sorted(range(len(slots)), key=lambda i: _rank(session, names[slots[i]]))
        at = next((i for i in order if room[i]), order[0])
        return Choice(int(slots[at]), "home" if at == order[0] else "overflow")


def _rank(session: str, name: str) -> bytes:
    return hashlib.blake2b(f"{session}\0{name}".encode(), digest_size=8).digest()


class DomainOracle(Policy):
    """Workers split into pools per domain label; least requests inside the pool.

    For studies: real traffic has no labels.
    """

    name: ClassVar[str] = "domain"

    def __init__(self, pools: Mapping[str, Sequence[str]]) -> None:
        self.pools = {domain: frozenset(names) for domain, names in pools.items()}

    def choose(self, context: Context) -> Choice:
        """The least loaded worker of the domain's pool."""
        pool = self.pools.get(context.request.domain or "")
        if not pool:
            return least_requests(context, Reason.NO_DOMAIN)
        names = context.table.names
        slots = context.candidates[[names[slot] in pool for slot in context.candidates]]
        if len(slots) == 0:
            return least_requests(context, Reason.NO_DOMAIN)
        load = relative_load(context, slots)
        return Choice(least(context, slots, load), "pool", band=slots)


def domain_pools(shares: Mapping[str, float], names: Sequence[str]) -> dict[str, tuple[str, ...]]:
    """Splits workers among domains in proportion to their shares (largest remainder).

    Domains whose share is less than one worker's are served by one pool together, as the paper
    does (arXiv 2607.00466); by all workers, when the larger domains leave none.

    Raises:
        ValueError: no workers, no domains, or shares that are negative or sum to zero.
    """
    total = sum(shares.values())
    if not names or not shares or total <= 0 or min(shares.values()) < 0:
        raise ValueError(f"domain_pools: need workers and shares >= 0, got {dict(shares)}")
    large = {d: s / total * len(names) for d, s in shares.items() if s * len(names) >= total}
    small = [d for d in shares if d not in large]
    quota = dict(large)
    if small and len(large) < len(names):
        quota[""] = sum(shares[d] for d in small) / total * len(names)
    keys = list(quota)
    exact = np.array([quota[k] for k in keys])
    # Every pool gets a worker; the rest go by largest remainder.
    given = np.maximum(np.floor(exact), 1).astype(int)
    while given.sum() > len(names):
        given[np.argmax(np.where(given > 1, given - exact, -np.inf))] -= 1
    while given.sum() < len(names):
        given[np.argmax(exact - given)] += 1
    starts = np.concatenate([[0], np.cumsum(given)])
    pools = {k: tuple(names[starts[i] : starts[i + 1]]) for i, k in enumerate(keys)}
    rest = pools.pop("", tuple(names))
    return {d: pools.get(d, rest) for d in shares}
