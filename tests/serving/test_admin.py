"""The operator's surface and the limits."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import aiohttp
import pytest

from eldr.geometry import Geometry
from eldr.serving.decisions import MOST_FOLLOWERS
from tests.serving.mocks.worker import MockWorker, Plan
from tests.serving.partitions import save_partition
from tests.serving.rig import rig, until


async def test_workers_join_drain_and_leave_without_dropping_a_request() -> None:
    spare = MockWorker("decode")
    await spare.start()
    async with rig(1, 1) as r:
        gate = asyncio.Event()
        r.decode[0].plan = Plan(gate=gate)
        running = asyncio.create_task(r.complete())
        await until(lambda: r.decode[0].active == 1)
        wanted = {"role": "decode", "url": spare.url}
        async with r.client.post(r.url + "/workers", json=wanted) as response:
            assert response.status == 201
        async with r.client.post(r.url + "/workers", json=wanted) as response:
            assert response.status == 400  # it is there already
        async with r.client.delete(
            r.url + "/workers", params={"name": r.decode[0].url}
        ) as response:
            assert (await response.json())["leaving"] is True
        assert (await r.complete())[0] == 200
        assert spare.count == 1
        gate.set()
        assert (await running)[0] == 200
        await until(lambda: [e.name for e in r.router.decode.endpoints] == [spare.url])
        async with r.client.get(r.url + "/workers") as response:
            assert [row["name"] for row in (await response.json())["decode"]] == [spare.url]
    await spare.kill()


async def test_drain_and_resume() -> None:
    async with rig(1, 1) as r:
        name = {"name": r.decode[0].url}
        async with r.client.post(r.url + "/workers/drain", params=name) as response:
            assert (await response.json())["draining"] is True
        assert (await r.complete())[0] == 503
        async with r.client.get(r.url + "/readiness") as response:
            assert response.status == 503
            assert (await response.json())["reasons"] == ["no decode worker"]
        again = {**name, "draining": "false"}
        async with r.client.post(r.url + "/workers/drain", params=again) as response:
            assert response.status == 200
        assert (await r.complete())[0] == 200


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"{}",
        b'{"role": "decode"}',
        b'{"role": "x", "url": "http://h:1"}',
        b'{"role": "decode", "url": "file:///etc/passwd"}',
        b'{"role": "decode", "url": "http://user:pw@h:1"}',
        b'{"role": "decode", "url": "http://h:1", "more": 1}',
        b'{"role": "decode", "url": "ftp://user:pw@h:1"}',
        b'{"role": "decode", "url": "user:pw@h:1"}',
        b'{"role": "decode", "url": "http://user:pw@h:99999"}',
        b'{"role": "decode", "url": "http://h:0"}',
        b'{"role": "decode", "url": "http://169.254.169.254:80"}',
        b'{"role": "decode", "url": "http://[::ffff:169.254.169.254]:80"}',
        b'{"role": "decode", "url": "http://0xa9fea9fe:80"}',
        b'{"role": "decode", "url": "http://2852039166:80"}',
        b'{"role": "decode", "url": "http://0:80"}',
    ],
)
async def test_wrong_worker_is_refused(body: bytes) -> None:
    async with rig(1, 1) as r:
        async with r.client.post(r.url + "/workers", data=body) as response:
            assert response.status == 400
            error = (await response.json())["error"]["message"]
            assert "pw" not in error.replace("/etc/passwd", "")
        assert len(r.router.endpoints()) == 2


@pytest.mark.parametrize("rank", [-1, 65536, 10**30])
async def test_impossible_rank_is_refused(rank: int) -> None:
    async with rig(1, 1) as r:
        wanted = {"role": "decode", "url": r.decode[0].url, "rank": rank}
        async with r.client.post(r.url + "/workers", json=wanted) as response:
            assert response.status == 400
        async with r.client.get(r.url + "/workers") as response:
            assert len((await response.json())["decode"]) == 1


async def test_one_engine_in_both_pools_is_named_with_its_role() -> None:
    both = MockWorker("decode")
    async with rig([both], 1) as r:
        async with r.client.post(
            r.url + "/workers", json={"role": "decode", "url": both.url}
        ) as response:
            assert response.status == 201
        name = {"name": both.url}
        async with r.client.delete(r.url + "/workers", params=name) as response:
            assert response.status == 400
            assert "role=" in (await response.json())["error"]["message"]
        for role, status in (("neither", 400), ("decode", 200), ("decode", 400)):
            query = {**name, "role": role}
            async with r.client.delete(r.url + "/workers", params=query) as response:
                assert response.status == status
        assert [e.name for e in r.router.prefill.endpoints] == [both.url]
        assert [e.name for e in r.router.decode.endpoints] == [r.decode[0].url]


async def test_bug_in_a_route_is_a_json_error_and_logged(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    async with rig(1, 1) as r:
        monkeypatch.setattr(type(r.router), "describe_workers", lambda _: 1 / 0)
        async with r.client.get(r.url + "/workers") as response:
            assert response.status == 500
            assert (await response.json())["error"]["type"] == "router_error"
    assert "GET /workers failed inside the router" in caplog.text


async def test_unknown_names_are_refused() -> None:
    async with rig(1, 1) as r:
        for method, path in (("DELETE", "/workers"), ("POST", "/workers/drain")):
            async with r.client.request(method, r.url + path, params={"name": "x"}) as response:
                assert response.status == 400
        for limit in ("x", "-1", "9" * 100, "9" * 5000):
            async with r.client.get(r.url + f"/eldr/decisions?limit={limit}") as response:
                assert response.status == 400


async def test_partition_is_shown_and_replaced(tmp_path: Path) -> None:
    geometry = Geometry(2, 16, 2)
    prefill = MockWorker("prefill", geometry=geometry)
    first = save_partition(geometry, [[0, 1], [8, 9]])
    second = save_partition(geometry, [[8, 9], [0, 1]])
    # A limit of clients' bodies does not hold for the operator's.
    options = {"policy": "locality_band", "partition": first, "max_body": 100}
    async with rig([prefill], 2, **options) as r:
        await r.complete()
        assert len(r.decode[0].seen) == 1
        async with r.client.get(r.url + "/eldr/partition") as response:
            before = (await response.json())["partition"]["digest"]
        raw = Path(second).read_bytes()
        async with r.client.post(r.url + "/eldr/partition", data=raw) as response:
            assert response.status == 200
            assert (await response.json())["partition"]["digest"] != before
        await r.complete()
        assert len(r.decode[1].seen) == 1
        for wrong in (b"", b"junk", Path(save_partition(geometry, [[0]])).read_bytes()):
            async with r.client.post(r.url + "/eldr/partition", data=wrong) as response:
                assert response.status == 400
        await r.complete()
        assert len(r.decode[1].seen) == 2  # a refused partition changes nothing


async def test_body_and_header_limits() -> None:
    async with rig(1, 1, max_body=2000, max_header=1024) as r:
        status, answer = await r.complete(prompt="x" * 3000)
        assert (status, answer["error"]["type"]) == (413, "request_too_large")
        headers = {"X-Request-Id": "y" * 5000}
        async with r.client.get(r.url + "/health", headers=headers) as response:
            assert response.status == 400
        assert (await r.complete())[0] == 200


async def test_queue_is_bounded_and_in_order() -> None:
    async with rig(1, 1, max_concurrent=2, queue_size=2, queue_timeout=30.0) as r:
        gate = asyncio.Event()
        r.prefill[0].plan = Plan(gate=gate)
        calls = [asyncio.create_task(r.complete(prompt=str(i))) for i in range(4)]
        await until(lambda: r.router.admission.waiting == 2)
        assert r.router.admission.running == 2
        async with r.client.post(r.url + "/v1/completions", json={"prompt": "x"}) as response:
            assert response.status == 429
            assert int(response.headers["Retry-After"]) >= 1
        calls[3].cancel()  # a client that leaves the queue gives its place up
        await until(lambda: r.router.admission.waiting == 1)
        gate.set()
        assert {(await call)[0] for call in calls[:3]} == {200}
        assert (r.router.admission.running, r.router.admission.waiting) == (0, 0)


async def test_waiting_too_long_is_429() -> None:
    async with rig(1, 1, max_concurrent=1, queue_timeout=0.05) as r:
        gate = asyncio.Event()
        r.prefill[0].plan = Plan(gate=gate)
        first = asyncio.create_task(r.complete())
        await until(lambda: r.prefill[0].active == 1)
        status, answer = await r.complete()
        assert (status, answer["error"]["type"]) == (429, "router_full")
        gate.set()
        assert (await first)[0] == 200


async def test_body_that_never_arrives_is_408() -> None:
    async with rig(1, 1, body_timeout=0.1) as r:
        reader, writer = await asyncio.open_connection(*r.url.removeprefix("http://").split(":"))
        writer.write(b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 100\r\n\r\n{")
        head = await reader.readuntil(b"\r\n")
        assert b" 408 " in head
        writer.close()


async def test_worker_headers_are_off_by_default() -> None:
    async with (
        rig(1, 1) as r,
        r.client.post(r.url + "/v1/completions", json={"prompt": "x"}) as response,
    ):
        assert not [name for name in response.headers if name.lower().startswith("x-eldr")]


async def test_decisions_are_followed_as_they_are_made() -> None:
    async with rig(1, 2, decision_buffer=4) as r:
        for _ in range(3):
            await r.complete()
        url = r.url + "/eldr/decisions?follow=1&limit=2"
        async with r.client.get(url) as response:
            assert response.content_type == "text/event-stream"
            rows = [await _event(response) for _ in range(2)]
            total = r.router.decisions.total
            await r.complete()
            rows.append(await _event(response))
            kept = list(r.router.decisions.newest(3))[::-1]
            assert [row["request_id"] for row in rows] == [record.request_id for record in kept]
            # More than the buffer holds in one go: the reader is told.
            record = kept[0]
            for _ in range(7):
                r.router.decisions.add(record)
            assert await _event(response) == {"missed": 3}
            assert r.router.decisions.total == total + 8


async def test_only_so_many_follow_and_a_stop_lets_them_go() -> None:
    async with rig(1, 1) as r:
        url = r.url + "/eldr/decisions?follow=1"
        followers = [await r.client.get(url) for _ in range(MOST_FOLLOWERS)]
        async with r.client.get(url) as response:
            assert response.status == 503
        followers[0].close()
        await until(lambda: len(r.router.decisions._followers) == MOST_FOLLOWERS - 1)
        async with r.client.get(url + "x") as response:
            assert response.status == 400
        # The rig stops with followers on: it must not hang.


async def _event(response: aiohttp.ClientResponse) -> dict[str, object]:
    """The next event's data."""
    async with asyncio.timeout(60):
        while not (line := await response.content.readline()).startswith(b"data: "):
            assert line
        return dict(json.loads(line[6:]))
