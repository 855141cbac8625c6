"""A router with mock workers around it, all in one event loop."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

import aiohttp

from eldr.serving.config import RouterConfig
from eldr.serving.opening import open_router
from eldr.serving.server import bound_sockets, listening
from eldr.serving.state import Router
from tests.serving.mocks.worker import MockWorker, workers


@dataclass
class Rig:
    """The running pieces and a client."""

    router: Router
    prefill: list[MockWorker]
    decode: list[MockWorker]
    client: aiohttp.ClientSession
    url: str

    async def complete(self, **fields: Any) -> tuple[int, Any]:
        """POST /v1/completions; status and parsed body."""
        body = {"model": "m", "prompt": "hello", "max_tokens": 4, **fields}
        async with self.client.post(self.url + "/v1/completions", json=body) as response:
            return response.status, await response.json(content_type=None)

    async def stream(self, **fields: Any) -> tuple[int, bytes]:
        """POST /v1/completions with stream: true; status and all bytes."""
        body = {"model": "m", "prompt": "hello", "max_tokens": 4, "stream": True, **fields}
        async with self.client.post(self.url + "/v1/completions", json=body) as response:
            return response.status, await response.read()

    def idle(self) -> bool:
        """Whether every counter and reservation is back to zero."""
        fleet = self.router.decode.fleet
        fleet.check_integrity()
        running = sum(e.running for e in self.router.endpoints())
        return fleet.running == 0 and running == 0


@asynccontextmanager
async def rig(
    prefill: int | list[MockWorker] = 1, decode: int | list[MockWorker] = 2, **options: Any
) -> AsyncIterator[Rig]:
    """Starts mocks, router and client; checks at the end that nothing is left running.

    The router does not poll its workers unless an option says so: tests count what is asked.
    """
    options.setdefault("poll_interval", 0.0)
    p = [MockWorker("prefill") for _ in range(prefill)] if isinstance(prefill, int) else prefill
    d = [MockWorker("decode") for _ in range(decode)] if isinstance(decode, int) else decode
    async with workers(*p, *d):
        config = RouterConfig(
            prefill=tuple(w.url for w in p),
            decode=tuple(w.url for w in d),
            port=0,
            startup_timeout=60.0,
            **options,
        )
        with bound_sockets(config) as sockets:
            async with open_router(config) as router, listening(router, sockets):
                url = f"http://127.0.0.1:{sockets['main'].getsockname()[1]}"
                async with aiohttp.ClientSession() as client:
                    yield Rig(router, p, d, client, url)
                await until(lambda: router.decode.fleet.running == 0)
                assert not [e.name for e in router.endpoints() if e.running]
                router.decode.fleet.check_integrity()


async def until(true: Callable[[], bool], seconds: float = 60.0) -> None:
    """Waits for a condition that other tasks bring about."""
    async with asyncio.timeout(seconds):
        while not true():
            await asyncio.sleep(0.005)


def events(raw: bytes) -> list[bytes]:
    """The data of all events of a stream, which must consist of whole events."""
    assert raw.endswith(b"\n\n"), raw[-80:]
    return [e.removeprefix(b"data: ") for e in raw.split(b"\n\n")[:-1]]


async def both(r: Rig) -> None:
    """One plain and one streamed request, both of which must succeed."""
    status, answer = await r.complete()
    assert status == 200, answer
    status, raw = await r.stream()
    assert status == 200
    assert events(raw)[-1] == b"[DONE]"


async def figures(r: Rig) -> dict[str, dict[str, float]]:
    """Samples by name and value of their only (or last) label."""
    out: dict[str, dict[str, float]] = {}
    for metric in r.router.metrics.registry.collect():
        for sample in metric.samples:
            label = next(reversed(sample.labels.values()), "")
            out.setdefault(sample.name, {})[label] = sample.value
    return out
