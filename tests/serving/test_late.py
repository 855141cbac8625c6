"""A router that starts while workers are dead: it serves with the others, and they join later."""

from __future__ import annotations

import asyncio
import signal
import sys
from pathlib import Path

import pytest

from eldr.geometry import Geometry
from eldr.serving.config import RouterConfig
from eldr.serving.errors import StartError
from eldr.serving.opening import open_router
from tests.serving.late import GEOMETRY, SOURCES, decode, fleet, in_use, prefill, router, states
from tests.serving.mocks.worker import Plan
from tests.serving.rig import until


@pytest.mark.parametrize("source", SOURCES)
@pytest.mark.parametrize("role", ["prefill", "decode"])
async def test_the_others_serve_and_who_listens_later_joins(
    source: str,
    role: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    p, d = [prefill(), prefill()], decode(2)
    alive, late = p if role == "prefill" else d
    turns = {"policy": "round_robin", "prefill_policy": "round_robin"}
    async with fleet(tmp_path, p, d, dead=[late]) as f:
        named = f.options(source, monkeypatch)
        async with router(f, **turns, **named) as r:
            assert f"{role} worker {late.url} did not answer /v1/models within" in caplog.text
            assert "starts without it" in caplog.text
            assert await states(r, role) == {alive.url: "up", late.url: "down"}
            async with r.client.get(r.url + "/readiness") as response:
                assert response.status == 200
            async with r.client.get(r.url + "/metrics") as response:
                down = f'eldr_router_workers{{role="{role}",state="down"}} 1.0'
                assert down in await response.text()
            assert {(await r.complete())[0] for _ in range(4)} == {200}
            assert alive.count == 4
            await until(lambda: "asked again" in caplog.text)
            await in_use(r, late)
            await until(lambda: not [t for t in asyncio.all_tasks() if t.get_name() == "joining"])
            calls = [r.complete() for _ in range(8)]
            assert {status for status, _ in await asyncio.gather(*calls)} == {200}
            assert late.count > 0
            events = r.router.metrics.render().decode()
            joined = f'worker_events_total{{event="joined",role="{role}"}} 1.0'
            assert joined in events
            # From now on it is a member like any other.
            late.healthy = False
            endpoint = r.router.pool(role).get(late.url)
            assert endpoint is not None
            await until(lambda: endpoint.condition.down)
            late.healthy = True
            await until(lambda: not endpoint.condition.down)


@pytest.mark.parametrize("source", SOURCES)
@pytest.mark.parametrize("role", ["prefill", "decode"])
async def test_without_any_worker_of_a_kind_nothing_starts(
    source: str, role: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    p, d = [prefill()], decode(2)
    dead = p if role == "prefill" else d
    async with fleet(tmp_path, p, d, dead=dead) as f:
        config = RouterConfig(
            port=0, startup_timeout=1.0, startup_grace=0.05, **f.options(source, monkeypatch)
        )
        with pytest.raises(StartError) as caught:
            async with open_router(config):
                pass
    for worker in dead:
        assert f"{role} worker {worker.url} did not answer" in str(caught.value)
    assert "within 1 s; last error" in str(caught.value)
    assert "--startup-timeout" in str(caught.value)


async def test_grace_begins_when_a_worker_of_each_kind_answers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    d = decode(2)
    async with fleet(tmp_path, [prefill()], d, dead=d) as f:
        entering = router(f, startup_grace=0.05, **f.options("flags", monkeypatch))
        opened = asyncio.create_task(entering.__aenter__())
        await until(lambda: "/v1/models" in f.prefill[0].gets)
        done, _ = await asyncio.wait({opened}, timeout=0.5)  # ten times the grace
        assert not done
        await d[0].start()
        r = await opened
        assert await states(r, "decode") == {d[0].url: "up", d[1].url: "down"}
        await entering.__aexit__(None, None, None)


async def test_nobody_waits_for_the_grace_when_all_answer_and_nobody_longer_than_the_limit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with fleet(tmp_path, [prefill()], decode(2), dead=[]) as f:
        named = f.options("flags", monkeypatch)
        async with asyncio.timeout(60), router(f, startup_grace=3600.0, **named) as r:
            assert set((await states(r, "decode")).values()) == {"up"}
        # It takes connections, and never answers.
        f.decode[0].models_gate = asyncio.Event()
        config = RouterConfig(startup_timeout=1.0, startup_grace=3600.0, **named)
        async with asyncio.timeout(60), open_router(config) as opened:
            assert [e.awaited for e in opened.decode.endpoints] == [True, False]


async def test_who_listens_later_must_serve_the_same_model(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    p = [prefill(), prefill(Geometry(3, 8, 2))]
    async with fleet(tmp_path, p, decode(1), dead=[p[1]]) as f:
        named = f.options("flags", monkeypatch)
        async with router(f, **named) as r:
            await p[1].start()
            await until(lambda: "3 layers" in caplog.text)
            assert (await states(r, "prefill"))[p[1].url] == "down"
            assert {(await r.complete())[0] for _ in range(4)} == {200}
            assert p[1].count == 0
            p[1].geometry = GEOMETRY
            await until(lambda: not r.router.prefill.get(p[1].url).awaited)


async def test_who_never_answered_is_nobodys_last_resort(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What serves at its address may be anything until it was asked."""
    d = decode(2)
    d[1].models_gate = asyncio.Event()
    async with fleet(tmp_path, [prefill()], d, dead=[]) as f:
        named = f.options("flags", monkeypatch)
        async with router(f, **named) as r:
            d[0].plan = Plan(status=502)
            assert (await r.complete())[0] == 502
            assert d[0].count > 0
            assert d[1].count == 0
            d[1].models_gate.set()
            await until(lambda: not r.router.decode.get(d[1].url).awaited)
            assert (await r.complete())[0] == 200


async def test_operators_may_remove_a_worker_that_is_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    d = decode(2)
    async with fleet(tmp_path, [prefill()], d, dead=[d[1]]) as f:
        named = f.options("flags", monkeypatch)
        async with router(f, **named) as r:
            worker = {"role": "decode", "url": d[1].url}
            async with r.client.post(r.url + "/workers", json=worker) as response:
                assert response.status == 400
            async with r.client.delete(r.url + "/workers", params={"name": d[1].url}) as response:
                assert await response.json() == {"name": d[1].url, "leaving": False}
            await until(lambda: not [t for t in asyncio.all_tasks() if t.get_name() == "joining"])
            await d[1].start()
            assert await states(r, "decode") == {d[0].url: "up"}
            async with r.client.post(r.url + "/workers", json=worker) as response:
                assert response.status == 201
            assert await states(r, "decode") == {d[0].url: "up", d[1].url: "up"}


async def test_file_that_no_longer_names_a_worker_that_is_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    d = decode(3)
    async with fleet(tmp_path, [prefill()], d, dead=d[1:]) as f:
        named = f.options("file", monkeypatch)
        async with router(f, **named) as r:
            names = lambda: {e.name for e in r.router.decode.endpoints}  # noqa: E731
            # A file that names nobody of a kind is not believed; who comes is welcome.
            f.write(f.prefill, [])
            await until(lambda: "names no decode worker" in caplog.text)
            assert names() == {w.url for w in d}
            await in_use(r, d[1])
            f.write(f.prefill, d[:2])
            await until(lambda: names() == {w.url for w in d[:2]})
            caplog.clear()
            f.write(f.prefill, d)
            await until(lambda: "asked again" in caplog.text)
            await d[2].start()
            await until(lambda: names() == {w.url for w in d})


async def test_process_starts_says_who_is_missing_and_stops_at_once(tmp_path: Path) -> None:
    d = decode(2)
    async with fleet(tmp_path, [prefill()], d, dead=[d[1]]) as f:
        command = [sys.executable, "-m", "eldr", "serve", "--port", "0", "--startup-grace", "0.1"]
        command += ["--prefill", f.prefill[0].url, "--decode", *(w.url for w in f.decode)]
        process = await asyncio.create_subprocess_exec(*command, stderr=asyncio.subprocess.PIPE)
        assert process.stderr is not None
        said = ""
        try:
            async with asyncio.timeout(180):
                while "router ready" not in said:
                    line = await process.stderr.readline()
                    assert line, f"the router ended: {said}"
                    said += line.decode()
            process.send_signal(signal.SIGTERM)
            assert await asyncio.wait_for(process.wait(), 90) == 0
        finally:
            if process.returncode is None:
                process.kill()
                await process.wait()
    assert f"decode worker {d[1].url} did not answer" in said
    assert "1 prefill, 1 of 2 decode workers" in said
