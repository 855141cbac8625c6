"""The ASGI exchange: order of pieces, coalescing, ends that are no ends, a consumer that leaves."""

import asyncio
from contextlib import aclosing

import pytest

from eldr.serving.pd.route import Head, Leg
from eldr.serving.ray.asgi import ApplicationError, exchange

LEG = Leg("POST", "/v1/completions?x=1", [("content-type", "application/json")], b"{}")
START = {"type": "http.response.start", "status": 200, "headers": [(b"X-A", b"1")]}


def piece(body: bytes, more: bool = True) -> dict:
    return {"type": "http.response.body", "body": body, "more_body": more}


async def collect(application) -> list:
    async with aclosing(exchange(application, LEG)) as items:
        return [item async for item in items]


async def test_the_application_sees_the_request_and_the_caller_the_answer() -> None:
    seen = []

    async def application(scope, receive, send):
        seen.append((scope["method"], scope["path"], scope["query_string"], scope["headers"]))
        seen.append(await receive())
        await send(START)
        await send(piece(b"a"))
        await send(piece(b"b", more=False))

    assert await collect(application) == [Head(200, [("x-a", "1")]), b"ab"]
    assert seen[0] == (
        "POST",
        "/v1/completions",
        b"x=1",
        [(b"content-type", b"application/json")],
    )
    assert seen[1] == {"type": "http.request", "body": b"{}", "more_body": False}


async def test_pieces_come_as_they_are_sent() -> None:
    gate = asyncio.Event()

    async def application(scope, receive, send):
        await send(START)
        await send(piece(b"a"))
        await gate.wait()
        await send(piece(b"b", more=False))

    async with aclosing(exchange(application, LEG)) as items:
        assert (await anext(items)).status == 200
        assert await anext(items) == b"a"
        gate.set()
        assert await anext(items) == b"b"
        with pytest.raises(StopAsyncIteration):
            await anext(items)


async def test_a_consumer_that_leaves_ends_the_request() -> None:
    ended = []

    async def application(scope, receive, send):
        try:
            await send(START)
            await send(piece(b"a"))
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            ended.append("cancelled")
            raise

    async with aclosing(exchange(application, LEG)) as items:
        await anext(items)
        await anext(items)
    assert ended == ["cancelled"]


async def test_failures_are_told_from_answers() -> None:
    async def silent(scope, receive, send):
        return

    async def fails(scope, receive, send):
        raise ValueError("no KV")

    async def breaks_off(scope, receive, send):
        await send(START)
        await send(piece(b"a"))
        raise ValueError("lost")

    async def fails_after_its_answer(scope, receive, send):
        await send(START)
        await send(piece(b"a", more=False))
        raise ValueError("too late to matter")

    for application, text in ((silent, "no answer"), (fails, "no KV"), (breaks_off, "lost")):
        with pytest.raises(ApplicationError, match=text):
            await collect(application)
    assert (await collect(fails_after_its_answer))[1:] == [b"a"]
