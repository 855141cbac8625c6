"""The listener of the main port: a short way for completions, aiohttp for everything else.

Reading a request and writing its answer costs aiohttp more than all the rest of the router together
(benchmarks/router.py), so a connection that asks for a completion in the plain form that clients
use (HTTP/1.1, Content-Length) is served here. Any other connection is handed over to aiohttp with
the bytes it has sent, and stays there: models, health, the operator's routes, chunked bodies,
`Expect`, upgrades, HTTP/1.0, and whatever is no HTTP. Parsing is llhttp's in both.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import cast

from eldr.serving.request import Request, parse_head

# The request lines that are served here.
_LINES = {
    b"POST %b HTTP/1.1\r\n" % path.encode(): path
    for path in ("/v1/completions", "/v1/chat/completions")
}
_NOT_PLAIN = frozenset({"transfer-encoding", "content-encoding", "expect"})
_LONGEST_LINE = max(map(len, _LINES))
_END = b"\r\n\r\n"
# A client that sends more than this ahead of its turn is made to wait.
_AHEAD = 2**16
_SWEEP_SECONDS = 5.0
_IDLE_SECONDS = 600.0

Handover = Callable[[], asyncio.Protocol]


Serve = Callable[[Request], Awaitable[None]]


class Front(asyncio.Protocol):
    """One client connection, until it is handed over."""

    def __init__(self, listener: Listener) -> None:
        self._listener = listener
        self._loop = listener.loop
        self._transport: asyncio.Transport | None = None
        self._buffer = b""
        # While a request waits for its body, what comes is collected in pieces.
        self._body: asyncio.Future[None] | None = None
        self._pieces: list[bytes] = []
        self._missing = 0
        self._unread = 0
        self._drained: asyncio.Future[None] | None = None
        self._task: asyncio.Task[None] | None = None
        self._reading = True
        self.since = self._loop.time()

    # What the event loop calls

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Keeps the transport."""
        self._transport = cast(asyncio.Transport, transport)
        self._listener.connections.add(self)

    def connection_lost(self, error: Exception | None) -> None:
        """The client has gone: its request ends."""
        self._transport = None
        self._listener.connections.discard(self)
        self.resume_writing()
        if self._task is not None:
            self._task.cancel()

    def pause_writing(self) -> None:
        """The client reads more slowly than we write."""
        if self._drained is None:
            self._drained = self._loop.create_future()

    def resume_writing(self) -> None:
        """The client has caught up, or gone."""
        drained, self._drained = self._drained, None
        if drained is not None and not drained.done():
            drained.set_result(None)

    def data_received(self, data: bytes) -> None:
        """Collects what came; a request starts as soon as its head is there."""
        if self._unread:
            self._unread -= len(data)
            if self._unread <= 0 and self._transport is not None:
                self._transport.close()
            return
        if self._body is not None:
            self._pieces.append(data)
            self._missing -= len(data)
            if self._missing <= 0 and not self._body.done():
                self._body.set_result(None)
            return
        if not self._buffer:
            self.since = self._loop.time()
        self._buffer = self._buffer + data if self._buffer else data
        if self._task is None:
            self._next()
        elif len(self._buffer) > _AHEAD and self._reading:
            self._reading = False
            assert self._transport is not None
            self._transport.pause_reading()

    # Requests

    def _next(self) -> None:
        """Starts the request at the front of the buffer, if its head is there."""
        buffer = self._buffer
        line = buffer.find(b"\n", 0, _LONGEST_LINE) + 1
        path = _LINES.get(buffer[:line]) if line else None
        end = buffer.find(_END, max(0, line - 2))  # there may be no header at all
        longest = self._listener.longest_head
        if end < 0 and len(buffer) <= longest and _may_become_a_head(buffer):
            return  # whoever it is for: here, the time that a head may take is watched
        request = None
        if path is not None and 0 <= end <= longest:
            request = self._open(path, buffer[: end + len(_END)])
        if request is None:
            self._hand_over()
            return
        self._buffer = buffer[end + len(_END) :]
        self._task = self._loop.create_task(self._serve(request))

    def _open(self, path: str, head: bytes) -> Request | None:
        """The request with this head; None if it is not of the plain form."""
        found = parse_head(head)
        if found is None:
            return None
        length = found.get("content-length", "")
        if _NOT_PLAIN & found.keys() or not length.isdigit():
            return None
        return Request(self, path, found, int(length))

    async def _serve(self, request: Request) -> None:
        try:
            await self._listener.serve(request)
        finally:
            self._ended(request)

    def _ended(self, request: Request) -> None:
        self._task = None
        transport = self._transport
        if transport is None:
            return
        if request.cut_short:
            transport.abort()
        elif request.unread and not self._listener.closing:
            self._linger(request.unread - len(self._buffer))
        elif request.close or self._listener.closing:
            transport.close()
        else:
            self._resume_reading()
            self.since = self._loop.time()
            if self._buffer:
                self._next()

    def _linger(self, unread: int) -> None:
        """Reads the rest of a refused body and forgets it.

        Closed before that, the client's system would throw away the refusal it has not read yet.
        """
        self._buffer, self._unread = b"", unread
        self.since = self._loop.time()
        self._resume_reading()

    def _hand_over(self) -> None:
        """Gives the connection and what it has sent to aiohttp, for good."""
        assert self._transport is not None
        self._listener.connections.discard(self)
        other = self._listener.handover()
        transport, buffer = self._transport, self._buffer
        self._transport, self._buffer = None, b""
        transport.set_protocol(other)
        other.connection_made(transport)
        other.data_received(buffer)

    # What a request calls

    def has(self, length: int) -> bool:
        """Whether so many bytes of a body are there."""
        return len(self._buffer) >= length

    async def wait_for(self, length: int) -> None:
        """Waits for so many bytes."""
        self._missing, self._body = length - len(self._buffer), self._loop.create_future()
        self._resume_reading()
        try:
            await self._body
        finally:
            self._body = None
            self._buffer += b"".join(self._pieces)
            self._pieces = []

    def take(self, length: int) -> bytes:
        """Takes so many bytes, which are there."""
        raw, self._buffer = self._buffer[:length], self._buffer[length:]
        return raw

    async def send(self, data: bytes) -> None:
        """Sends bytes; waits while the client is slow.

        Raises:
            ConnectionResetError: the client has gone.
        """
        if self._transport is None or self._transport.is_closing():
            raise ConnectionResetError("the client has gone")
        self._transport.write(data)
        if self._drained is not None:
            await self._drained

    def _resume_reading(self) -> None:
        if not self._reading and self._transport is not None:
            self._reading = True
            self._transport.resume_reading()

    # What the listener calls

    @property
    def busy(self) -> bool:
        """Whether a request runs."""
        return self._task is not None

    @property
    def partial(self) -> bool:
        """Whether part of a request's head is there, or the rest of a refused body is awaited."""
        return self._task is None and bool(self._buffer or self._unread)

    def close(self) -> None:
        """Ends the connection, with whatever runs on it."""
        if self._transport is not None:
            if self.busy:
                self._transport.abort()
            else:
                self._transport.close()


def _may_become_a_head(buffer: bytes) -> bool:
    """Whether it starts like a request whose head is not there as a whole."""
    line = buffer.find(b"\n")
    return buffer[:1].isupper() and (line < 0 or buffer[line - 1 : line] == b"\r")


class Listener:
    """All connections of the main port.

    Attributes:
        closing: connections end with their request.
    """

    def __init__(
        self, serve: Serve, handover: Handover, *, longest_head: int, head_seconds: float
    ) -> None:
        """What becomes of connections.

        Args:
            serve: serves one completion.
            handover: makes the protocol that takes connections over.
            longest_head: bytes; longer heads are handed over.
            head_seconds: time that a request's head may take.
        """
        self.loop = asyncio.get_running_loop()
        self.serve, self.handover, self.longest_head = serve, handover, longest_head
        self.connections: set[Front] = set()
        self.closing = False
        self._head_seconds = head_seconds

    def __call__(self) -> Front:
        """A new connection's protocol."""
        return Front(self)

    async def sweep(self) -> None:
        """Closes connections that idle or send no whole head, until cancelled."""
        while True:
            await asyncio.sleep(min(_SWEEP_SECONDS, self._head_seconds))
            now = self.loop.time()
            for connection in list(self.connections):
                limit = self._head_seconds if connection.partial else _IDLE_SECONDS
                if not connection.busy and connection.since < now - limit:
                    connection.close()

    async def close(self, seconds: float) -> None:
        """Closes idle connections at once, busy ones when their request ends or time is over."""
        self.closing = True
        for connection in list(self.connections):
            if not connection.busy:
                connection.close()
        end = self.loop.time() + seconds
        while self.connections and self.loop.time() < end:
            await asyncio.sleep(0.01)
        for connection in list(self.connections):
            connection.close()
