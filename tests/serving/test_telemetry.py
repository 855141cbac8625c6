"""What workers say of themselves only adds to our own account, and goes when it is stale."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from eldr.geometry import Geometry
from eldr.routing.policies.marginal import MarginalCost
from eldr.serving.telemetry import Telemetry, read_counters, read_metrics
from tests.serving.mocks.worker import FOREVER, MockWorker, Plan
from tests.serving.rig import Rig, rig, until

TEXT = """# HELP vllm:num_requests_running Number of requests in model execution batches.
# TYPE vllm:num_requests_running gauge
vllm:num_requests_running{engine="0",model_name="m"} 3.0
vllm:num_requests_running{engine="1",model_name="m"} 4.0
vllm:num_requests_waiting{engine="0",model_name="m"} 2.0
vllm:num_requests_waiting_by_reason{engine="0",reason="kv"} 99.0
vllm:kv_cache_usage_perc{engine="0",model_name="m"} 0.25
vllm:kv_cache_usage_perc{engine="1",model_name="m"} 0.5
process_start_time_seconds 1.76e+09
"""


def says(requests: float, *, kv: float = 0.1, start: float = 1.0) -> str:
    return (
        f'vllm:num_requests_running{{engine="0"}} {requests}\n'
        f'vllm:num_requests_waiting{{engine="0"}} 0.0\n'
        f'vllm:kv_cache_usage_perc{{engine="0"}} {kv}\n'
        f"process_start_time_seconds {start}\n"
    )


def telemetry(r: Rig, interval: float = 60.0) -> Telemetry:
    """One that looks when it is told to."""
    router = r.router
    pools = (router.decode, router.prefill)
    return Telemetry(router.session, pools, router.decode, interval=interval, kv_high=0.9)


async def looked(r: Rig, *, times: int, interval: float = 60.0) -> Telemetry:
    """One that has looked so often: requests of others count from the second look on."""
    look = telemetry(r, interval)
    for _ in range(times):
        await look.look()
    return look


def loads(r: Rig) -> list[float]:
    table = r.router.decode.fleet._table
    return (table.requests + table.others).tolist()


def test_metrics_of_ranks_and_their_sum() -> None:
    said = read_metrics(TEXT.encode())
    assert said.requests == {None: 9.0, 0: 5.0, 1: 4.0}
    assert said.kv_usage == {None: 0.5, 0: 0.25, 1: 0.5}
    assert said.started == 1.76e9


@pytest.mark.parametrize("number", ["NaN", "-1", "+Inf", "x", "1e400"])
def test_no_sane_number_is_left_out(number: str) -> None:
    said = read_metrics(f"vllm:num_requests_running {number}\n".encode())
    assert not said.requests


@pytest.mark.parametrize(
    "raw", [b"", b"{}", b"[]", b'{"v":2,"steps":1}', b'{"steps":"x","v":1}', b"null"]
)
def test_no_counters(raw: bytes) -> None:
    assert read_counters(raw) is None


async def test_t45_requests_of_another_router_weigh_like_ours() -> None:
    async with rig(1, 2, policy="least_requests") as r:
        r.decode[0].metrics, r.decode[1].metrics = says(5), says(0)
        look = await looked(r, times=1)
        assert loads(r) == [0, 0]  # one look may have met requests that come or go
        await look.look()
        assert loads(r) == [5, 0]
        for _ in range(3):
            await r.complete()
        assert [w.count for w in r.decode] == [0, 3]
        assert r.router.describe_workers()["decode"][0]["others"] == 5
        text = r.router.metrics.render().decode()
        assert 'eldr_router_others_requests{role="decode"} 5.0' in text


@pytest.mark.parametrize(
    ("ours", "polled", "during", "after"),
    [
        pytest.param(4, 6, 6, 2, id="our own requests are not counted twice"),
        pytest.param(3, 0, 3, 0, id="t28: what is polled never lowers our own count"),
    ],
)
async def test_t28_polled_counts_add_to_ours(
    ours: int, polled: int, during: int, after: int
) -> None:
    async with rig(1, 1) as r:
        gate = asyncio.Event()
        r.decode[0].plan = Plan(gate=gate)
        calls = [asyncio.create_task(r.complete()) for _ in range(ours)]
        await until(lambda: r.decode[0].active == ours)
        r.decode[0].metrics = says(polled)
        await looked(r, times=2)
        assert loads(r) == [during]
        gate.set()
        await asyncio.gather(*calls)
        assert loads(r) == [after]


async def test_t03_worker_without_metrics_is_said_once(caplog: pytest.LogCaptureFixture) -> None:
    async with rig(1, 1) as r:
        with caplog.at_level("INFO", "eldr.serving.telemetry"):
            await looked(r, times=3)
        assert len([t for t in caplog.messages if r.decode[0].url in t]) == 1
        assert (await r.complete())[0] == 200


async def test_t30_stale_figures_go_and_nobody_fails() -> None:
    async with rig(1, 2) as r:
        r.decode[0].metrics = says(5)
        look = await looked(r, times=2, interval=0.001)
        assert loads(r)[0] == 5
        for worker in r.decode:
            worker.metrics = None  # all of them at once
        await asyncio.sleep(0.01)
        await look.look()
        await look.look()
        assert loads(r) == [0, 0]
        assert (await r.complete())[0] == 200


async def test_worker_whose_kv_is_full_is_spared_unless_all_are() -> None:
    async with rig(1, 2, policy="round_robin") as r:
        r.decode[0].metrics, r.decode[1].metrics = says(0, kv=0.95), says(0, kv=0.2)
        look = await looked(r, times=1)
        for _ in range(4):
            await r.complete()
        assert [w.count for w in r.decode] == [0, 4]
        r.decode[1].metrics = says(0, kv=1.0)
        await look.look()
        assert (await r.complete())[0] == 200


async def test_restart_on_the_same_url_frees_what_waited_on_the_old_process() -> None:
    async with rig(1, 2, policy="round_robin") as r:
        old, other = r.decode
        old.metrics = other.metrics = says(7, start=100.0)
        look = await looked(r, times=2)
        assert loads(r) == [7, 7]
        old.plan = Plan(wait=FOREVER)  # a process that is gone does not answer
        call = asyncio.create_task(r.complete())
        await until(lambda: old.active == 1)
        await look.look()
        old.metrics, old.plan = says(0, start=200.0), Plan()
        await look.look()
        assert (await call)[0] == 200
        table = r.router.decode.fleet._table
        assert table.others.tolist() == [0, 7]
        rows = {row["name"]: row for row in r.router.describe_workers()["decode"]}
        assert rows[old.url]["state"] == "ramping"
        text = r.router.metrics.render().decode()
        assert 'worker_events_total{event="restarted",role="decode"} 1.0' in text


def counted(steps: int) -> dict[str, Any]:
    return {
        "v": 1,
        "steps": steps,
        "seconds": steps * 0.02,
        "tokens": steps * 4,
        "kv_tokens": steps * 400,
        "distinct": [steps * 6, steps * 5],
    }


async def test_step_costs_are_learnt_from_differences_only() -> None:
    prefill = MockWorker("prefill", geometry=Geometry(2, 8, 2))
    async with rig([prefill], 1, policy="marginal_cost") as r:
        await r.complete()  # the first decision sets the scale
        policy = r.router.decode.fleet.policy
        assert isinstance(policy, MarginalCost)
        assert policy.fit is not None
        look = telemetry(r)
        for steps in (1000, 1010, 1030, 5, 45):  # the counters restarted once
            r.decode[0].counters = counted(steps)
            await look.look()
        samples = list(policy.fit._samples)
        assert len(samples) == 3
        assert samples[0] == pytest.approx((0.02, 11.0, 400.0, 4.0))


async def test_worker_without_counters_is_asked_once() -> None:
    async with rig(1, 1) as r:
        await looked(r, times=3)
        assert r.decode[0].gets.count("/eldr/decode") == 1
        assert r.prefill[0].gets.count("/eldr/decode") == 0
