"""Clients that leave: their legs end, and the KV that nobody will read is freed."""

from __future__ import annotations

import asyncio
import json

import pytest

from eldr.serving.http1 import Connection
from tests.serving.mocks.worker import FOREVER, Plan
from tests.serving.rig import both, figures, rig, until


@pytest.mark.parametrize("leg", ["prefill", "decode"])
@pytest.mark.parametrize("stream", [False, True])
async def test_client_that_leaves_aborts_the_leg(leg: str, stream: bool) -> None:
    async with rig(1, 1) as r:
        worker = r.prefill[0] if leg == "prefill" else r.decode[0]
        worker.plan = Plan(wait=FOREVER)
        call = asyncio.create_task(r.stream() if stream else r.complete())
        await until(lambda: worker.active == 1)
        call.cancel()
        await until(lambda: worker.active == 0)
        assert worker.aborted == 1
        await until(r.idle)


async def test_client_that_leaves_mid_stream_aborts_decode() -> None:
    async with rig(1, 1) as r:
        r.decode[0].plan = Plan(stall=2)
        body = {"prompt": "x", "stream": True}
        async with r.client.post(r.url + "/v1/completions", json=body) as response:
            await response.content.readany()
            response.close()
        await until(lambda: r.decode[0].aborted == 1)
        await until(r.idle)


async def test_kv_that_no_decode_worker_saw_is_released() -> None:
    async with rig(1, 2) as r:
        for endpoint in r.router.decode.endpoints:
            r.router.decode.drain(endpoint.name)
        status, answer = await r.complete()
        assert (status, answer["error"]["type"]) == (503, "no_decode_worker")
        # Nobody is there to release it either; with a worker back, there is.
        r.router.decode.drain(r.decode[0].url, draining=False)
        await r.decode[0].kill()
        r.router.decode.drain(r.decode[1].url, draining=False)
        r.router.decode.drain(r.decode[1].url)
        status, _ = await r.complete()
        assert status == 503
        text = (await figures(r))["eldr_router_kv_releases_total"]
        assert text["failed"] >= 1


@pytest.mark.parametrize("stream", [False, True])
async def test_client_that_leaves_between_the_legs_frees_the_kv(stream: bool) -> None:
    async with rig(1, 2) as r:
        handles: list[bytes] = []
        r.router.legs._kv_release.start = lambda kv, pool: handles.append(kv)  # type: ignore[method-assign]
        reached, never = asyncio.Event(), asyncio.Event()

        async def connecting() -> Connection:
            reached.set()
            await never.wait()
            raise AssertionError("nobody waits any more")

        for endpoint in r.router.decode.endpoints:
            endpoint.origin.connect = connecting  # type: ignore[method-assign]
        call = asyncio.create_task(r.stream() if stream else r.complete())
        await reached.wait()
        call.cancel()
        await until(lambda: bool(handles))
        assert json.loads(handles[0])["remote_request_id"] == "r1"
        await until(r.idle)


async def test_t19_clients_that_leave_open_no_breaker() -> None:
    async with rig(1, 1, eject_failures=1) as r:
        for worker in (*r.prefill, *r.decode):
            worker.plan = Plan(wait=FOREVER)
            calls = [asyncio.create_task(r.stream(prompt=f"{i}")) for i in range(8)]
            await until(lambda: worker.active == 8)  # noqa: B023
            for call in calls:
                call.cancel()
            await until(lambda: worker.active == 0)  # noqa: B023
            worker.plan = Plan()
        states = [str(e.condition.state(0.0)) for e in r.router.endpoints()]
        assert states == ["up", "up"]
        await both(r)


async def test_release_reaches_a_decode_worker_as_a_request_it_must_reject() -> None:
    async with rig(1, 1) as r:
        r.decode[0].plan = Plan(status=404)
        r.router.legs._kv_release.start(b'{"do_remote_prefill":true}', r.router.decode)
        await until(lambda: len(r.decode[0].seen) == 1)
        sent = r.decode[0].seen[0].body
        assert sent["kv_transfer_params"] == {"do_remote_prefill": True}
        assert sent["model"] == "eldr-kv-release"
