"""Work that goes on beside the requests for as long as the router runs."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from contextlib import AsyncExitStack, suppress

log = logging.getLogger(__name__)

_PAUSE_SECONDS = 1.0


def start(stack: AsyncExitStack, name: str, work: Callable[[], Awaitable[None]]) -> None:
    """Starts work that ends with the stack; if it fails, that is logged and it begins again."""
    stack.push_async_callback(_cancel, asyncio.create_task(_keep(name, work), name=name))


async def _keep(name: str, work: Callable[[], Awaitable[None]]) -> None:
    while True:
        try:
            await work()
            return
        except Exception:  # a bug in it must not leave the router without, say, health checks
            log.exception("%s failed; it begins again", name)
        await asyncio.sleep(_PAUSE_SECONDS)


async def _cancel(task: asyncio.Task[None]) -> None:
    task.cancel()
    with suppress(asyncio.CancelledError):
        await task
