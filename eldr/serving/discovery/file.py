"""Workers listed in a TOML or JSON file that may be edited while the router runs.

prefill = ["http://p0:8100"]
decode = ["http://d0:8200", {url = "http://d1:8200", ranks = 2}]
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator
from pathlib import Path

import msgspec

from eldr.serving.config import ConfigError
from eldr.serving.discovery import Member
from eldr.serving.endpoints import Role, worker_url

log = logging.getLogger(__name__)


class _Worker(msgspec.Struct, forbid_unknown_fields=True):
    url: str
    ranks: int = 1


class _File(msgspec.Struct, forbid_unknown_fields=True):
    prefill: list[str | _Worker] = []
    decode: list[str | _Worker] = []


def read_members(path: str) -> frozenset[Member]:
    """The members that a file lists.

    Raises:
        ConfigError: unreadable, unknown key, wrong type, not a worker URL.
    """
    try:
        raw = Path(path).read_bytes()
        parse = msgspec.json.decode if path.endswith(".json") else msgspec.toml.decode
        content: _File = parse(raw, type=_File)
    except (OSError, msgspec.DecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"worker file {path}: {error}") from error
    members: set[Member] = set()
    for role, listed in (("prefill", content.prefill), ("decode", content.decode)):
        for entry in listed:
            worker = _Worker(entry) if isinstance(entry, str) else entry
            members.update(_ranks(role, worker, path))  # type: ignore[arg-type]
    return frozenset(members)


def _ranks(role: Role, worker: _Worker, path: str) -> list[Member]:
    if worker.ranks < 1:
        raise ConfigError(f"worker file {path}: ranks of {worker.url} must be at least 1")
    url = str(worker_url(worker.url))
    if worker.ranks == 1:
        return [Member(role, url)]
    return [Member(role, url, rank) for rank in range(worker.ranks)]


class FileSource:
    """Watches such a file by its content; a broken file changes nothing and is reported once."""

    def __init__(self, path: str, interval: float) -> None:
        self._path = path
        self._interval = interval

    async def watch(self) -> AsyncIterator[frozenset[Member]]:
        """The members, whenever they differ from before."""
        last: frozenset[Member] | str | None = None
        while True:
            now: frozenset[Member] | str
            try:
                now = await asyncio.to_thread(read_members, self._path)
            except ConfigError as error:
                now = str(error)
            if now != last:
                last = now
                if isinstance(now, str):
                    log.warning("%s; the workers stay as they are", now)
                else:
                    yield now
            await asyncio.sleep(self._interval)
