"""The replay client against a scripted OpenAI-style stream."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator

import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer

from eldr.demo.load import DemoRequest, replay


def _event(tokens: int) -> bytes:
    return b"data: " + json.dumps({"usage": {"completion_tokens": tokens}}).encode() + b"\n\n"


class Scripted:
    """Streams the completion-token totals of `script`; remembers ids and the most in flight."""

    def __init__(self, script: list[int], error: bool = False) -> None:
        self.script, self.error = script, error
        self.order: list[str] = []
        self.in_flight = self.most = 0

    async def handle(self, request: web.Request) -> web.StreamResponse:
        self.order.append(request.headers["X-Request-Id"])
        self.in_flight += 1
        self.most = max(self.most, self.in_flight)
        body = await request.json()
        assert body["stream"]
        assert body["ignore_eos"]
        response = web.StreamResponse()
        await response.prepare(request)
        for tokens in self.script:
            await response.write(_event(tokens))
        if self.error:
            await response.write(b'data: {"error": {"message": "decode worker died"}}\n\n')
        await response.write(b"data: [DONE]\n\n")
        self.in_flight -= 1
        return response


@pytest.fixture
async def serve() -> AsyncIterator[object]:
    servers: list[TestServer] = []

    async def start(scripted: Scripted) -> str:
        app = web.Application()
        app.router.add_post("/v1/completions", scripted.handle)
        server = TestServer(app)
        await server.start_server()
        servers.append(server)
        return str(server.make_url("")).rstrip("/")

    yield start
    for server in servers:
        await server.close()


def _requests(count: int, tokens: int) -> list[DemoRequest]:
    return [DemoRequest(i, "text", "law", tokens, i) for i in range(count)]


async def test_every_request_once_in_order_and_bounded(serve) -> None:
    scripted = Scripted([1, 2, 5])
    seen: list[int] = []
    timings = await replay(await serve(scripted), _requests(20, 5), 3, "run", seen.append)
    assert scripted.order == [f"run-{i}" for i in range(20)]
    assert scripted.most <= 3
    assert seen == list(range(1, 21))
    assert {t.tokens for t in timings} == {5}
    assert all(t.start <= t.first_token <= t.end for t in timings)


async def test_tpot_is_unknown_when_one_chunk_holds_everything(serve) -> None:
    timings = await replay(await serve(Scripted([5])), _requests(1, 5), 1, "run", lambda n: None)
    assert timings[0].tpot is None


async def test_short_stream_is_an_error(serve) -> None:
    with pytest.raises(RuntimeError, match=r"run-0: stream ended after 2 of 5 tokens"):
        await replay(await serve(Scripted([1, 2])), _requests(1, 5), 1, "run", lambda n: None)


async def test_error_event_is_an_error(serve) -> None:
    with pytest.raises(RuntimeError, match="decode worker died"):
        await replay(
            await serve(Scripted([1], error=True)), _requests(4, 5), 2, "run", lambda n: None
        )
