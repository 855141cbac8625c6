"""Bytes of clients and workers as they may come, for `fuzzing`."""

from __future__ import annotations

import asyncio

from hypothesis import strategies as st

from eldr.serving.errors import ClientError
from eldr.serving.front import Listener
from eldr.serving.http1 import Connection, UpstreamError
from eldr.serving.relay import Truncated, relay_events
from eldr.serving.request import Request
from eldr.serving.upstream import Answer


class Transport:
    """A transport that goes nowhere."""

    def __init__(self) -> None:
        self.closed = False
        self.answers = 0
        self.protocol: asyncio.Protocol | None = None

    def write(self, data: bytes) -> None:
        self.answers += data.startswith(b"HTTP/1.1 200 OK\r\n")

    def set_protocol(self, protocol: asyncio.Protocol) -> None:
        self.protocol = protocol

    def close(self) -> None:
        self.closed = True

    def pause_reading(self) -> None:
        pass

    def resume_reading(self) -> None:
        pass

    def is_closing(self) -> bool:
        return self.closed

    def get_write_buffer_size(self) -> int:
        return 0

    def abort(self) -> None:
        self.closed = True


class _Client:
    """A client that keeps what it is sent."""

    def __init__(self) -> None:
        self.got: list[bytes] = []

    async def write(self, data: bytes) -> None:
        self.got.append(data)

    async def end(self) -> None:
        pass


class _Aiohttp(asyncio.Protocol):
    """Takes a connection over and keeps what it is given."""

    def __init__(self) -> None:
        self.got = b""

    def data_received(self, data: bytes) -> None:
        self.got += data


REQUESTS = st.lists(
    st.one_of(
        st.sampled_from([b"{}", b"", b"x" * 50]).map(
            lambda b: b"POST /v1/completions HTTP/1.1\r\nContent-Length: %d\r\n\r\n%b" % (len(b), b)
        ),
        st.binary(max_size=40),
        st.sampled_from(
            [b"GET /health HTTP/1.1\r\n\r\n", b"POST /v1/c", b"\r\n", b"Content-Length: 3\r\n"]
        ),
    ),
    max_size=5,
)


def bytes_of_a_client(parts: list[bytes], step: int, late: bool) -> None:
    """Served on the short way or handed over, and no byte is lost on the way to aiohttp."""
    data = b"".join(parts)

    async def run() -> None:
        bodies: list[bytes] = []
        other = _Aiohttp()

        async def serve(request: Request) -> None:
            if late:
                await asyncio.sleep(0)
            try:
                bodies.append(await request.body(100, 60.0))
            except ClientError as error:
                await request.answer(Answer(error.status, [], b""))
                return
            await request.answer(Answer(200, [], b"ok"))

        listener = Listener(serve, lambda: other, longest_head=200, head_seconds=1.0)
        front, transport = listener(), Transport()
        front.connection_made(transport)  # type: ignore[arg-type]
        for i in range(0, len(data), step):
            taken = transport.protocol or front
            if not transport.closed:
                taken.data_received(data[i : i + step])
            await asyncio.sleep(0)
        for _ in range(20):
            await asyncio.sleep(0)
        front.connection_lost(None)
        await asyncio.sleep(0)
        assert transport.answers == len(bodies)
        assert data.endswith(other.got)

    asyncio.run(run())


HEADS = st.sampled_from(
    [
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nContent-Length: 40\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nConnection: close\r\n\r\n",
        b"HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 200 OK\r\nContent-Length: 5\r\n\r\n",
        b"HTTP/1.1 101 Switching\r\nUpgrade: x\r\nConnection: upgrade\r\n\r\n",
        b"HTTP/1.0 200 OK\r\n\r\n",
        b"",
    ]
)
WIRE = st.lists(
    st.one_of(
        st.binary(max_size=40),
        st.sampled_from(
            [b"data: {}\n\n", b"data: [DONE]\n\n", b"0\r\n\r\n", b"a\r\n", b"\r\n\r\n"]
        ),
        st.binary(max_size=20).map(lambda b: b"%x\r\n%b\r\n" % (len(b), b) if b else b""),
    ),
    max_size=12,
)


def bytes_on_the_wire(head: bytes, parts: list[bytes], step: int, clean: bool) -> None:
    """An answer or an error, however the bytes are cut."""
    data = head + b"".join(parts)

    async def run() -> None:
        loop = asyncio.get_running_loop()
        connection = Connection(loop, lambda: None)
        connection.connection_made(Transport())  # type: ignore[arg-type]
        connection.send(b"x", 60.0, 60.0, loop.time() + 60.0)
        for i in range(0, len(data), step):
            connection.data_received(data[i : i + step])
        connection.connection_lost(None if clean else ConnectionResetError())
        client = _Client()
        try:
            await connection.head()
            first = await connection.read()
            await relay_events(connection, client, first)  # type: ignore[arg-type]
        except (UpstreamError, Truncated):
            pass
        sent = b"".join(client.got)
        assert sent in data or b"\r\n" in data  # chunk framing aside, nothing is invented

    asyncio.run(run())
