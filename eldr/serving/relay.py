"""Passes a decode worker's answer to the client, byte for byte and in whole events."""

from __future__ import annotations

import logging
from collections.abc import Mapping

import aiohttp
from aiohttp import web
from multidict import CIMultiDict, CIMultiDictProxy

from eldr.serving.errors import error_event

log = logging.getLogger(__name__)

# Headers that belong to one hop, or that this server writes itself.
_NOT_PASSED = frozenset(
    {
        "connection",
        "content-length",
        "date",
        "keep-alive",
        "proxy-authenticate",
        "server",
        "te",
        "trailer",
        "transfer-encoding",
        "upgrade",
    }
)
_EVENT_END = (b"\n\n", b"\r\n\r\n")
_DONE = b"[DONE]"
# An event longer than this is passed in pieces.
_LONGEST_EVENT = 2**20


def passed_headers(
    headers: CIMultiDictProxy[str], extra: Mapping[str, str] | None = None
) -> CIMultiDict[str]:
    """The worker's end-to-end headers, with ours on top."""
    out: CIMultiDict[str] = CIMultiDict()
    for name, value in headers.items():
        if name.lower() not in _NOT_PASSED:
            out.add(name, value)
    if extra:
        out.update(extra)
    return out


class Truncated(Exception):
    """The worker's stream ended before its end mark."""


async def relay_events(
    upstream: aiohttp.ClientResponse, client: web.StreamResponse, first: bytes
) -> None:
    """Copies server-sent events until the end mark, never leaving half an event behind.

    Raises:
        Truncated: the stream ended, cleanly or not, without `[DONE]`; all that was written are
            complete events.
    """
    chunk, tail, last = first, b"", b""
    read = upstream.content.readany
    try:
        while chunk:
            if tail:
                chunk, tail = tail + chunk, b""
            if not chunk.endswith(_EVENT_END) and len(chunk) < _LONGEST_EVENT:
                cut = _last_event_end(chunk)
                chunk, tail = chunk[:cut], chunk[cut:]
            if chunk:
                await client.write(chunk)
                last = chunk
            chunk = await read()
    except (aiohttp.ClientError, OSError) as error:
        if isinstance(error, aiohttp.ClientConnectionResetError):  # the client went, not the worker
            raise
        raise Truncated(str(error) or type(error).__name__) from error
    if not _ended(last, tail):
        raise Truncated("the stream ended without its end mark")
    if tail:
        await client.write(tail)


def _last_event_end(chunk: bytes) -> int:
    """Length of the part of `chunk` that holds whole events."""
    ends = [end + len(mark) for mark in _EVENT_END if (end := chunk.rfind(mark)) >= 0]
    return max(ends, default=0)


def _ended(last: bytes, tail: bytes) -> bool:
    return (last[-32:] + tail).rstrip().endswith(_DONE)


async def end_broken_stream(client: web.StreamResponse, message: str) -> None:
    """Ends a stream that cannot go on with an error event and the end mark."""
    await client.write(error_event(message, "upstream_error", 502))
    await client.write_eof()
