"""GET /eldr/decisions?follow=1: decisions as server-sent events, as they are made."""

from __future__ import annotations

import asyncio
from contextlib import suppress
from typing import Any

import orjson
from aiohttp import web

from eldr.serving.decisions import DecisionBuffer

# A comment is sent after so long a silence: proxies keep the connection, dead readers show.
_SILENCE_SECONDS = 15.0
_HEADERS = {
    "Content-Type": "text/event-stream",
    "Cache-Control": "no-store",
    "X-Accel-Buffering": "no",
}


async def follow(
    request: web.Request, buffer: DecisionBuffer, limit: int, stopping: asyncio.Event
) -> web.StreamResponse:
    """Sends the last `limit` decisions, oldest first, then each new one until somebody leaves.

    A reader that is too slow for the buffer is told how many decisions it missed.

    Raises:
        ClientError: 503, too many follow.
    """
    with buffer.follower() as news:
        response = web.StreamResponse(headers=_HEADERS)
        await response.prepare(request)
        seen = max(0, buffer.total - limit)
        stopped = asyncio.ensure_future(stopping.wait())
        try:
            with suppress(ConnectionResetError):  # the reader went
                while not stopped.done():
                    news.clear()
                    told, seen = _events(buffer, seen), buffer.total
                    await response.write(told)
                    await _either(news, stopped)
        finally:
            stopped.cancel()
        return response


def _events(buffer: DecisionBuffer, seen: int) -> bytes:
    records, missed = buffer.since(seen)
    head = b'event: missed\ndata: {"missed":%d}\n\n' % missed if missed else b""
    rows = [b"data: %b\n\n" % orjson.dumps(record.explain()) for record in records]
    return head + b"".join(rows) or b":\n\n"


async def _either(news: asyncio.Event, stopped: asyncio.Future[Any]) -> None:
    """Waits for news, the end, or a silence that is long enough."""
    new = asyncio.ensure_future(news.wait())
    try:
        await asyncio.wait(
            (new, stopped), timeout=_SILENCE_SECONDS, return_when=asyncio.FIRST_COMPLETED
        )
    finally:
        new.cancel()
