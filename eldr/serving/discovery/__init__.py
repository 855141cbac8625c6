"""Where workers come from while the router runs: one interface, several sources.

A source yields the whole wanted membership whenever it changes; `reconcile` brings the pools there.
Workers that leave take no new requests and go when their last one has ended.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Protocol

from eldr.serving.config import ConfigError
from eldr.serving.endpoints import Role
from eldr.serving.errors import StartError
from eldr.serving.state import Router

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, order=True)
class Member:
    """A worker that should be in a pool; `rank` is None for an engine without data parallelism."""

    role: Role
    url: str
    rank: int | None = None


class Source(Protocol):
    """Something that knows which workers there should be."""

    def watch(self) -> AsyncIterator[frozenset[Member]]:
        """The wanted members, now and after every change."""
        ...


async def follow(source: Source, router: Router) -> None:
    """Keeps a router's pools at what a source says, until cancelled."""
    async for wanted in source.watch():
        await reconcile(router, wanted)


async def reconcile(router: Router, wanted: frozenset[Member]) -> None:
    """Adds and removes workers; one that does not answer is reported and tried at the next change.

    A source that names no worker of a kind is not believed: nothing of that kind is removed.
    """
    present = {Member(e.role, str(e.base), e.rank): e for e in router.endpoints() if not e.leaving}
    new = sorted(wanted - present.keys(), key=repr)
    await asyncio.gather(*(_add(router, member) for member in new))
    kinds = {member.role for member in wanted}
    for member, endpoint in present.items():
        if member in wanted:
            continue
        if member.role not in kinds:
            log.warning("discovery names no %s worker: keeping %s", member.role, endpoint.name)
            continue
        router.pool(member.role).leave(endpoint.name)
        log.info("discovery: %s worker %s leaves", member.role, endpoint.name)


async def _add(router: Router, member: Member) -> None:
    try:
        await router.add_worker(member.role, member.url, member.rank)
    except (ConfigError, StartError) as error:
        log.warning("discovery: %s", error)
