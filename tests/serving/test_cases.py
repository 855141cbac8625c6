"""Cases that users of other routers reported (T-numbers of the study), each as a test here.

Elsewhere: T07 (flags alone decide the mode) in test_dropin; T18 (aborted remote KV of push
connectors: they are refused as a whole) and T35 (many streams at once; 1,000 of them in
benchmarks/router.py) in test_faults; T03, T28 and T30 once more, and T45 (balance by what workers
wait for and hold), in test_telemetry.
"""

from __future__ import annotations

import asyncio
import json

import pytest

from eldr.geometry import Geometry
from tests.serving.mocks.worker import FOREVER, MockWorker, Plan
from tests.serving.rig import events, rig, until


async def test_t01_load_counts_until_the_end_of_the_stream_not_its_headers() -> None:
    async with rig(1, 2) as r:
        r.decode[0].plan = r.decode[1].plan = Plan(stall=1)
        body = {"prompt": "x", "stream": True}
        async with (
            r.client.post(r.url + "/v1/completions", json=body) as first,
            r.client.post(r.url + "/v1/completions", json=body) as second,
        ):
            await first.content.readany()
            await second.content.readany()  # headers and first events are there
            loads = [row["requests"] for row in r.router.decode.fleet.status()]
            assert loads == [1, 1]
            first.close()
            second.close()
        await until(r.idle)


async def test_t03_t28_t30_load_is_our_own_count_and_needs_no_load_endpoint() -> None:
    async with rig(1, 4, policy="power_of_two") as r:
        gate = asyncio.Event()
        for worker in r.decode:
            worker.plan = Plan(gate=gate)
        calls = [asyncio.create_task(r.complete()) for _ in range(24)]
        await until(lambda: sum(w.active for w in r.decode) == 24)
        polled = [path for w in r.decode for path in w.gets if "load" in path or "metrics" in path]
        assert not polled
        assert [row["requests"] for row in r.router.decode.fleet.status()] == [
            w.active for w in r.decode
        ]
        gate.set()
        await asyncio.gather(*calls)


async def test_t04_unknown_fields_of_chat_reach_both_legs() -> None:
    async with rig(1, 1) as r:
        body = {"model": "m", "messages": [{"role": "user", "content": "x"}], "cache_salt": "s"}
        async with r.client.post(r.url + "/v1/chat/completions", json=body) as response:
            assert response.status == 200
        for worker in (*r.prefill, *r.decode):
            assert worker.seen[0].body["cache_salt"] == "s"


async def test_t06_models_with_a_dead_worker() -> None:
    async with rig(1, 2) as r:
        await r.decode[0].kill()
        async with r.client.get(r.url + "/v1/models") as response:
            assert response.status == 200
            assert (await response.json())["data"][0]["id"] == "m"


async def test_t06_models_with_hung_workers_are_as_quick() -> None:
    hung = [MockWorker("decode") for _ in range(6)]
    async with rig(1, hung) as r:
        never = asyncio.Event()
        for worker in hung:
            worker.models_gate = never
        async with asyncio.timeout(5.0), r.client.get(r.url + "/v1/models") as response:
            assert response.status == 200
        r.prefill[0].models_gate = never
        await r.prefill[0].kill()
        for worker in hung:
            await worker.kill()
        async with r.client.get(r.url + "/v1/models") as response:
            assert response.status == 503
            assert (await response.json())["error"]["type"] == "no_worker"


async def test_t08_streaming_through_both_legs() -> None:
    async with rig(1, 1) as r:
        status, raw = await r.stream()
        assert (status, len(events(raw))) == (200, 5)


@pytest.mark.parametrize(
    ("sent", "prefill", "decode"),
    [
        # T09: min_tokens above the prefill's max_tokens
        ({"max_tokens": 500, "min_tokens": 100}, {"max_tokens": 1}, {"min_tokens": 100}),
        # T10: max_completion_tokens is clamped only where it was given
        ({"max_completion_tokens": 500}, {"max_completion_tokens": 1, "max_tokens": 1}, {}),
        # T11: absence of max_tokens is restored for decode
        ({}, {"max_tokens": 1}, {"max_tokens": None}),
        ({"n": 3}, {"n": 1}, {"n": 3}),
        ({"stream_options": {"include_usage": True}}, {"stream_options": None}, {}),
        ({"logprobs": 5}, {"logprobs": None}, {"logprobs": 5}),
        ({"logprobs": True, "top_logprobs": 3}, {"top_logprobs": None}, {"top_logprobs": 3}),
        ({"n": 2, "best_of": 3}, {"n": 1, "best_of": 1}, {"n": 2, "best_of": 3}),
        ({"min_completion_tokens": 9}, {"min_completion_tokens": None}, {}),
        # vLLM refuses these without the field that the prefill leaves out
        (
            {"logprobs": 1, "logprob_token_ids": [5, 6]},
            {"logprob_token_ids": None},
            {"logprob_token_ids": [5, 6]},
        ),
    ],
)
async def test_t09_t10_t11_prefill_is_one_token_and_decode_is_the_clients(
    sent: dict[str, object], prefill: dict[str, object], decode: dict[str, object]
) -> None:
    async with rig(1, 1) as r:
        async with r.client.post(r.url + "/v1/completions", json={"prompt": "x", **sent}) as a:
            assert a.status == 200
        first, second = r.prefill[0].seen[0].body, r.decode[0].seen[0].body
        assert {k: first.get(k) for k in prefill} == prefill
        assert {k: second.get(k) for k in decode} == decode
        assert "min_tokens" not in first
        handle = second.pop("kv_transfer_params")
        assert handle["do_remote_prefill"]
        assert second == {"prompt": "x", **sent}


async def test_t13_the_workers_own_error_body_is_kept() -> None:
    body = b'{"error":{"message":"The model `typo` does not exist.","type":"NotFoundError"}}'
    async with rig(1, 1) as r:
        r.prefill[0].plan = Plan(status=404, body=body)
        async with r.client.post(r.url + "/v1/completions", json={"prompt": "x"}) as response:
            assert (response.status, await response.read()) == (404, body)


async def test_t14_refused_connection_of_decode_is_503_in_json() -> None:
    async with rig(1, 1) as r:
        await r.decode[0].kill()
        status, answer = await r.complete()
        assert status == 503
        assert answer["error"]["code"] == 503


@pytest.mark.parametrize("how", ["drained", "killed"])
@pytest.mark.parametrize("choice", ["fail", "whole"])
async def test_t15_no_prefill_worker_follows_the_configured_choice(choice: str, how: str) -> None:
    async with rig(1, 1, no_prefill=choice) as r:
        if how == "drained":
            r.router.prefill.drain(r.prefill[0].url)
        else:
            await r.prefill[0].kill()
        status, answer = await r.complete()
        if choice == "fail":
            kind = "no_prefill_worker" if how == "drained" else "prefill_connect"
            assert (status, answer["error"]["type"]) == (503, kind)
            assert not r.decode[0].seen
        else:
            assert status == 200
            assert "kv_transfer_params" not in r.decode[0].seen[0].body


async def test_t17_decode_that_rejects_before_admission_is_replaced_with_fresh_kv() -> None:
    async with rig(1, 2, policy="round_robin") as r:
        r.decode[0].plan = Plan(status=503)
        status, _ = await r.complete()
        assert status == 200
        first, second = (w.seen[0].body["kv_transfer_params"] for w in r.decode)
        assert first["remote_request_id"] != second["remote_request_id"]


async def test_t19_broken_prefill_fails_fast_dispatches_nothing_and_heals() -> None:
    async with rig(1, 1, eject_seconds=0.2, attempts=1, eject_failures=1) as r:
        r.prefill[0].plan = Plan(reset="answer")
        for _ in range(4):
            status, _ = await r.complete()
            assert status == 502
        assert not r.decode[0].seen
        r.prefill[0].plan = Plan()
        status, _ = await r.complete()  # as the last resort an ejected worker is still tried
        assert status == 200


async def test_t21_t27_back_pressure_passes_and_leaves_nothing_behind() -> None:
    async with rig(1, 2, attempts=2) as r:
        for worker in r.decode:
            worker.plan = Plan(status=503)
        refused = [(await r.complete())[0] for _ in range(20)]
        assert set(refused) == {503}
        for worker in r.decode:
            worker.plan = Plan()
        assert [(await r.complete())[0] for _ in range(5)] == [200] * 5
        assert {str(e.condition.state(1e9)) for e in r.router.decode.endpoints} == {"up"}


async def test_t22_cold_burst_of_failures_does_not_shut_everything() -> None:
    async with rig(1, 3, eject_failures=1, eject_seconds=30.0) as r:
        for worker in r.decode:
            worker.plans.extend([Plan(reset="answer")] * 2)
        first = await asyncio.gather(*(r.complete() for _ in range(10)))
        assert [status for status, _ in first].count(200) >= 8
        assert [(await r.complete())[0] for _ in range(5)] == [200] * 5


async def test_t23_one_failed_leg_leaves_no_other_hanging() -> None:
    async with rig(1, 1, attempts=1) as r:
        r.prefill[0].plan = Plan(status=400)
        status, _ = await r.complete()
        assert status == 400
        assert not r.decode[0].seen
        r.prefill[0].plan, r.decode[0].plan = Plan(), Plan(reset="answer")
        status, _ = await r.complete()
        assert status == 502
        assert r.prefill[0].active == 0


async def test_t25_prefill_restart_on_the_same_url_is_noticed() -> None:
    async with rig(1, 1) as r:
        await r.complete()
        await r.prefill[0].kill()
        await r.prefill[0].start()
        await r.complete()
        handles = [s.body["kv_transfer_params"]["remote_engine_id"] for s in r.decode[0].seen]
        assert handles[0] != handles[1] == r.prefill[0].engine_id
        text = r.router.metrics.render().decode()
        assert 'worker_events_total{event="restarted",role="prefill"} 1.0' in text


async def test_t32_failed_prefill_reaches_no_decode_worker() -> None:
    async with rig(1, 1) as r:
        r.prefill[0].plan = Plan(status=500, body=b'{"error":{"message":"boom"}}')
        status, answer = await r.complete()
        assert (status, answer["error"]["message"]) == (500, "boom")
        assert not r.decode[0].seen


async def test_t33_prefill_queues_stay_level_with_mixed_prompts() -> None:
    async with rig(4, 2) as r:
        gate = asyncio.Event()
        for worker in r.prefill:
            worker.plan = Plan(gate=gate)
        # One hot prefix and a few others.
        prompts = ["hot" * 400 if i % 4 else f"{i}" * 400 for i in range(40)]
        calls = [asyncio.create_task(r.complete(prompt=p)) for p in prompts]
        await until(lambda: sum(w.active for w in r.prefill) == 40)
        assert max(w.active for w in r.prefill) <= 13  # 1.25 x 10, rounded up
        gate.set()
        await asyncio.gather(*calls)


async def test_t36_health_checks_follow_the_membership() -> None:
    async with rig(1, 2, health_interval=0.05) as r:
        gone = r.decode[0]
        r.router.decode.leave(gone.url)
        before = len(gone.gets)
        spare = MockWorker("decode")
        await spare.start()
        await r.router.add_worker("decode", spare.url)
        await until(lambda: spare.gets.count("/health") >= 2)
        assert len(gone.gets) <= before + 1
        await spare.kill()


async def test_t38_clean_end_without_end_mark_is_no_finish() -> None:
    async with rig(1, 1) as r:
        r.decode[0].plan = Plan(clean_end=2)
        _, raw = await r.stream(response_format={"type": "json_schema"}, n=2)
        got = events(raw)
        assert "error" in json.loads(got[-2])
        assert len(r.decode[0].seen) == 1  # never resumed elsewhere: the grammar's state is gone


async def test_t40_prefill_that_dies_between_the_legs() -> None:
    """The decode worker fails to load the KV; the prefill is done again elsewhere."""
    async with rig(2, 1, prefill_policy="round_robin") as r:
        r.decode[0].plans.append(Plan(status=500, body=b'{"error":{"message":"kv load"}}'))
        status, _ = await r.complete()
        assert status == 200
        first, second = (s.body["kv_transfer_params"]["remote_engine_id"] for s in r.decode[0].seen)
        assert first != second


async def test_t43_worker_too_busy_for_health_checks_is_not_taken_down() -> None:
    async with rig(1, 1, health_interval=0.02, health_failures=2) as r:
        r.decode[0].plan = Plan(events=60, pause=0.01)
        r.decode[0].healthy = False
        body = {"prompt": "x", "stream": True}
        async with r.client.post(r.url + "/v1/completions", json=body) as response:
            await response.content.readany()
            for _ in range(20):
                await response.content.readany()
                assert not r.router.decode.endpoints[0].condition.down
            raw = await response.read()
            assert raw.endswith(b"data: [DONE]\n\n")


async def test_t44_routed_experts_of_the_engine_pass_untouched() -> None:
    async with rig(1, 1) as r:
        body = b'{"id":"x","choices":[{"routed_experts":"AAEC","text":"t"}]}'
        r.decode[0].plan = Plan(body=body)
        async with r.client.post(r.url + "/v1/completions", json={"prompt": "x"}) as response:
            assert await response.read() == body


async def test_hung_decode_worker_that_fails_its_checks_gives_requests_back() -> None:
    async with rig(1, 2, policy="round_robin", health_interval=0.05, health_failures=2) as r:
        r.decode[0].plan = Plan(wait=FOREVER)
        r.decode[0].healthy = False
        calls = [asyncio.create_task(r.complete()) for _ in range(4)]
        assert {status for status, _ in await asyncio.gather(*calls)} == {200}


async def test_request_sent_just_before_its_worker_went_down_is_given_back_too() -> None:
    async with rig(1, 2, health_interval=600.0, health_failures=2) as r:
        for worker in r.decode:
            worker.plans.append(Plan(wait=FOREVER))
        call = asyncio.create_task(r.complete())
        await until(lambda: sum(w.active for w in r.decode) == 1)
        hung = next(e for e in r.router.decode.endpoints if e.running)
        now = asyncio.get_running_loop().time
        before = now() - 60.0
        for _ in range(2):  # the checks that take it down started before the request did
            r.router.decode.checked(hung, False, before, "no answer")
        assert hung.condition.down
        other = next(w for w in r.decode if not w.active)
        other.plans.clear()
        r.router.decode.checked(hung, False, now() + 1.0, "no answer")
        assert (await call)[0] == 200


async def test_unpatched_model_works_by_load_alone() -> None:
    async with rig(1, 2) as r:
        assert r.router.decode.fleet.geometry is None
        assert (await r.complete())[0] == 200


async def test_signature_of_a_patched_worker_among_unpatched_ones() -> None:
    patched = MockWorker("prefill", geometry=Geometry(2, 8, 2))
    async with rig([patched, MockWorker("prefill")], 2, prefill_policy="round_robin") as r:
        for _ in range(4):
            assert (await r.complete())[0] == 200


async def test_data_parallel_ranks_are_workers_of_their_own() -> None:
    async with rig(1, 1, decode_ranks=2, policy="round_robin") as r:
        for _ in range(4):
            assert (await r.complete())[0] == 200
        ranks = [seen.headers["x-data-parallel-rank"] for seen in r.decode[0].seen]
        assert sorted(ranks) == ["0", "0", "1", "1"]
        names = [row["name"] for row in r.router.decode.fleet.status()]
        assert names == [f"{r.decode[0].url}@0", f"{r.decode[0].url}@1"]
