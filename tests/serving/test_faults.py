"""Workers that fail in every way, before, between and during the legs."""

from __future__ import annotations

import asyncio
import json

import aiohttp
import pytest

from eldr.geometry import Geometry
from tests.serving.mocks.worker import FOREVER, MockWorker, Plan
from tests.serving.rig import both, events, figures, rig, until

# Failures of a worker before its first byte, all of which another worker can make good.
BEFORE_FIRST_BYTE = {
    "reset before the answer": Plan(reset="answer"),
    "502": Plan(status=502),
    "503": Plan(status=503),
    "503 with Retry-After": Plan(status=503, headers={"Retry-After": "1"}),
    "504": Plan(status=504),
    "429": Plan(status=429),
    "not HTTP": Plan(raw=b"SSH-2.0-OpenSSH_9.2\r\n\r\n"),
    "half a status line": Plan(raw=b"HTTP/1.1 20"),
    "endless head": Plan(raw=b"HTTP/1.1 200 OK\r\nX: " + b"a" * 200_000),
    "body cut off": Plan(fin=1),
    "body reset": Plan(reset=1),
}


@pytest.mark.parametrize("fault", BEFORE_FIRST_BYTE)
async def test_prefill_fault_is_made_good_by_the_other_worker(fault: str) -> None:
    async with rig(2, 1, prefill_policy="round_robin") as r:
        r.prefill[0].plan = BEFORE_FIRST_BYTE[fault]
        for _ in range(3):
            await both(r)


@pytest.mark.parametrize("fault", [f for f in BEFORE_FIRST_BYTE if not f.startswith("body")])
async def test_decode_fault_is_made_good_by_the_other_worker(fault: str) -> None:
    async with rig(1, 2, policy="round_robin") as r:
        r.decode[0].plan = BEFORE_FIRST_BYTE[fault]
        for _ in range(3):
            await both(r)
        # The KV may be gone with the worker that failed: every retry has a new handle.
        handles = [
            d.body["kv_transfer_params"]["remote_request_id"] for w in r.decode for d in w.seen
        ]
        assert len(set(handles)) == len(handles)


@pytest.mark.parametrize("fault", ["body cut off", "body reset"])
async def test_plain_answer_that_breaks_off_is_made_good(fault: str) -> None:
    async with rig(1, 2, policy="round_robin") as r:
        r.decode[0].plan = BEFORE_FIRST_BYTE[fault]
        for _ in range(4):
            status, _ = await r.complete()
            assert status == 200


async def test_dead_decode_worker_keeps_the_kv_of_the_first_prefill() -> None:
    async with rig(1, 2, policy="round_robin") as r:
        await r.decode[0].kill()
        for _ in range(4):
            await both(r)
        assert len(r.prefill[0].seen) == 8  # a refused connection costs no second prefill


async def test_all_workers_gone_is_a_quick_503_in_json() -> None:
    async with rig(1, 1) as r:
        await r.decode[0].kill()
        status, answer = await r.complete()
        assert status == 503
        assert answer["error"]["type"] == "decode_connect"
        await r.prefill[0].kill()
        status, answer = await r.complete()
        assert (status, answer["error"]["type"]) == (503, "prefill_connect")


async def test_hung_worker_is_ejected_after_its_time_limit_and_another_serves() -> None:
    async with rig(1, 2, policy="round_robin", first_byte_timeout=2.0) as r:
        r.decode[0].plan = Plan(wait=FOREVER)
        for _ in range(4):
            await both(r)
        assert len(r.decode[0].seen) == 1
        await until(lambda: r.decode[0].active == 0)
        assert r.decode[0].aborted == 1


@pytest.mark.parametrize("how", ["reset", "fin", "clean_end", "stall"])
@pytest.mark.parametrize("after", [1, 3])
@pytest.mark.parametrize("piece", [0, 5])
async def test_stream_that_breaks_off_ends_in_an_error_event(
    how: str, after: int, piece: int
) -> None:
    async with rig(1, 2, idle_timeout=1.5) as r:
        r.decode[0].plan = r.decode[1].plan = Plan(piece=piece, pause=0.001, **{how: after})
        status, raw = await r.stream()
        assert status == 200
        got = events(raw)
        assert got[-1] == b"[DONE]"
        error = json.loads(got[-2])["error"]
        assert error["code"] == 502
        assert "incomplete" in error["message"]
        assert [json.loads(e)["choices"][0]["text"] for e in got[:-2]] == [
            f" t{i}" for i in range(after)
        ]


async def test_half_an_event_is_never_passed_on() -> None:
    part = b'data: {"choices": [{"index": 0, "text": " a"}]}\n\ndata: {"choices": [{"ind'
    head = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nContent-Length: 999\r\n\r\n"
    async with rig(1, 1) as r:
        r.decode[0].plan = Plan(raw=head + part)
        _, raw = await r.stream()
        got = events(raw)
        assert [json.loads(e) for e in got[:1]] == [{"choices": [{"index": 0, "text": " a"}]}]
        assert "error" in json.loads(got[1])
        assert got[2:] == [b"[DONE]"]


@pytest.mark.parametrize("missing", [0, 1], ids=["ended", "broken"])
async def test_huge_event_that_is_torn_is_closed_before_the_error_event(missing: int) -> None:
    """Passed on in pieces, since it is too long to wait for its end."""
    part = b'data: {"choices": []}\n\ndata: {"choices": [{"text": "' + b"x" * 3_000_000
    head = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nContent-Length: %d\r\n\r\n"
    async with rig(1, 1) as r:
        r.decode[0].plan = Plan(raw=head % (len(part) + missing) + part)
        _, raw = await r.stream()
        got = events(raw)
        assert got[1].startswith(b'{"choices": [{"text": "xxx')
        assert json.loads(got[2])["error"]["code"] == 502
        assert got[3:] == [b"[DONE]"]


async def test_stream_that_breaks_off_after_its_end_mark_is_whole() -> None:
    head = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nContent-Length: 999\r\n\r\n"
    async with rig(1, 1) as r:
        r.decode[0].plan = Plan(raw=head + b"data: {}\n\ndata: [DONE]\n\n")
        _, raw = await r.stream()
        assert events(raw) == [b"{}", b"[DONE]"]


async def test_first_event_that_is_an_error_is_retried_elsewhere() -> None:
    async with rig(1, 2, policy="round_robin") as r:
        r.decode[0].plan = Plan(error_event={"error": {"message": "KV load failed", "code": 500}})
        for _ in range(4):
            status, raw = await r.stream()
            assert status == 200
            assert b"error" not in raw


async def test_error_event_in_small_pieces_is_retried_as_well() -> None:
    async with rig(1, 2, policy="round_robin") as r:
        error = {"error": {"message": "KV load failed", "code": 500}}
        r.decode[0].plan = Plan(error_event=error, piece=3)
        for _ in range(2):
            assert b"error" not in (await r.stream())[1]


async def test_stream_that_ends_within_its_first_event_is_retried() -> None:
    head = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nContent-Length: 99\r\n\r\n"
    async with rig(1, 2, policy="round_robin") as r:
        r.decode[0].plan = Plan(raw=head + b'data: {"choi')
        for _ in range(2):
            status, raw = await r.stream()
            assert (status, events(raw)[-1]) == (200, b"[DONE]")
            assert b"error" not in raw


@pytest.mark.parametrize("stream", [False, True])
async def test_request_whose_time_is_over_is_504_and_blames_no_worker(stream: bool) -> None:
    async with rig(1, 2, request_timeout=0.3, eject_failures=1) as r:
        for worker in r.decode:
            worker.plan = Plan(wait=FOREVER)
        status, _ = await (r.stream() if stream else r.complete())
        assert status == 504
        assert sum(w.count for w in r.decode) == 1  # not tried again
        states = {str(e.condition.state(0.0)) for e in r.router.decode.endpoints}
        assert states == {"up"}


async def test_500_of_decode_gets_one_new_prefill_then_passes_through() -> None:
    async with rig(1, 1) as r:
        r.decode[0].plans.append(Plan(status=500))
        status, _ = await r.complete()
        assert status == 200
        assert len(r.prefill[0].seen) == 2
        r.decode[0].plan = Plan(status=500, body=b'{"error": {"message": "mine"}}')
        status, answer = await r.complete()
        assert (status, answer["error"]["message"]) == (500, "mine")


async def test_kept_connection_that_the_worker_closed_costs_no_error() -> None:
    async with rig(1, 1, attempts=1) as r:
        await r.complete()
        for worker in (*r.prefill, *r.decode):
            await worker.kill()  # closes idle connections, as uvicorn does after 5 s
            await worker.start()
        status, _ = await r.complete()
        assert status == 200


async def test_restart_on_the_same_port_with_a_new_engine_id() -> None:
    async with rig(1, 1) as r:
        await r.complete()
        await r.prefill[0].kill()
        await r.prefill[0].start()
        status, _ = await r.complete()
        assert status == 200
        handle = r.decode[0].seen[-1].body["kv_transfer_params"]
        assert handle["remote_engine_id"] == r.prefill[0].engine_id


async def test_t18_push_connector_is_refused_with_a_sentence() -> None:
    async with rig(1, 1) as r:
        r.prefill[0].mutate_kv = {"transfer_mode": "push"}
        status, answer = await r.complete()
        assert status == 502
        assert "before prefill" in answer["error"]["message"]
        assert not r.decode[0].seen


@pytest.mark.parametrize(
    "body", [b"", b"[]", b"null", b"{", b'{"usage": 3}', b"\xff\xfe", b"1e999"]
)
async def test_wrong_json_of_prefill_is_a_failure_of_the_worker(body: bytes) -> None:
    async with rig(2, 1, prefill_policy="round_robin") as r:
        r.prefill[0].plan = Plan(body=body)
        for _ in range(3):
            await both(r)


async def test_no_kv_handle_lets_decode_compute_the_prompt_and_is_said_once(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async with rig(2, 1, prefill_policy="round_robin") as r:
        r.prefill[0].no_kv = True
        for _ in range(2):
            await both(r)
        assert ["kv_transfer_params" in seen.body for seen in r.decode[0].seen].count(False) == 2
    (said,) = (text for text in caplog.messages if "leaves no KV handle" in text)
    assert r.prefill[0].url in said


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"v": 99}, "version"),
        ({"geometry": "feedfeedfeedfeed"}, "geometry"),
        ({"counts": None}, "malformed"),
        ({"counts": {"encoding": "u8", "data": "!!!!"}}, "malformed"),
        ({"tokens": 0}, "malformed"),
        ({"coverage": 0.25}, "low_coverage"),
        ({"coverage": "x"}, "malformed"),
    ],
)
async def test_bad_signature_degrades_to_load_and_is_counted(
    change: dict[str, object], reason: str
) -> None:
    prefill = MockWorker("prefill", geometry=Geometry(2, 8, 2))
    prefill.mutate_signature = change
    async with rig([prefill], 2, policy="marginal_cost") as r:
        await both(r)
        assert (await figures(r))["eldr_router_fallback_total"][reason] == 2.0


async def test_t35_many_streams_at_once() -> None:
    async with rig(2, 4) as r:
        connector = aiohttp.TCPConnector(limit=0)
        async with aiohttp.ClientSession(connector=connector) as client:
            body = {"prompt": "x", "stream": True}

            async def one() -> bytes:
                async with client.post(r.url + "/v1/completions", json=body) as response:
                    assert response.status == 200
                    return await response.read()

            answers = await asyncio.gather(*(one() for _ in range(300)))
        assert all(events(raw)[-1] == b"[DONE]" for raw in answers)
