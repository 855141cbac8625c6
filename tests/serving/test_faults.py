"""Workers that fail in every way, before, between and during the legs."""

from __future__ import annotations

import asyncio
import json
from types import SimpleNamespace
from typing import cast

import aiohttp
import pytest

from eldr.geometry import Geometry
from eldr.serving.answers import Prefilled
from eldr.serving.call import Call
from eldr.serving.condition import Condition
from eldr.serving.http1 import Connection
from eldr.serving.retry import RetryBudget
from tests.serving.mocks.worker import FOREVER, MockWorker, Plan
from tests.serving.partitions import save_partition
from tests.serving.rig import Rig, events, rig, until

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


async def _both(r: Rig) -> None:
    """One plain and one streamed request, both of which must succeed."""
    status, answer = await r.complete()
    assert status == 200, answer
    status, raw = await r.stream()
    assert status == 200
    assert events(raw)[-1] == b"[DONE]"


@pytest.mark.parametrize("fault", BEFORE_FIRST_BYTE)
async def test_prefill_fault_is_made_good_by_the_other_worker(fault: str) -> None:
    async with rig(2, 1, prefill_policy="round_robin") as r:
        r.prefill[0].plan = BEFORE_FIRST_BYTE[fault]
        for _ in range(3):
            await _both(r)


@pytest.mark.parametrize("fault", [f for f in BEFORE_FIRST_BYTE if not f.startswith("body")])
async def test_decode_fault_is_made_good_by_the_other_worker(fault: str) -> None:
    async with rig(1, 2, policy="round_robin") as r:
        r.decode[0].plan = BEFORE_FIRST_BYTE[fault]
        for _ in range(3):
            await _both(r)
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
            await _both(r)
        assert len(r.prefill[0].seen) == 8  # a refused connection costs no second prefill


async def test_retries_are_bounded_by_the_budget_of_all_requests() -> None:
    async with rig(1, 2, policy="round_robin", retry_budget=0.0, retry_pause=0.001) as r:
        for worker in r.decode:
            worker.plan = Plan(status=502)
        calls = 40
        for _ in range(calls):
            assert (await r.complete())[0] == 502
        # The first tries, the reserve of 100 retries that nobody earns again, and a free one: when
        # the first worker had failed, nothing was known against the second.
        assert sum(w.count for w in r.decode) == calls + 100 + 1
        text = r.router.metrics.render().decode()
        assert 'retries_total{leg="decode",outcome="retried"} 101.0' in text
        assert 'retries_total{leg="decode",outcome="no_budget"} 15.0' in text


@pytest.mark.parametrize("status", [502, 503])
async def test_nothing_is_given_up_while_one_worker_can_serve(status: int) -> None:
    quick = {"attempts": 1, "retry_budget": 0.0, "retry_pause": 0.0001}
    async with rig(1, 6, policy="round_robin", **quick) as r:
        for worker in r.decode[:5]:
            worker.plan = Plan(status=status)
        for _ in range(60):
            await _both(r)
        assert r.decode[5].count >= 120
        assert sum(w.count for w in r.decode[:5]) < 60  # the sick ones are known, and hardly asked


async def test_a_request_that_every_worker_fails_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    """Even if others succeed meanwhile, so that all workers look sound before each try."""
    monkeypatch.setattr(Condition, "failed", lambda *_, **__: False)
    async with rig(1, 3, policy="round_robin", attempts=2, retry_pause=0.0001) as r:
        for worker in r.decode:
            worker.plan = Plan(status=502)
        assert (await r.complete())[0] == 502
        # Its attempts, and a free one for each worker.
        assert sum(w.count for w in r.decode) == 2 + 3


@pytest.mark.parametrize("leg", ["prefill", "decode"])
async def test_pauses_grow_between_retries_and_are_drawn(
    leg: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    drawn: list[int] = []

    def pause(self: RetryBudget, retry: int) -> float:
        drawn.append(retry)
        return 0.0

    monkeypatch.setattr(RetryBudget, "pause", pause)
    async with rig(1, 1, attempts=4) as r:
        (r.prefill if leg == "prefill" else r.decode)[0].plan = Plan(status=502)
        assert (await r.complete())[0] == 502
        assert drawn == [0, 1, 2]


async def test_another_worker_of_the_band_comes_before_the_policy_s_next_choice() -> None:
    """A load that tempts away from the band: the retry stays in it all the same."""
    async with rig(1, 3, policy="least_requests") as r:
        band = frozenset({r.decode[0].url, r.decode[1].url})
        call = cast(Call, SimpleNamespace(request_id="x", session=None, prefill_worker=""))
        kept = Prefilled(None, None, 10, 0)
        taken = []
        for _ in range(6):
            ticket = r.router.decode.reserve(call, kept, frozenset({r.decode[0].url}), band)
            assert ticket is not None
            taken.append(ticket)
        assert {t.endpoint.name for t in taken} == {r.decode[1].url}  # by load: both others in turn
        for ticket in taken:
            ticket.release()


async def test_failed_worker_of_the_band_is_replaced_from_the_band() -> None:
    """Partition of three: experts 0.. belong to workers 0 and 1, the other half to worker 2."""
    geometry = Geometry(2, 16, 2)
    prefill = MockWorker("prefill", geometry=geometry)
    path = save_partition(geometry, [[0, 1], [0, 1, 2], [8, 9]])
    async with rig([prefill], 3, policy="locality_band", partition=path, tau=0.3) as r:
        r.decode[0].plan = r.decode[1].plan = Plan(status=503)
        r.decode[1].plans.extend([Plan()] * 50)
        for i in range(6):
            prefill.expert = 0
            status, _ = await r.complete(prompt=f"{i}" * 50)
            assert status == 200
        assert r.decode[0].seen
        assert not r.decode[2].seen


@pytest.mark.parametrize("status", [400, 404, 413, 422])
async def test_client_errors_pass_through_and_open_no_breaker(status: int) -> None:
    body = b'{"error": {"message": "the model `x` does not exist", "code": 404, "odd": 1.50}}'
    async with rig(1, 1, eject_failures=1) as r:
        r.prefill[0].plan = Plan(status=status, body=body)
        async with r.client.post(r.url + "/v1/completions", json={"prompt": "x"}) as response:
            assert response.status == status
            assert await response.read() == body
        assert len(r.prefill[0].seen) == 1
        r.prefill[0].plan = Plan()
        r.decode[0].plans.append(Plan(status=status, body=body))
        for _ in range(2):
            async with r.client.post(r.url + "/v1/completions", json={"prompt": "x"}) as response:
                last = response.status
        assert last == 200


@pytest.mark.parametrize("status", [429, 503])
@pytest.mark.parametrize("leg", ["prefill", "decode"])
async def test_back_pressure_does_not_eject(leg: str, status: int) -> None:
    async with rig(1, 1, eject_failures=1, attempts=1) as r:
        worker = (r.prefill if leg == "prefill" else r.decode)[0]
        worker.plans.extend([Plan(status=status, headers={"Retry-After": "7"})] * 3)
        for _ in range(3):
            async with r.client.post(r.url + "/v1/completions", json={"prompt": "x"}) as response:
                assert response.status == status
                assert response.headers["Retry-After"] == "7"
        assert (await r.complete())[0] == 200
        assert {str(e.condition.state(0)) for e in r.router.endpoints()} == {"up"}


@pytest.mark.parametrize(
    ("retry_after", "seconds"),
    [("7", 7.0), ("1e9", 30.0), ("inf", 30.0), ("-5", 0.0), ("nan", 0.0), ("Wed, 21 Oct", 0.5)],
)
async def test_a_full_worker_is_spared_as_long_as_it_says(retry_after: str, seconds: float) -> None:
    async with rig(1, 2, policy="round_robin") as r:
        r.decode[0].plans.append(Plan(status=503, headers={"Retry-After": retry_after}))
        before = asyncio.get_running_loop().time()
        assert (await r.complete())[0] == 200
        after = asyncio.get_running_loop().time()
        until = r.router.decode.endpoints[0].condition.busy_until
        assert before + seconds <= until <= after + seconds


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
            await _both(r)
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
        text = (await _metrics(r))["eldr_router_kv_releases_total"]
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
        await _both(r)


async def test_release_reaches_a_decode_worker_as_a_request_it_must_reject() -> None:
    async with rig(1, 1) as r:
        r.decode[0].plan = Plan(status=404)
        r.router.legs._kv_release.start(b'{"do_remote_prefill":true}', r.router.decode)
        await until(lambda: len(r.decode[0].seen) == 1)
        sent = r.decode[0].seen[0].body
        assert sent["kv_transfer_params"] == {"do_remote_prefill": True}
        assert sent["model"] == "eldr-kv-release"


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
            await _both(r)


async def test_no_kv_handle_lets_decode_compute_the_prompt_and_is_said_once(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async with rig(2, 1, prefill_policy="round_robin") as r:
        r.prefill[0].no_kv = True
        for _ in range(2):
            await _both(r)
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
        await _both(r)
        assert (await _metrics(r))["eldr_router_fallback_total"][reason] == 2.0


async def _metrics(r: Rig) -> dict[str, dict[str, float]]:
    """Samples by name and value of their only (or last) label."""
    out: dict[str, dict[str, float]] = {}
    for metric in r.router.metrics.registry.collect():
        for sample in metric.samples:
            label = next(reversed(sample.labels.values()), "")
            out.setdefault(sample.name, {})[label] = sample.value
    return out


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
