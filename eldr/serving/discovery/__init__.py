"""Where workers come from while the router runs: one interface, several sources.

A source yields the whole wanted membership whenever it changes; `Membership` brings the pools
there. Workers that leave take no new requests and go when their last one has ended. Workers that
were named at the start and did not answer then are members that are down (`Endpoint.awaited`);
whatever named them, they are asked here until they answer.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Iterable
from dataclasses import dataclass
from typing import Protocol

from eldr.serving.config import ConfigError
from eldr.serving.endpoints import Endpoint, Role
from eldr.serving.errors import StartError
from eldr.serving.state import Router

log = logging.getLogger(__name__)

# Between two tries to let a worker join; each try asks it for some seconds.
_AGAIN_SECONDS = 1.0


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
    membership = Membership(router)
    membership.ask_late()  # a source may no longer name them, and not be believed
    try:
        async for wanted in source.watch():
            membership.want(wanted)
    finally:
        await membership.close()


async def follow_late(router: Router) -> None:
    """Lets workers join that did not answer at the start; for workers that no source names."""
    membership = Membership(router)
    try:
        membership.ask_late()
        await membership.settled()
    finally:
        await membership.close()


class Membership:
    """Brings a router's pools to the wanted members.

    Who does not answer yet is asked again, for as long as it is wanted. Who is no longer wanted
    leaves at once, unless none of those that are wanted in its place is there: then it stays until
    one has joined. A source that names nobody of a kind is not believed: of that kind those that
    are there stay, and those that are asked are asked on.
    """

    def __init__(self, router: Router) -> None:
        self._router = router
        self._wanted: frozenset[Member] = frozenset()
        self._joining: dict[Member, asyncio.Task[None]] = {}

    def want(self, wanted: frozenset[Member]) -> None:
        """Sets the wanted members; they join in the background."""
        self._wanted = wanted
        named = _roles(wanted)
        for member in self._joining.keys() - wanted:
            if member.role in named:
                self._joining.pop(member).cancel()
        self.ask(wanted - {m for m, e in self.members().items() if not e.awaited})
        for endpoint in self._let_go():
            role, name = endpoint.role, endpoint.name
            if role in named:
                log.info("discovery: %s worker %s stays until one in its place answers", role, name)
            else:
                log.warning("discovery names no %s worker: keeping %s", role, name)

    def ask(self, members: Iterable[Member]) -> None:
        """Lets workers join when they answer."""
        for member in sorted(set(members) - self._joining.keys(), key=repr):
            self._joining[member] = asyncio.create_task(self._join(member), name="joining")

    def ask_late(self) -> None:
        """Lets workers join that did not answer at the start."""
        self.ask(member for member, endpoint in self.members().items() if endpoint.awaited)

    async def settled(self) -> None:
        """Waits until nobody is asked any more."""
        await asyncio.gather(*self._joining.values())

    def members(self) -> dict[Member, Endpoint]:
        """Who is in the pools and not about to leave."""
        return {
            Member(e.role, str(e.base), e.rank): e
            for e in self._router.endpoints()
            if not e.leaving
        }

    async def _join(self, member: Member) -> None:
        told, known = "", self.members().get(member)
        try:
            while self._missing(member, known) and (problem := await self._add(member)):
                if problem != told and self._missing(member, known):
                    told = problem
                    log.warning("discovery: %s It is asked again until it answers.", problem)
                await asyncio.sleep(_AGAIN_SECONDS)
        finally:
            if self._joining.get(member) is asyncio.current_task():
                del self._joining[member]
        self._let_go()

    def _missing(self, member: Member, known: Endpoint | None) -> bool:
        """Whether it is still to join: operators may have been faster, or have removed it."""
        here = self.members().get(member)
        return here is known and (here is None or here.awaited)

    async def _add(self, member: Member) -> str | None:
        """Adds a worker; what is wrong with it, or None."""
        try:
            await self._router.add_worker(member.role, member.url, member.rank)
        except (ConfigError, StartError) as error:
            return str(error)
        return None

    def _let_go(self) -> list[Endpoint]:
        """Lets those leave who may; those who may not."""
        members = self.members()
        served = _roles(m for m in members.keys() & self._wanted if not members[m].awaited)
        named, kept = _roles(self._wanted), []
        for member, endpoint in members.items():
            if member in self._wanted:
                continue
            # Nobody needs one that never answered until another one is in its place.
            if member.role not in (named if endpoint.awaited else served):
                kept.append(endpoint)
                continue
            self._router.pool(member.role).leave(endpoint.name)
            log.info("discovery: %s worker %s leaves", member.role, endpoint.name)
        return kept

    async def close(self) -> None:
        """Stops asking those that have not joined."""
        tasks = list(self._joining.values())
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def _roles(members: Iterable[Member]) -> set[Role]:
    return {member.role for member in members}
