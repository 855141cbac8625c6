"""Replays a fixed list of requests at a fixed concurrency and times their tokens."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import aiohttp

from eldr.demo.config import MODEL_NAME

_REQUEST_TIMEOUT = 600.0  # seconds; two busy cores can stall a request for long


@dataclass(frozen=True, slots=True)
class DemoRequest:
    """One request of the replay; the same for every policy."""

    index: int
    prompt: str
    domain: str
    max_tokens: int
    seed: int


@dataclass(frozen=True, slots=True)
class Timing:
    """What the client saw of one request; times in seconds of the monotonic clock."""

    request_id: str
    start: float
    first_token: float
    end: float
    tokens: int
    tpot: float | None  # seconds per token after the first chunk; None if one chunk held all


async def replay(
    url: str,
    requests: Sequence[DemoRequest],
    concurrency: int,
    tag: str,
    progress: Callable[[int], None],
) -> list[Timing]:
    """Streams every request, `concurrency` at a time, started in the given order.

    Raises:
        RuntimeError: a request was refused or its stream broke; names the request and the answer.
    """
    queue = iter(requests)
    timings: list[Timing] = []
    timeout = aiohttp.ClientTimeout(total=_REQUEST_TIMEOUT)
    connector = aiohttp.TCPConnector(limit=0)
    async with aiohttp.ClientSession(timeout=timeout, connector=connector) as session:

        async def client() -> None:
            for request in queue:  # shared: each client takes the next request in order
                timings.append(await _stream(session, url, request, f"{tag}-{request.index}"))
                progress(len(timings))

        try:
            async with asyncio.TaskGroup() as group:
                for _ in range(concurrency):
                    group.create_task(client())
        except BaseExceptionGroup as failures:  # the first failure cancelled the other clients
            raise failures.exceptions[0] from None
    return timings


async def _stream(
    session: aiohttp.ClientSession, url: str, request: DemoRequest, request_id: str
) -> Timing:
    body = {
        "model": MODEL_NAME,
        "prompt": request.prompt,
        "max_tokens": request.max_tokens,
        "temperature": 0.8,
        "seed": request.seed,
        "ignore_eos": True,
        "stream": True,
        # Chunks may hold several tokens: the running usage tells how many had arrived when.
        "stream_options": {"include_usage": True, "continuous_usage_stats": True},
    }
    arrivals: list[tuple[float, int]] = []
    start = time.monotonic()
    headers = {"X-Request-Id": request_id}
    async with session.post(f"{url}/v1/completions", json=body, headers=headers) as answer:
        if answer.status != 200:
            raise RuntimeError(f"{request_id}: HTTP {answer.status}: {await answer.text()}")
        async for line in answer.content:
            tokens = _tokens_so_far(line, request_id)
            if tokens > (arrivals[-1][1] if arrivals else 0):
                arrivals.append((time.monotonic(), tokens))
    if not arrivals or arrivals[-1][1] != request.max_tokens:
        got = arrivals[-1][1] if arrivals else 0
        raise RuntimeError(f"{request_id}: stream ended after {got} of {request.max_tokens} tokens")
    (first, had), (last, tokens) = arrivals[0], arrivals[-1]
    tpot = (last - first) / (tokens - had) if tokens > had else None
    return Timing(request_id, start, first, last, tokens, tpot)


def _tokens_so_far(line: bytes, request_id: str) -> int:
    """Completion tokens of the request when this SSE line was sent; 0 for other lines."""
    if not line.startswith(b"data:") or line.strip() == b"data: [DONE]":
        return 0
    event = json.loads(line[5:])
    if "error" in event:
        raise RuntimeError(f"{request_id}: {event['error']}")
    return int((event.get("usage") or {}).get("completion_tokens") or 0)
