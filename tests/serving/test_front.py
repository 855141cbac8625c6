"""The short way of completions, and the hand-over of every other connection to aiohttp."""

from __future__ import annotations

import asyncio
import contextlib
import gzip
import json
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from yarl import URL

from eldr.serving.app import Surface
from eldr.serving.deadlines import Deadlines
from eldr.serving.decision_log import read_decisions
from eldr.serving.front import Front, Listener
from eldr.serving.request import Request
from tests.serving.mocks.worker import Plan
from tests.serving.rig import Rig, events, rig, until

BODY = json.dumps({"model": "m", "prompt": "hello", "max_tokens": 4}).encode()
HEAD = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\n"
REQUEST = HEAD + b"Content-Length: %d\r\n\r\n" % len(BODY) + BODY


@asynccontextmanager
async def connected(r: Rig) -> AsyncIterator[tuple[asyncio.StreamReader, asyncio.StreamWriter]]:
    """A raw connection to the router."""
    host, port = r.url.removeprefix("http://").split(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    try:
        yield reader, writer
    finally:
        writer.close()


async def answer(reader: asyncio.StreamReader) -> tuple[int, dict[str, str], bytes]:
    """One answer: status, headers, body (its chunks undone)."""
    async with asyncio.timeout(60):
        head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1")
        status, *lines = head.rstrip().split("\r\n")
        headers = {k.lower(): v.strip() for k, _, v in (line.partition(":") for line in lines)}
        if "content-length" in headers:
            body = await reader.readexactly(int(headers["content-length"]))
        else:
            body = b""
            while size := int(await reader.readuntil(b"\r\n"), 16):
                body += (await reader.readexactly(size + 2))[:-2]
            await reader.readexactly(2)
        return int(status.split()[1]), headers, body


@pytest.mark.parametrize("step", [1, 7, 100])
async def test_request_in_pieces(step: int) -> None:
    async with rig(1, 1) as r, connected(r) as (reader, writer):
        for i in range(0, len(REQUEST), step):
            writer.write(REQUEST[i : i + step])
            await writer.drain()
            await asyncio.sleep(0)
        status, headers, body = await answer(reader)
        assert status == 200
        assert headers["content-type"] == "application/json"
        assert "date" in headers
        assert json.loads(body)["choices"]
        assert +Counter(r.router.metrics.requests.counts) == {("/v1/completions", "ok"): 1}


async def test_requests_ahead_of_their_turn_are_answered_in_order() -> None:
    async with rig(1, 1) as r, connected(r) as (reader, writer):
        prompts = [f"p{i}" for i in range(4)]
        for prompt in prompts:
            body = json.dumps({"prompt": prompt}).encode()
            writer.write(HEAD + b"Content-Length: %d\r\n\r\n" % len(body) + body)
        assert [(await answer(reader))[0] for _ in prompts] == [200] * 4
        assert [seen.body["prompt"] for seen in r.decode[0].seen] == prompts


async def test_much_ahead_of_its_turn_waits_in_the_clients_socket() -> None:
    async with rig(1, 1) as r, connected(r) as (reader, writer):
        gate = asyncio.Event()
        r.decode[0].plans.append(Plan(gate=gate))
        writer.write(REQUEST)
        await until(lambda: r.decode[0].active == 1)
        body = json.dumps({"prompt": "y" * 4_000_000}).encode()
        writer.write(HEAD + b"Content-Length: %d\r\n\r\n" % len(body) + body)
        gate.set()
        assert (await answer(reader))[0] == 200
        assert (await answer(reader))[0] == 200
        assert len(r.decode[0].seen[1].body["prompt"]) == 4_000_000


async def test_stream_keeps_the_connection_for_the_next_request() -> None:
    async with rig(1, 1) as r, connected(r) as (reader, writer):
        body = json.dumps({"prompt": "x", "stream": True}).encode()
        for _ in range(2):
            writer.write(HEAD + b"Content-Length: %d\r\n\r\n" % len(body) + body)
            status, headers, raw = await answer(reader)
            assert (status, headers["transfer-encoding"]) == (200, "chunked")
            assert raw.endswith(b"data: [DONE]\n\n")


async def test_connection_close_is_honoured() -> None:
    async with rig(1, 1) as r, connected(r) as (reader, writer):
        writer.write(REQUEST.replace(b"Host: x", b"Host: x\r\nConnection: close"))
        status, headers, _ = await answer(reader)
        assert (status, headers["connection"]) == (200, "close")
        assert await reader.read() == b""


@pytest.mark.parametrize(
    "request_",
    [
        HEAD + b"Transfer-Encoding: chunked\r\n\r\n%x\r\n%b\r\n0\r\n\r\n" % (len(BODY), BODY),
        REQUEST.replace(b"HTTP/1.1", b"HTTP/1.0"),
        REQUEST.replace(b"/v1/completions ", b"/v1/completions?x=1 "),
        REQUEST.replace(b"/v1/completions ", b"/v1/%63ompletions "),
        REQUEST.replace(b"Host: x", b"Host: x\r\nUpgrade: h2c\r\nConnection: upgrade"),
    ],
    ids=["chunked", "http10", "query", "escaped", "upgrade"],
)
async def test_other_forms_are_served_by_aiohttp(request_: bytes) -> None:
    async with rig(1, 1) as r, connected(r) as (reader, writer):
        writer.write(request_)
        assert (await answer(reader))[0] == 200
        assert r.decode[0].seen[0].body["prompt"] == "hello"


@pytest.mark.parametrize("path", [b"/v1/completions", b"/v1/completions?x"])
async def test_id_that_is_not_ascii_comes_back_as_it_was(path: bytes) -> None:
    head = b"POST %b HTTP/1.1\r\nHost: x\r\nX-Request-Id: \xc3\xbc\r\n" % path
    async with rig(1, 1) as r, connected(r) as (reader, writer):
        writer.write(head + b"Content-Length: 1\r\n\r\n{")
        status, headers, _ = await answer(reader)
        assert (status, headers["x-request-id"].encode("latin-1")) == (400, b"\xc3\xbc")


async def test_expect_100_continue() -> None:
    async with rig(1, 1) as r, connected(r) as (reader, writer):
        writer.write(HEAD + b"Content-Length: %d\r\nExpect: 100-continue\r\n\r\n" % len(BODY))
        assert (await reader.readuntil(b"\r\n\r\n")).startswith(b"HTTP/1.1 100")
        writer.write(BODY)
        assert (await answer(reader))[0] == 200


async def test_request_without_any_header_is_not_read_as_one_with_the_next() -> None:
    async with rig(1, 1) as r, connected(r) as (reader, writer):
        writer.write(b"POST /v1/completions HTTP/1.1\r\n\r\n" + REQUEST)
        assert b" 400 " in await reader.readuntil(b"\r\n")  # HTTP/1.1 demands a Host
        async with asyncio.timeout(60):
            await reader.read()  # and the connection ends
        assert not r.prefill[0].seen


@pytest.mark.parametrize("chunked", [False, True])
async def test_compressed_body(chunked: bool) -> None:
    raw = gzip.compress(BODY)

    async def pieces() -> AsyncIterator[bytes]:
        yield raw

    async with rig(1, 1, max_body=100_000) as r:
        url, headers = r.url + "/v1/completions", {"Content-Encoding": "gzip"}
        data = pieces() if chunked else raw
        async with r.client.post(url, data=data, headers=headers) as response:
            assert response.status == 200
        assert r.decode[0].seen[0].body["prompt"] == "hello"
        bomb = gzip.compress(b"x" * 10_000_000)  # the limit is on what comes out of it
        async with r.client.post(url, data=bomb, headers=headers) as response:
            assert response.status == 413


@pytest.mark.parametrize(
    "request_",
    [
        b"nonsense\r\n\r\n",
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03",
        b"GET /health HTTP/1.1\n\n",
        HEAD + b"Content-Length: 5\r\nContent-Length: 6\r\n\r\n{}    ",
        HEAD + b"Content-Length: 5\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
        HEAD + b"Content-Length: +5\r\n\r\n{}   ",
        HEAD + b"Bad Header : x\r\nContent-Length: 2\r\n\r\n{}",
        HEAD + b"X: " + b"y" * 40_000 + b"\r\n\r\n",
        HEAD + b"X: " + b"y" * 40_000,
    ],
)
async def test_what_is_no_request_is_refused_and_closed(request_: bytes) -> None:
    async with rig(1, 1) as r, connected(r) as (reader, writer):
        writer.write(request_)
        assert b" 400 " in await reader.readuntil(b"\r\n")
        async with asyncio.timeout(60):
            await reader.read()
        assert not r.prefill[0].seen


async def test_other_routes_and_completions_on_one_connection() -> None:
    async with rig(1, 1) as r, connected(r) as (reader, writer):
        writer.write(b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n")
        assert (await answer(reader))[0] == 200
        writer.write(REQUEST)
        assert (await answer(reader))[0] == 200


async def test_refusal_before_the_body_was_read_ends_the_connection() -> None:
    async with rig(1, 1, api_key=("right",), max_body=1000) as r:
        async with connected(r) as (reader, writer):
            writer.write(REQUEST.replace(b"Host: x", b"Host: x\r\nX-Request-Id: mine"))
            status, headers, body = await answer(reader)
            assert (status, headers["x-request-id"]) == (401, "mine")
            assert json.loads(body)["error"]["type"] == "invalid_api_key"
            writer.write(REQUEST.replace(b"Host: x", b"Authorization: Bearer right"))
            assert (await answer(reader))[0] == 200  # its body had come: the connection goes on
        async with connected(r) as (reader, writer):
            head = HEAD + b"Authorization: Bearer right\r\nContent-Length: 2000\r\n\r\n"
            writer.write(head)  # the length alone is enough
            status, headers, _ = await answer(reader)
            assert (status, headers["connection"]) == (413, "close")
            writer.write(b"x" * 2000)  # read and forgotten, then the connection ends
            assert await reader.read() == b""


async def test_refusal_of_a_large_body_reaches_a_client_that_is_still_sending() -> None:
    async with rig(1, 1, max_body=1000) as r:
        body = {"prompt": "x" * 20_000_000}
        for _ in range(3):
            async with r.client.post(r.url + "/v1/completions", json=body) as response:
                assert response.status == 413


@pytest.mark.parametrize("line", [HEAD, b"GET /health HTTP/1.1\r\n", b"GE"])
async def test_head_that_does_not_arrive_ends_the_connection(line: bytes) -> None:
    async with rig(1, 1, body_timeout=0.3) as r, connected(r) as (reader, writer):
        writer.write(line)

        async def dribble() -> None:  # it is no help that something comes now and then
            while True:
                writer.write(b"X: y\r\n")
                await asyncio.sleep(0.02)

        dribbling = asyncio.create_task(dribble())
        async with asyncio.timeout(60):
            with contextlib.suppress(ConnectionResetError):
                assert await reader.read() == b""
        dribbling.cancel()


async def test_slow_reader_gets_everything() -> None:
    async with rig(1, 1) as r, connected(r) as (reader, writer):
        sock = writer.get_extra_info("socket")
        sock.setsockopt(1, 8, 4096)  # SOL_SOCKET, SO_RCVBUF
        r.decode[0].plan = Plan(events=4_000)
        body = json.dumps({"prompt": "x", "stream": True}).encode()
        writer.write(HEAD + b"Content-Length: %d\r\n\r\n" % len(body) + body)
        status, _, raw = await answer(reader)
        assert (status, raw.count(b"data: ")) == (200, 4_001)


async def test_idle_connections_do_not_keep_a_router_alive() -> None:
    async with rig(1, 1) as r, connected(r) as (reader, writer):
        writer.write(REQUEST)
        assert (await answer(reader))[0] == 200
        host, port = r.url.removeprefix("http://").split(":")
        idle_reader, idle_writer = await asyncio.open_connection(host, int(port))
    async with asyncio.timeout(60):
        assert await idle_reader.read() == b""
    idle_writer.close()


async def test_request_past_its_deadline_is_cancelled_and_others_are_not() -> None:
    deadlines, now = Deadlines(), asyncio.get_running_loop().time

    async def request(when: float) -> None:
        task = deadlines.add(when)
        try:
            await asyncio.Event().wait()
        finally:
            deadlines.discard(task)

    late, early = (asyncio.create_task(request(now() + s)) for s in (-1.0, 3600.0))
    await asyncio.sleep(0)
    watching = asyncio.create_task(deadlines.run())
    async with asyncio.timeout(60):
        with pytest.raises(asyncio.CancelledError):
            await late
    assert not early.done()
    for task in (early, watching):
        task.cancel()
    await asyncio.gather(early, watching, return_exceptions=True)


async def test_header_that_is_no_utf8_passes_as_it_is_and_breaks_no_report(tmp_path: Path) -> None:
    log = tmp_path / "decisions.jsonl"
    odd = b"X-Request-Id: a\xff\r\nX-Session-ID: \xfe\r\n"
    async with (
        rig(1, 1, policy="session", decision_log=str(log)) as r,
        connected(r) as (reader, writer),
    ):
        for _ in range(2):
            writer.write(REQUEST.replace(b"Host: x\r\n", b"Host: x\r\n" + odd))
            assert (await answer(reader))[0] == 200
        for worker in (*r.prefill, *r.decode):
            assert worker.seen[0].headers["x-request-id"].encode("latin-1") == b"a\xff"
        async with r.client.get(r.url + "/eldr/decisions") as response:
            rows = (await response.json())["decisions"]
        assert [(row["request_id"], row["branch"]) for row in rows] == [("a\ufffd", "home")] * 2
        assert +Counter(r.router.metrics.requests.counts) == {("/v1/completions", "ok"): 2}
    assert [row["request_id"] for row in read_decisions(str(log))] == ["a\ufffd"] * 2


@pytest.mark.parametrize(
    ("method", "path", "status", "kind"),
    [
        ("POST", "/v1/embeddings", 404, "not_found"),
        ("POST", "/v1/completions/", 404, "not_found"),
        ("GET", "/v1/completions", 405, "method_not_allowed"),
        ("GET", "/%ff", 404, "not_found"),
    ],
)
async def test_t13_unknown_routes_are_told_in_json(
    method: str, path: str, status: int, kind: str
) -> None:
    async with rig(1, 1) as r:
        url = URL(r.url + path, encoded=True)
        headers = {"X-Request-Id": "mine"}
        async with r.client.request(method, url, headers=headers) as response:
            assert (response.status, response.headers["X-Request-Id"]) == (status, "mine")
            error = (await response.json())["error"]
            assert (error["code"], error["type"]) == (status, kind)
            assert ("Allow" in response.headers) == (status == 405)


@pytest.mark.parametrize("short_way", [True, False])
async def test_short_way_is_used_unless_the_operator_says_no(
    short_way: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    taken: list[Request] = []
    serve = Surface.short_way

    async def short(surface: Surface, request: Request) -> None:
        taken.append(request)
        await serve(surface, request)

    monkeypatch.setattr(Surface, "short_way", short)
    made: list[Front] = []
    monkeypatch.setattr(Listener, "__call__", lambda self: made.append(Front(self)) or made[-1])
    async with rig(1, 1, short_way=short_way) as r:
        status, whole = await r.complete()
        assert status == 200
        assert whole["choices"]
        status, raw = await r.stream()
        assert status == 200
        assert events(raw)[-1] == b"[DONE]"
        async with r.client.get(r.url + "/v1/models") as response:
            assert response.status == 200
        assert r.prefill[0].count == r.decode[0].count == 2
        assert len(taken) == (2 if short_way else 0)
        assert bool(made) == short_way


async def test_time_of_a_request_is_limited_without_the_short_way(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Its deadline is watched whoever has read it: here, that of a client that does not read."""
    monkeypatch.setattr("eldr.serving.app._GRACE_SECONDS", 0.0)
    monkeypatch.setattr("eldr.serving.deadlines._LOOK_SECONDS", 0.05)
    event = b'data: {"choices": ["%b"]}\n\n' % (b"x" * 2**20)
    head = (
        b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"
    )
    async with rig(1, 1, short_way=False, request_timeout=1.0) as r:
        r.decode[0].plan = Plan(raw=head + 64 * (b"%x\r\n%b\r\n" % (len(event), event)))
        body = b'{"prompt": "x", "stream": true}'
        async with connected(r) as (_, writer):
            writer.write(HEAD + b"Content-Length: %d\r\n\r\n" % len(body) + body)
            await until(lambda: r.router.admission.running == 1)
            await until(lambda: r.router.admission.running == 0)
