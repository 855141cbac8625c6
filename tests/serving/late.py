"""Fleets of which some workers do not listen yet, for tests of starts without them."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import aiohttp
import pytest

from eldr.geometry import Geometry
from eldr.serving import discovery, opening, state
from eldr.serving.config import RouterConfig
from eldr.serving.opening import open_router
from eldr.serving.server import bound_sockets, listening
from tests.serving.mocks.worker import MockWorker
from tests.serving.rig import Rig, until

GEOMETRY = Geometry(2, 16, 2)


SOURCES = ("flags", "file", "kubernetes")


CENTROIDS = [[0, 1], [4, 5], [8, 9]]


def decode(count: int) -> list[MockWorker]:
    return [MockWorker("decode") for _ in range(count)]


def prefill(geometry: Geometry = GEOMETRY) -> MockWorker:
    return MockWorker("prefill", geometry=geometry)


class Pods:
    """What the API server lists; a pod that does not listen may still be Ready for a while."""

    def __init__(self, workers: list[MockWorker]) -> None:
        self.ready = list(workers)

    def list_namespaced_pod(self, namespace: str, label_selector: str, **_: Any) -> Any:
        return SimpleNamespace(
            items=[
                SimpleNamespace(
                    metadata=SimpleNamespace(
                        name=worker.url,
                        annotations={"eldr.ai/port": str(worker.port)},
                        deletion_timestamp=None,
                    ),
                    status=SimpleNamespace(
                        pod_ip="127.0.0.1",
                        phase="Running",
                        conditions=[SimpleNamespace(type="Ready", status="True")],
                    ),
                )
                for worker in sorted(self.ready, key=lambda worker: worker.port)
                if worker.role == label_selector
            ]
        )


class Fleet:
    """Workers of which some do not listen yet, and a router's options that name all of them."""

    def __init__(self, path: Path, prefill: list[MockWorker], decode: list[MockWorker]) -> None:
        # Discoveries sort by address, flags do not: one order for all of them.
        self.prefill, self.decode = prefill, sorted(decode, key=lambda w: w.port)
        self.pods = Pods([*prefill, *decode])
        self._path = path / "workers.toml"

    def write(self, prefill: list[MockWorker], decode: list[MockWorker]) -> None:
        """Names these in the file."""
        scratch = self._path.with_suffix(".new")
        named = f"prefill = {[w.url for w in prefill]}\ndecode = {[w.url for w in decode]}"
        scratch.write_text(named)
        scratch.replace(self._path)

    def options(self, source: str, patch: pytest.MonkeyPatch) -> dict[str, Any]:
        """What names the workers."""
        if source == "flags":
            urls = lambda workers: tuple(w.url for w in workers)  # noqa: E731
            return {"prefill": urls(self.prefill), "decode": urls(self.decode)}
        if source == "file":
            self.write(self.prefill, self.decode)
            return {"worker_file": str(self._path), "discovery_interval": 0.02}
        patch.setattr(opening, "connect", lambda: self.pods)
        return {"k8s_prefill": "prefill", "k8s_decode": "decode", "discovery_interval": 0.02}


@asynccontextmanager
async def fleet(
    path: Path, prefill: list[MockWorker], decode: list[MockWorker], dead: list[MockWorker]
) -> AsyncIterator[Fleet]:
    """All workers have an address; the dead ones do not listen at it."""
    everyone = [*prefill, *decode]
    for worker in everyone:
        await worker.start()
    for worker in dead:
        await worker.kill()
    try:
        yield Fleet(path, prefill, decode)
    finally:
        for worker in everyone:
            if worker._server is not None:
                await worker.kill()


@asynccontextmanager
async def router(where: Fleet, **options: Any) -> AsyncIterator[Rig]:
    """A router that gives those who do not answer little time, and a client."""
    given = {"startup_grace": 0.5, "health_interval": 0.02, "slow_start": 0.0, **options}
    config = RouterConfig(port=0, poll_interval=0.0, startup_timeout=60.0, **given)
    with bound_sockets(config) as sockets, pytest.MonkeyPatch.context() as patch:
        patch.setattr(state, "_JOIN_SECONDS", 0.5)
        patch.setattr(discovery, "_AGAIN_SECONDS", 0.01)
        async with open_router(config) as opened, listening(opened, sockets):
            url = f"http://127.0.0.1:{sockets['main'].getsockname()[1]}"
            async with aiohttp.ClientSession() as client:
                yield Rig(opened, where.prefill, where.decode, client, url)
    assert not [t for t in asyncio.all_tasks() if t.get_name() == "joining"]


async def states(r: Rig, role: str) -> dict[str, str]:
    """State by name, as operators see it."""
    async with r.client.get(r.url + "/workers") as response:
        return {row["name"]: row["state"] for row in (await response.json())[role]}


async def home(r: Rig, expert: int) -> str:
    """The decode worker of one request whose signature is on this expert."""
    r.prefill[0].expert = expert
    assert (await r.complete())[0] == 200
    return next(r.router.decisions.newest(1)).decision.worker.name


async def in_use(r: Rig, worker: MockWorker) -> None:
    """Waits until a worker that starts now gets requests; its pool knows it once."""
    await worker.start()
    name = worker.url
    pool = r.router.pool(worker.role)
    await until(lambda: (e := pool.get(name)) is not None and not e.awaited)
    assert (await states(r, worker.role))[name] == "up"
