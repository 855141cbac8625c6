"""A lean HTTP/1.1 client connection for the hot path: one exchange at a time, kept alive between.

A general client costs more per request than the rest of the router together (measured by
benchmarks/router.py). Parsing is llhttp's, by httptools; around it is only what a proxy needs.
Deadlines are checked by one ticker for all connections, so an exchange arms no timers.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Literal, cast

import httptools

FailureKind = Literal["connect", "reset", "timeout", "malformed", "cut"]

# Reading pauses while the consumer is this far behind.
_HIGH_WATER = 2**18
_LONGEST_HEAD = 2**16
_NO_DEADLINE = float("inf")


class UpstreamError(Exception):
    """A worker gave no usable answer.

    Attributes:
        kind: `connect` (never reached), `reset` (connection lost), `timeout` (no byte in time),
            `malformed` (not HTTP, or more than allowed), `cut` (ended by the router itself: the
            request's time is over, or the router stops).
        sent: whether the worker may have seen the request.
    """

    def __init__(self, kind: FailureKind, sent: bool, message: str) -> None:
        super().__init__(message)
        self.kind = kind
        self.sent = sent


class Connection(asyncio.Protocol):
    """One connection; after `send`, the answer appears in its attributes and in `read`.

    Attributes:
        status: of the answer, 0 before its headers are there.
        headers: of the answer, as received.
        complete: the answer is there as a whole.
        deadline: loop time at which silence becomes a timeout; every byte moves it.
        idle_limit: seconds of silence that may follow a byte.
        expires: loop time at which the exchange ends, whatever it does.
        used: exchanges begun on this connection.
        heard_at: loop time of the exchange's start or last byte.
        idle_since: loop time at which the last exchange ended.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop, lost: Callable[[], None]) -> None:
        self._loop = loop
        self._lost = lost
        self._dropped = False
        self._transport: asyncio.Transport | None = None
        self._parser = httptools.HttpResponseParser(self)
        self.used = 0
        self.idle_since = 0.0
        self.heard_at = 0.0
        self._reset()

    def _reset(self) -> None:
        self.status = 0
        self.headers: list[tuple[bytes, bytes]] = []
        self.complete = False
        self.deadline = _NO_DEADLINE
        self.idle_limit = _NO_DEADLINE
        self.expires = _NO_DEADLINE
        self._pieces: list[bytes] = []
        self._buffered = 0
        self._head_bytes = 0
        self._paused = False
        self._keep_alive = False
        self._active = False
        self._error: UpstreamError | None = None
        self._waiter: asyncio.Future[None] | None = None

    # What the event loop calls

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Keeps the transport."""
        # uvloop's transports do not derive from asyncio's.
        self._transport = cast(asyncio.Transport, transport)

    def data_received(self, data: bytes) -> None:
        """Parses what came; outside an exchange nothing may come."""
        if not self._active or self.complete:
            self.close()
            return
        self.heard_at = self._loop.time()
        if not self._paused:
            self.deadline = self.heard_at + self.idle_limit
        if not self.status:
            self._head_bytes += len(data)
        try:
            self._parser.feed_data(data)
        except (httptools.HttpParserError, httptools.HttpParserUpgrade) as error:
            self.fail("malformed", f"the answer is not HTTP: {error}")
            return
        if not self.status and self._head_bytes > _LONGEST_HEAD:
            self.fail("malformed", f"the answer's head exceeds {_LONGEST_HEAD} bytes")
            return
        self._wake()

    def connection_lost(self, error: Exception | None) -> None:
        """Ends the exchange: as complete if its body ends with the connection, else as broken."""
        self._transport = None
        if not self._dropped:
            self._lost()
        if self._active and not self.complete:
            if error is None and self._ends_with_connection():
                self.complete = True
                self._wake()
            else:
                self.fail("reset", str(error) if error else "the worker closed the connection")

    # What the parser calls

    def on_message_begin(self) -> None:
        """An answer begins; a second one is nobody's, and the connection of no more use."""
        if self.complete:
            self._keep_alive = False

    def on_header(self, name: bytes, value: bytes) -> None:
        """One header."""
        if not self.complete:
            self.headers.append((name, value))

    def on_headers_complete(self) -> None:
        """The head is there; interim answers (1xx) are skipped, a second answer is an error."""
        if self.complete:
            raise ValueError("bytes follow the answer")
        status = self._parser.get_status_code()
        if status < 200:
            self.headers = []
            return
        self.status = status
        self._keep_alive = self._parser.should_keep_alive()

    def on_body(self, piece: bytes) -> None:
        """A piece of the body, its transfer coding removed."""
        self._pieces.append(piece)
        self._buffered += len(piece)
        if self._buffered > _HIGH_WATER and not self._paused and self._transport is not None:
            self._paused = True
            self._transport.pause_reading()
            self.deadline = _NO_DEADLINE  # it is the consumer who is slow now

    def on_message_complete(self) -> None:
        """The answer has ended."""
        if self.status:
            self.complete = True

    # What the owner calls

    @property
    def alive(self) -> bool:
        """Whether the connection can carry an exchange."""
        return self._transport is not None and not self._transport.is_closing()

    @property
    def heard(self) -> bool:
        """Whether any byte of the answer came."""
        return self._head_bytes > 0

    @property
    def reusable(self) -> bool:
        """Whether the exchange ended so that another may follow."""
        if not (self.complete and self._keep_alive and self._error is None):
            return False
        # A worker that answered before it read the whole request must not get another one.
        transport = self._transport
        return transport is not None and self.alive and transport.get_write_buffer_size() == 0

    def _ends_with_connection(self) -> bool:
        """Whether the end of the connection is the end of the body."""
        names = {name.lower() for name, _ in self.headers}
        return bool(self.status) and names.isdisjoint((b"content-length", b"transfer-encoding"))

    def check_deadlines(self, now: float) -> None:
        """Fails an exchange that was silent for too long, or whose request's time is over."""
        if self.complete:
            return
        if self.expires < now:
            self.fail("cut", "the request's time is over")
        elif self.deadline < now:
            self.fail("timeout", "the worker did not answer in time")

    def send(self, data: bytes, first_byte: float, idle: float, expires: float) -> None:
        """Begins an exchange.

        Args:
            data: the request.
            first_byte: seconds until the answer's first byte.
            idle: `idle_limit`.
            expires: loop time.
        """
        if self.used:
            self._reset()
        self.used += 1
        self._active = True
        self.heard_at = now = self._loop.time()
        self.deadline, self.idle_limit, self.expires = now + first_byte, idle, expires
        if self._transport is None:
            self.fail("reset", "the worker closed the connection")
        else:
            self._transport.write(data)

    async def head(self) -> None:
        """Waits for status and headers.

        Raises:
            UpstreamError: none came.
        """
        while not self.status:
            await self._wait()

    def whole(self, limit: int) -> bytes | None:
        """The rest of the body; None for what takes `read_all`: it has not all come, or is long."""
        if not self.complete or self._paused or self._buffered > limit:
            return None
        return self._take()

    async def read(self) -> bytes:
        """The next bytes of the body, as many as there are; b"" at its end.

        Raises:
            UpstreamError: the body broke off, or stayed silent for too long.
        """
        while not self._pieces:
            if self.complete:
                return b""
            await self._wait()
        data = self._take()
        if self._paused and self._transport is not None:
            self._paused = False
            self._transport.resume_reading()
            self.deadline = self._loop.time() + self.idle_limit
        return data

    async def read_all(self, limit: int) -> bytes:
        """The rest of the body.

        Raises:
            UpstreamError: it broke off, stayed silent, or exceeds `limit` bytes.
        """
        pieces, size = [], 0
        while piece := await self.read():
            pieces.append(piece)
            size += len(piece)
            if size > limit:
                raise UpstreamError("malformed", True, f"the answer exceeds {limit} bytes")
        return _joined(pieces)

    def _take(self) -> bytes:
        """What of the body is there."""
        pieces, self._pieces, self._buffered = self._pieces, [], 0
        return _joined(pieces)

    def fail(self, kind: FailureKind, message: str) -> None:
        """Ends the exchange with an error and the connection with it."""
        if self._error is None:
            self._error = UpstreamError(kind, True, message)
        self.close()
        self._wake()

    def close(self) -> None:
        """Drops the connection at once; the worker aborts what it was doing for us."""
        if self._transport is not None:
            self._dropped = True
            self._transport.abort()

    async def _wait(self) -> None:
        if self._error is not None:
            raise self._error
        self._waiter = self._loop.create_future()
        try:
            await self._waiter
        finally:
            self._waiter = None
        if self._error is not None and not self._pieces:
            raise self._error

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)


def _joined(pieces: list[bytes]) -> bytes:
    """One piece is not copied."""
    return pieces[0] if len(pieces) == 1 else b"".join(pieces)
