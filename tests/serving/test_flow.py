"""The life of a request through both legs, with workers that behave."""

from __future__ import annotations

import asyncio
import json

import pytest

from eldr.geometry import Geometry
from tests.serving.mocks.worker import MockWorker, Plan
from tests.serving.rig import events, rig, until


async def test_prefill_comes_first_and_its_handle_reaches_decode() -> None:
    async with rig(1, 1) as r:
        status, answer = await r.complete()
        assert status == 200
        assert answer["choices"][0]["finish_reason"] == "length"
        (p,), (d,) = r.prefill[0].seen, r.decode[0].seen
        assert p.body["max_tokens"] == 1
        assert p.body["stream"] is False
        assert p.body["kv_transfer_params"]["do_remote_decode"] is True
        assert d.body["max_tokens"] == 4
        handle = d.body["kv_transfer_params"]
        assert handle["do_remote_prefill"] is True
        assert handle["remote_engine_id"] == r.prefill[0].engine_id


async def test_signature_is_taken_out_and_handle_passed_byte_for_byte() -> None:
    prefill = MockWorker("prefill", geometry=Geometry(2, 8, 2))
    async with rig([prefill], 1) as r:
        await r.complete()
        raw = r.decode[0].seen[0].raw
        assert b"eldr" not in raw
        assert b'"odd":1.1' in raw


async def test_stream_passes_every_event_and_the_end_mark() -> None:
    async with rig(1, 1) as r:
        status, raw = await r.stream()
        assert status == 200
        got = events(raw)
        assert len(got) == 5
        assert got[-1] == b"[DONE]"
        assert json.loads(got[0])["choices"][0]["text"] == " t0"


@pytest.mark.parametrize("piece", [1, 3, 7, 64])
async def test_dribbled_stream_is_whole(piece: int) -> None:
    async with rig(1, 1) as r:
        r.decode[0].plan = Plan(piece=piece)
        _, raw = await r.stream()
        assert len(events(raw)) == 5


async def test_chat_completions_and_worker_headers() -> None:
    async with rig(1, 1, worker_headers=True) as r:
        body = {"model": "m", "messages": [{"role": "user", "content": "hi"}], "stream": True}
        async with r.client.post(r.url + "/v1/chat/completions", json=body) as response:
            assert response.status == 200
            assert response.headers["x-eldr-prefill-worker"] == r.prefill[0].url
            assert response.headers["x-eldr-decode-worker"] == r.decode[0].url
            assert response.headers["x-eldr-branch"] == "least_requests"
            assert response.content_type == "text/event-stream"
            assert (await response.read()).endswith(b"data: [DONE]\n\n")
        assert r.decode[0].seen[0].path == "/v1/chat/completions"


async def test_reservation_lasts_until_the_last_byte() -> None:
    async with rig(1, 2) as r:
        gate = asyncio.Event()
        r.decode[0].plan = r.decode[1].plan = Plan(gate=gate)
        calls = [asyncio.create_task(r.stream()) for _ in range(6)]
        await until(lambda: r.decode[0].active + r.decode[1].active == 6)
        assert [row["requests"] for row in r.router.decode.fleet.status()] == [3, 3]
        gate.set()
        assert [status for status, _ in await asyncio.gather(*calls)] == [200] * 6
        await until(r.idle)


async def test_decisions_name_worker_branch_time_and_coverage() -> None:
    prefill = MockWorker("prefill", geometry=Geometry(2, 8, 2))
    async with rig([prefill], 2, policy="marginal_cost") as r:
        headers = {"X-Request-Id": "mine"}
        body = {"model": "m", "prompt": "hello", "max_tokens": 4}
        async with r.client.post(r.url + "/v1/completions", json=body, headers=headers) as response:
            assert response.status == 200
        async with r.client.get(r.url + "/eldr/decisions?limit=5") as response:
            (row,) = (await response.json())["decisions"]
        assert row["request_id"] == "mine"
        assert row["policy"] == "marginal_cost"
        assert row["branch"] == "marginal"
        assert row["coverage"] == 1.0
        assert row["prompt_tokens"] > 0
        assert row["decision_us"] > 0
        assert row["worker"] in {d.url for d in r.decode}


async def test_marginal_cost_separates_two_kinds_of_requests() -> None:
    prefill = MockWorker("prefill", geometry=Geometry(2, 16, 2))
    async with rig([prefill], 2, policy="marginal_cost") as r:
        gate = asyncio.Event()
        r.decode[0].plan = r.decode[1].plan = Plan(gate=gate)
        calls, kinds = [], []
        for i in range(8):
            prefill.expert = 0 if i % 2 else 8
            before = len(r.decode[0].seen), len(r.decode[1].seen)
            calls.append(asyncio.create_task(r.stream(prompt=f"{i}" * 400)))
            await until(lambda: len(r.decode[0].seen) + len(r.decode[1].seen) == i + 1)  # noqa: B023
            kinds.append((i % 2, int(len(r.decode[1].seen) > before[1])))
        gate.set()
        await asyncio.gather(*calls)
        by_kind = {kind: {worker for k, worker in kinds if k == kind} for kind in (0, 1)}
        assert by_kind[0].isdisjoint(by_kind[1]), kinds


async def test_unknown_fields_reach_both_legs_unchanged() -> None:
    raw = (
        b'{"model":"m","prompt":"h\\u00e9","big":123456789012345678901234567890,"f":1.10,'
        b'"nested":{"b":[1.0, 2],"a":null},"max_tokens":3}'
    )
    async with rig(1, 1) as r:
        async with r.client.post(r.url + "/v1/completions", data=raw) as response:
            assert response.status == 200
        for worker in (*r.prefill, *r.decode):
            sent = worker.seen[0].raw
            for part in (
                b'"big":123456789012345678901234567890',
                b'"f":1.10',
                b'"nested":{"b":[1.0, 2],"a":null}',
                b'"prompt":"h\\u00e9"',
            ):
                assert part in sent


async def test_client_cannot_name_a_kv_handle_or_rank() -> None:
    async with rig(1, 1) as r:
        r.prefill[0].no_kv = True
        evil = {"do_remote_prefill": True, "remote_host": "10.0.0.1", "remote_port": 1}
        body = {"model": "m", "prompt": "x", "kv_transfer_params": evil}
        headers = {"X-data-parallel-rank": "3", "x-prefiller-host-port": "10.0.0.1:1"}
        async with r.client.post(r.url + "/v1/completions", json=body, headers=headers) as response:
            assert response.status == 200
        for worker in (*r.prefill, *r.decode):
            seen = worker.seen[0]
            assert b"10.0.0.1" not in seen.raw
            assert "x-data-parallel-rank" not in seen.headers
            assert "x-prefiller-host-port" not in seen.headers


async def test_ids_and_traces_pass_on_both_legs() -> None:
    trace = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
    async with rig(1, 1) as r:
        passed = {"tracestate": "a=b,c=d", "baggage": "k=v", "X-Session-ID": "s"}
        headers = {"X-Request-Id": "id-1", "traceparent": trace, **passed}
        body = {"model": "m", "prompt": "x"}
        async with r.client.post(r.url + "/v1/completions", json=body, headers=headers) as response:
            assert response.status == 200
        for worker in (*r.prefill, *r.decode):
            assert worker.seen[0].headers["x-request-id"] == "id-1"
            assert worker.seen[0].headers["traceparent"] == trace
            assert {k: worker.seen[0].headers[k.lower()] for k in passed} == passed


async def test_same_client_id_twice_at_once() -> None:
    async with rig(1, 1) as r:
        gate = asyncio.Event()
        r.decode[0].plan = Plan(gate=gate)
        body = {"model": "m", "prompt": "x"}

        async def call() -> int:
            headers = {"X-Request-Id": "same"}
            async with r.client.post(r.url + "/v1/completions", json=body, headers=headers) as a:
                return a.status

        calls = [asyncio.create_task(call()) for _ in range(3)]
        await until(lambda: r.decode[0].active == 3)
        gate.set()
        assert await asyncio.gather(*calls) == [200] * 3
