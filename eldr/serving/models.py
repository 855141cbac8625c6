"""GET /v1/models: the first answer of any worker, however many of them are dead or hang."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence

import aiohttp

from eldr.serving.condition import State
from eldr.serving.endpoints import Endpoint

log = logging.getLogger(__name__)

_SECONDS = 5.0
# A worker that takes longer is not given up, but the next one is asked as well.
_PATIENCE_SECONDS = 0.5


async def first_models(
    session: aiohttp.ClientSession, endpoints: Sequence[Endpoint]
) -> bytes | None:
    """The first 200 answer, None if no worker has one; healthy workers are asked first."""
    now = asyncio.get_running_loop().time()
    left = sorted(endpoints, key=lambda e: e.condition.state(now) is not State.UP)
    asked: set[asyncio.Task[bytes | None]] = set()
    try:
        while left or asked:
            if left:
                asked.add(asyncio.create_task(_ask(session, left.pop(0))))
            patience = _PATIENCE_SECONDS if left else None
            done, asked = await asyncio.wait(
                asked, timeout=patience, return_when=asyncio.FIRST_COMPLETED
            )
            for task in done:
                if (raw := task.result()) is not None:
                    return raw
        return None
    finally:
        for task in asked:
            task.cancel()


async def _ask(session: aiohttp.ClientSession, endpoint: Endpoint) -> bytes | None:
    try:
        async with (
            asyncio.timeout(_SECONDS),
            session.get(endpoint.route("/v1/models"), allow_redirects=False) as response,
        ):
            raw = await response.read()
            if response.status == 200:
                return raw
            why = f"HTTP {response.status}"
    except (aiohttp.ClientError, OSError) as error:  # TimeoutError is an OSError
        why = str(error) or type(error).__name__
    log.info("/v1/models of %s: %s", endpoint.name, why)
    return None
