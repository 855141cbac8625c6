"""The page on a router: who may see what, what it shows, and how often workers are asked."""

from __future__ import annotations

import asyncio
import gc
import json
import socket
from collections.abc import AsyncIterator
from contextlib import ExitStack
from typing import Any

import aiohttp
import pytest

from eldr.serving import operator_page
from eldr.serving.errors import ClientError
from eldr.serving.operator_page import Watch
from tests.serving.page.rows import EVIL
from tests.serving.page.traced import TracedDecode, TracedPrefill, drive
from tests.serving.rig import Rig, rig, until


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(operator_page, "TICK_SECONDS", 0.01)
    monkeypatch.setattr(operator_page, "POLL_SECONDS", 0.1)
    monkeypatch.setattr(operator_page, "SEND_SECONDS", 0.05)


async def events(response: aiohttp.ClientResponse) -> AsyncIterator[dict[str, Any]]:
    async for line in response.content:
        if line.startswith(b"data: "):
            yield json.loads(line.removeprefix(b"data: "))


async def get(r: Rig, path: str, key: str = "") -> tuple[int, Any]:
    headers = {"Authorization": f"Bearer {key}"} if key else {}
    async with r.client.get(r.url + path, headers=headers) as response:
        return response.status, await response.json(content_type=None)


async def test_live_figures_of_a_replayed_trace() -> None:
    """Counted by the workers, expected by the fleet and the shadow, seen through the page."""
    decode = [TracedDecode(0.002) for _ in range(2)]
    options: dict[str, Any] = {"policy": "marginal_cost", "shadow": ("round_robin",)}
    async with rig([TracedPrefill()], decode, **options) as r:
        load = asyncio.create_task(drive(r, 120, 8))
        async with r.client.get(r.url + "/eldr/events") as response:
            assert response.headers["Content-Type"].startswith("text/event-stream")
            async for data in events(response):
                if len(data["pairs"]) >= 4:
                    break
        assert (await load) == {200: 120}
        numbers, heat = data["numbers"], data["heat"]
        assert 4 <= numbers["experts"]["realised"] <= 64
        assert 4 <= numbers["experts"]["expected"] <= 64
        assert numbers["experts"]["shadow"]["policy"] == "round_robin"
        assert numbers["experts"]["basis"] == "estimate"
        assert numbers["error"]["mae"] < 6
        assert (heat["layers"], heat["experts"], len(heat["workers"])) == (4, 64, 2)
        assert numbers["skew"]["max_over_mean"] >= 1
        _, final = await get(r, "/eldr/data")
        assert final["decisions_total"] == 120
        assert sum(final["branches"]["totals"]) == 120
        assert set(final["layers"]) == {"0", "1", "2", "3"}


async def test_workers_are_asked_only_while_somebody_looks() -> None:
    decode = TracedDecode()
    async with rig([TracedPrefill()], [decode]) as r:
        await drive(r, 2, 1, tokens=4)
        assert decode.gets.count("/eldr/decode") == 0
        async with r.client.get(r.url + "/eldr/events") as response:
            await anext(aiter(events(response)))
            await until(lambda: decode.gets.count("/eldr/decode") >= 2)
        (watch,) = watches(r)
        await until(lambda: watch._task is None)
        before = decode.gets.count("/eldr/decode")
        for _ in range(5):
            await get(r, "/eldr/data")  # a glance, and no more than one poll per interval
        assert decode.gets.count("/eldr/decode") <= before + 5


def watches(r: Rig) -> list[Watch]:
    # Not isinstance, which asks every object in the process, dead proxies included.
    return [o for o in gc.get_objects() if type(o) is Watch and o._router is r.router]


async def test_polls_keep_their_distance(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(operator_page, "POLL_SECONDS", 60.0)
    decode = TracedDecode()
    async with rig([TracedPrefill()], [decode]) as r:
        watch = Watch(r.router)
        await asyncio.gather(*(watch.poll() for _ in range(20)))
        assert decode.gets.count("/eldr/decode") == 1


async def test_key_is_asked_for_the_data_and_the_page_has_none() -> None:
    async with rig(1, 1, admin_key="s3cret") as r:
        await r.complete()
        for path in ("/eldr/data", "/eldr/events"):
            status, body = await get(r, path)
            assert status == 401
            assert "key" in body["error"]["message"]
            assert (await get(r, path, "wrong"))[0] == 401
        assert (await get(r, "/eldr/data", "s3cret"))[0] == 200
        async with r.client.get(r.url + "/eldr/") as response:
            html = await response.text()
            assert response.status == 200
            assert r.decode[0].url not in html
            assert response.headers["Cache-Control"] == "no-store"
            assert "frame-ancestors 'none'" in response.headers["Content-Security-Policy"]
            assert response.headers["X-Content-Type-Options"] == "nosniff"


async def test_page_is_where_the_operators_routes_are() -> None:
    """With an admin port, the clients' port does not have it."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    async with rig(1, 1, admin_port=port) as r:
        for path in ("/eldr/", "/eldr/data", "/eldr/events"):
            assert (await get_status(r, r.url + path)) == 404
        assert (await get_status(r, f"http://127.0.0.1:{port}/eldr/")) == 200
        assert (await get_status(r, f"http://127.0.0.1:{port}/eldr")) == 200  # redirected


async def get_status(r: Rig, url: str) -> int:
    async with r.client.get(url) as response:
        return response.status


@pytest.mark.parametrize("layer", ["-1", "x", "1e3", "999999", "\u0661"])
async def test_layer_must_be_a_number(layer: str) -> None:
    async with (
        rig(1, 1) as r,
        r.client.get(r.url + "/eldr/data", params={"layer": layer}) as response,
    ):
        assert response.status == 400


async def test_without_counters_the_page_says_why() -> None:
    async with rig(1, 1) as r:
        await r.complete()
        _, data = await get(r, "/eldr/data")
        assert "no decode worker reports counters" in data["heat"]["why"]
        assert "no decode worker reports counters" in data["numbers"]["experts"]["notes"][0]
        assert "--shadow" in data["numbers"]["experts"]["notes"][1]
        assert data["numbers"]["decision"]["n"] == 1


async def test_worker_that_lies_or_hangs_costs_its_figures_only() -> None:
    class Liar(TracedDecode):
        def counted(self) -> dict[str, Any]:
            return {"v": 1, "steps": -1, "use": [[0]], "by_batch": {}}

    async with rig([TracedPrefill()], [Liar(), TracedDecode()]) as r:
        await drive(r, 4, 2, tokens=4)
        _, data = await get(r, "/eldr/data")
        assert len(data["heat"]["workers"]) == 1


async def test_request_ids_of_clients_are_data() -> None:
    async with rig(1, 1) as r:
        body = {"model": "m", "prompt": "x", "max_tokens": 2}
        headers = {"X-Request-Id": EVIL}
        async with r.client.post(r.url + "/v1/completions", json=body, headers=headers) as answer:
            assert answer.status == 200
        _, data = await get(r, "/eldr/data")
        assert data["decisions"][0]["request_id"] == EVIL
        async with r.client.get(r.url + "/eldr/data") as response:
            assert response.headers["Content-Type"] == "application/json"


async def test_too_many_viewers_are_refused() -> None:
    async with rig(1, 1) as r:
        watch = Watch(r.router)
        with ExitStack() as stack:
            for _ in range(operator_page.MOST_VIEWERS):
                stack.enter_context(watch.viewer())
            with pytest.raises(ClientError), watch.viewer():
                pass
        assert watch._task is None


async def test_measured_difference_of_an_experiment_is_shown() -> None:
    async with rig(1, 1, ab=("round_robin", "least_requests"), ab_design="request") as r:
        for _ in range(20):
            await r.stream()
        _, data = await get(r, "/eldr/data")
        (measured,) = data["numbers"]["experts"]["measured"]
        assert (measured["name"], measured["against"]) == ("least_requests", "round_robin")
        assert measured["ci95"][0] < measured["ci95"][1]


async def test_a_viewer_does_not_hold_the_router_up() -> None:
    """The stream ends with the router, at once, and not by an error."""
    async with aiohttp.ClientSession() as viewer:
        async with rig(1, 1) as r:
            response = await viewer.get(r.url + "/eldr/events")
            await anext(aiter(events(response)))
        assert (await response.content.read()).endswith(b"\n\n") or response.content.at_eof()


async def test_viewers_of_one_moment_share_an_event(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(operator_page, "SEND_SECONDS", 60.0)
    async with rig(1, 1) as r:
        watch = Watch(r.router)
        assert watch.event("a", None) is watch.event("a", None)
        assert watch.event("b", None) is not watch.event("a", None)
        for layer in range(100):
            watch.event("a", layer)
        assert len(watch._made) <= operator_page.MOST_VIEWERS
