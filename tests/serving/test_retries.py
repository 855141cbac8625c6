"""Who is asked next when a worker fails a request, how often, and who is spared."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import cast

import pytest

from eldr.geometry import Geometry
from eldr.serving.answers import Prefilled
from eldr.serving.call import Call
from eldr.serving.condition import Condition
from eldr.serving.retry import RetryBudget
from tests.serving.mocks.worker import MockWorker, Plan
from tests.serving.partitions import save_partition
from tests.serving.rig import both, rig


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
            await both(r)
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
