"""A completion request on the short way (`front`): its parts, and the bytes of its answer."""

from __future__ import annotations

import asyncio
import time
from email.utils import formatdate
from http import HTTPStatus
from typing import Protocol

import httptools

from eldr.serving.errors import ClientError
from eldr.serving.upstream import Answer, Pairs

_REASONS = {status.value: status.phrase.encode() for status in HTTPStatus}


class Connection(Protocol):
    """What a request needs of the connection that it came by."""

    def has(self, length: int) -> bool:
        """Whether so many bytes of a body are there."""

    async def wait_for(self, length: int) -> None:
        """Waits for so many bytes."""

    def take(self, length: int) -> bytes:
        """Takes so many bytes, which are there."""

    async def send(self, data: bytes) -> None:
        """Sends bytes; waits while the client is slow."""


class Request:
    """One request of a connection and the way back to its client.

    Attributes:
        path: API path.
        headers: values by lower-case name, the first of each.
    """

    __slots__ = ("_connection", "_head", "_length", "_streams", "close", "headers", "path")

    def __init__(
        self, connection: Connection, path: str, headers: dict[str, str], length: int
    ) -> None:
        self._connection = connection
        self._length = length
        self._head = b""
        self._streams = False
        self.path = path
        self.headers = headers
        self.close = "close" in headers.get("connection", "").lower()

    async def body(self, limit: int, seconds: float) -> bytes:
        """The body.

        Raises:
            ClientError: 413, longer than `limit`; 408, not there in time.
        """
        if self._length > limit:
            raise ClientError(413, "request_too_large", f"the body exceeds {limit} bytes")
        if not self._connection.has(self._length):
            try:
                async with asyncio.timeout(seconds):
                    await self._connection.wait_for(self._length)
            except TimeoutError as error:
                text = f"the body did not arrive within {seconds:g} s"
                raise ClientError(408, "request_timeout", text) from error
        raw, self._length = self._connection.take(self._length), 0
        return raw

    @property
    def unread(self) -> int:
        """Bytes of the body that were not taken; nothing can follow on the connection then."""
        return self._length

    async def begin(self, headers: Pairs) -> None:
        """Starts a streamed answer of status 200; it is sent with the first bytes."""
        self._head = _head(200, headers, b"Transfer-Encoding: chunked\r\n", self.close)
        self._streams = True

    async def write(self, data: bytes) -> None:
        """Sends a piece of a streamed answer; waits while the client is slow.

        Raises:
            ConnectionResetError: the client has gone.
        """
        head, self._head = self._head, b""
        await self._connection.send(b"%b%x\r\n%b\r\n" % (head, len(data), data))

    async def end(self) -> None:
        """Ends a streamed answer."""
        await self._connection.send(self._head + b"0\r\n\r\n")
        self._streams = False

    async def answer(self, answer: Answer) -> None:
        """Sends a whole answer."""
        if self._connection.has(self._length):  # refused unread, but it came with the head
            self._connection.take(self._length)
            self._length = 0
        self.close = self.close or self._length > 0
        length = b"Content-Length: %d\r\n" % len(answer.body)
        head = _head(answer.status, answer.raw_headers, length, self.close)
        await self._connection.send(head + answer.body)

    @property
    def cut_short(self) -> bool:
        """Whether a streamed answer was begun and not ended."""
        return self._streams


def parse_head(head: bytes) -> dict[str, str] | None:
    """Headers by lower-case name, the first of each; None if it is no head or asks to upgrade."""
    headers = _Headers()
    try:
        httptools.HttpRequestParser(headers).feed_data(head)
    except (httptools.HttpParserError, httptools.HttpParserUpgrade):
        return None
    out: dict[str, str] = {}
    for name, value in headers.found.items():
        # As aiohttp has it: bytes that are no UTF-8 survive the way to the workers.
        out.setdefault(name.decode("latin-1").lower(), value.decode("utf-8", "surrogateescape"))
    return out


class _Headers:
    """Collects a head's headers for the parser; the first of a name counts."""

    __slots__ = ("found", "on_header")

    def __init__(self) -> None:
        self.found: dict[bytes, bytes] = {}
        self.on_header = self.found.setdefault  # called by name and value


_date: tuple[int, bytes] = (0, b"")


def _now() -> bytes:
    """The Date header's value, made once a second."""
    global _date
    second = int(time.time())
    if _date[0] != second:
        _date = second, formatdate(second, usegmt=True).encode()
    return _date[1]


def _head(status: int, headers: Pairs, framing: bytes, close: bool) -> bytes:
    lines = b"".join([b"%b: %b\r\n" % pair for pair in headers])
    return b"HTTP/1.1 %d %b\r\n%b%bDate: %b\r\n%b\r\n" % (
        status,
        _REASONS.get(status, b"Unknown"),
        lines,
        framing,
        _now(),
        b"Connection: close\r\n" if close else b"",
    )
