"""Passes a decode worker's answer to the client, byte for byte and in whole events."""

from __future__ import annotations

from typing import Protocol

from eldr.serving.errors import error_event
from eldr.serving.http1 import Connection, UpstreamError
from eldr.serving.upstream import Pairs

_EVENT_END = (b"\n\n", b"\r\n\r\n")
_DONE = b"[DONE]"
# An event longer than this is passed in pieces.
_LONGEST_EVENT = 2**20


class Client(Protocol):
    """The way to a client that gets a streamed answer."""

    async def begin(self, headers: Pairs) -> None:
        """Starts the answer, of status 200."""

    async def write(self, data: bytes) -> None:
        """Sends a piece; waits while the client is slow."""

    async def end(self) -> None:
        """Ends the answer."""


class Truncated(Exception):
    """The worker's stream ended before its end mark.

    Attributes:
        cause: how it ended.
    """

    def __init__(self, cause: UpstreamError) -> None:
        super().__init__(str(cause))
        self.cause = cause


async def first_event(upstream: Connection) -> bytes:
    """The first bytes of a stream, up to at least the end of its first event.

    Raises:
        UpstreamError: the stream ended before that.
    """
    first = b""
    while not any(mark in first for mark in _EVENT_END) and len(first) < _LONGEST_EVENT:
        piece = await upstream.read()
        if not piece:
            raise UpstreamError("reset", True, "the stream ended before its first event")
        first += piece
    return first


async def relay_events(upstream: Connection, client: Client, first: bytes) -> int:
    """Copies server-sent events up to their end, never leaving half an event behind.

    Returns:
        The number of events before the end mark.

    Raises:
        Truncated: the stream ended, cleanly or not, without `[DONE]`; all that was written are
            complete events, except that a longer one than `_LONGEST_EVENT` may be cut off, with
            an empty line after it.
    """
    chunk, tail, last, events = first, b"", b"", -1  # the end mark does not count
    while chunk:
        if tail:
            chunk, tail = tail + chunk, b""
        if not chunk.endswith(_EVENT_END) and len(chunk) < _LONGEST_EVENT:
            cut = _last_event_end(chunk)
            chunk, tail = chunk[:cut], chunk[cut:]
        if chunk:
            await client.write(chunk)
            last = chunk
            events += chunk.count(b"\n\n") or chunk.count(b"\r\n\r\n")
        try:
            chunk = await upstream.read()
        except UpstreamError as error:
            if _ended(last, tail):
                break  # the worker died between its end mark and the end of the transfer
            await _close_event(client, last)
            raise Truncated(error) from error
    if not _ended(last, tail):
        await _close_event(client, last)
        raise Truncated(UpstreamError("reset", True, "the stream ended without its end mark"))
    if tail:
        await client.write(tail)
    await client.end()
    return max(events, 0)


def _last_event_end(chunk: bytes) -> int:
    """Length of the part of `chunk` that holds whole events."""
    ends = [end + len(mark) for mark in _EVENT_END if (end := chunk.rfind(mark)) >= 0]
    return max(ends, default=0)


async def _close_event(client: Client, last: bytes) -> None:
    """Ends an event that was passed on in part, so that another can follow."""
    if last and not last.endswith(_EVENT_END):
        await client.write(b"\n\n")


def _ended(last: bytes, tail: bytes) -> bool:
    return (last[-32:] + tail).rstrip().endswith(_DONE)


async def end_broken_stream(client: Client, message: str) -> None:
    """Ends a stream that cannot go on with an error event and the end mark."""
    await client.write(error_event(message, "upstream_error", 502))
    await client.end()
