"""One connection to a worker: exchange after exchange with one parser, and what ends it."""

from __future__ import annotations

import asyncio

import hypothesis.strategies as st
import pytest
from hypothesis import example, given

from eldr.serving.http1 import Connection, UpstreamError
from tests.serving.wire import Transport

LINES = st.lists(
    st.sampled_from([b"Content-Type: application/json", b"X-Request-Id: 7", b"Set-Cookie: a=b"]),
    max_size=3,
)
BODIES = st.binary(max_size=40)


def with_length(lines: list[bytes], body: bytes) -> bytes:
    head = [b"HTTP/1.1 200 OK", *lines, b"Content-Length: %d" % len(body)]
    return b"\r\n".join(head) + b"\r\n\r\n" + body


def chunked(lines: list[bytes], body: bytes) -> bytes:
    head = [b"HTTP/1.1 503 Busy", *lines, b"Transfer-Encoding: chunked"]
    pieces = [body[i : i + 7] for i in range(0, len(body), 7)]
    rest = b"".join(b"%x\r\n%b\r\n" % (len(p), p) for p in pieces) + b"0\r\n\r\n"
    return b"\r\n".join(head) + b"\r\n\r\n" + rest


def interim(lines: list[bytes], body: bytes) -> bytes:
    return b"HTTP/1.1 100 Continue\r\nX-Early: 1\r\n\r\n" + with_length(lines, body)


ANSWERS = st.builds(
    lambda form, lines, body: form(lines, body),
    st.sampled_from([with_length, chunked, interim]), LINES, BODIES,
)  # fmt: skip


def connected() -> Connection:
    connection = Connection(asyncio.get_running_loop(), lambda: None)
    connection.connection_made(Transport())  # type: ignore[arg-type]
    return connection


async def exchange(connection: Connection, answer: bytes, step: int) -> tuple:
    """What comes of one exchange."""
    connection.send(b"request", 60.0, 60.0, asyncio.get_running_loop().time() + 60.0)
    for i in range(0, len(answer), step):
        connection.data_received(answer[i : i + step])
    await connection.head()
    whole = connection.whole(2**20)
    body = await connection.read_all(2**20) if whole is None else whole
    return connection.status, connection.headers, body, connection.reusable


@given(st.lists(ANSWERS, min_size=1, max_size=6), st.sampled_from([1, 5, 1000]))
async def test_an_exchange_is_the_same_on_a_kept_connection(answers, step):
    kept = connected()
    for answer in answers:
        found = await exchange(kept, answer, step)
        assert found == await exchange(connected(), answer, step)
        assert found[-1]  # and the next may follow


@given(ANSWERS, st.one_of(ANSWERS, st.binary(min_size=1, max_size=20)))
@example(with_length([], b"x"), b"HTTP/1.1 2")
@example(with_length([b"A: 1"], b"x"), b"\r\nHTTP/1.1 500 No\r\nB: 2\r\n\r\n")
async def test_bytes_after_an_answer_are_not_of_it_and_end_the_connection(answer, surplus):
    status, headers, body, _ = await exchange(connected(), answer, 2**20)
    found = await exchange(connected(), answer + surplus, 2**20)
    assert found[:3] == (status, headers, body)
    assert not found[3] or not surplus.strip(b"\r\n")
    late = connected()
    assert (await exchange(late, answer, 2**20))[-1]
    late.data_received(surplus)
    assert not late.alive


async def test_a_body_without_a_length_ends_with_its_connection():
    for clean in (True, False):
        connection = connected()
        connection.send(b"request", 60.0, 60.0, asyncio.get_running_loop().time() + 60.0)
        connection.data_received(b"HTTP/1.1 200 OK\r\nContent-Type: a/b\r\n\r\nhalf")
        assert connection.whole(100) is None
        connection.connection_lost(None if clean else ConnectionResetError("reset"))
        if clean:
            assert await connection.read_all(100) == b"half"
        else:
            with pytest.raises(UpstreamError, match="reset"):
                await connection.read_all(100)


@pytest.mark.parametrize("head", [b"Content-Length: 9", b"Transfer-Encoding: chunked"])
async def test_a_body_with_a_length_does_not(head):
    connection = connected()
    connection.send(b"request", 60.0, 60.0, asyncio.get_running_loop().time() + 60.0)
    connection.data_received(b"HTTP/1.1 200 OK\r\n" + head + b"\r\n\r\n")
    connection.connection_lost(None)
    with pytest.raises(UpstreamError, match="closed the connection"):
        await connection.read_all(100)


async def test_a_connection_lost_before_the_head_is_a_reset():
    connection = connected()
    connection.send(b"request", 60.0, 60.0, asyncio.get_running_loop().time() + 60.0)
    connection.data_received(b"HTTP/1.1 20")
    connection.connection_lost(None)
    with pytest.raises(UpstreamError) as lost:
        await connection.head()
    assert lost.value.kind == "reset"


async def test_a_body_over_the_limit_is_an_error_however_it_came():
    connection = connected()
    connection.send(b"request", 60.0, 60.0, asyncio.get_running_loop().time() + 60.0)
    connection.data_received(with_length([], b"x" * 30))
    assert connection.whole(29) is None
    with pytest.raises(UpstreamError, match="exceeds 29 bytes"):
        await connection.read_all(29)
