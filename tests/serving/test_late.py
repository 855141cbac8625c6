"""A router that starts while workers are dead: it serves with the others, and they join later."""

from __future__ import annotations

import asyncio
import signal
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import aiohttp
import pytest

from eldr.geometry import Geometry
from eldr.serving import discovery, opening, state
from eldr.serving.config import RouterConfig
from eldr.serving.errors import StartError
from eldr.serving.opening import open_router
from eldr.serving.server import bound_sockets, listening
from tests.serving.mocks.worker import MockWorker, Plan
from tests.serving.partitions import save_partition
from tests.serving.rig import Rig, until

GEOMETRY = Geometry(2, 16, 2)
SOURCES = ("flags", "file", "kubernetes")
CENTROIDS = [[0, 1], [4, 5], [8, 9]]


def decode(count: int) -> list[MockWorker]:
    return [MockWorker("decode") for _ in range(count)]


def prefill(geometry: Geometry = GEOMETRY) -> MockWorker:
    return MockWorker("prefill", geometry=geometry)


class Pods:
    """What the API server lists; a pod that does not listen may still be Ready for a while."""

    def __init__(self, workers: list[MockWorker]) -> None:
        self.ready = list(workers)

    def list_namespaced_pod(self, namespace: str, label_selector: str, **_: Any) -> Any:
        return SimpleNamespace(
            items=[
                SimpleNamespace(
                    metadata=SimpleNamespace(
                        name=worker.url,
                        annotations={"eldr.ai/port": str(worker.port)},
                        deletion_timestamp=None,
                    ),
                    status=SimpleNamespace(
                        pod_ip="127.0.0.1",
                        phase="Running",
                        conditions=[SimpleNamespace(type="Ready", status="True")],
                    ),
                )
                for worker in sorted(self.ready, key=lambda worker: worker.port)
                if worker.role == label_selector
            ]
        )


class Fleet:
    """Workers of which some do not listen yet, and a router's options that name all of them."""

    def __init__(self, path: Path, prefill: list[MockWorker], decode: list[MockWorker]) -> None:
        # Discoveries sort by address, flags do not: one order for all of them.
        self.prefill, self.decode = prefill, sorted(decode, key=lambda w: w.port)
        self.pods = Pods([*prefill, *decode])
        self._path = path / "workers.toml"

    def write(self, prefill: list[MockWorker], decode: list[MockWorker]) -> None:
        """Names these in the file."""
        scratch = self._path.with_suffix(".new")
        named = f"prefill = {[w.url for w in prefill]}\ndecode = {[w.url for w in decode]}"
        scratch.write_text(named)
        scratch.replace(self._path)

    def options(self, source: str, patch: pytest.MonkeyPatch) -> dict[str, Any]:
        """What names the workers."""
        if source == "flags":
            urls = lambda workers: tuple(w.url for w in workers)  # noqa: E731
            return {"prefill": urls(self.prefill), "decode": urls(self.decode)}
        if source == "file":
            self.write(self.prefill, self.decode)
            return {"worker_file": str(self._path), "discovery_interval": 0.02}
        patch.setattr(opening, "connect", lambda: self.pods)
        return {"k8s_prefill": "prefill", "k8s_decode": "decode", "discovery_interval": 0.02}


@asynccontextmanager
async def fleet(
    path: Path, prefill: list[MockWorker], decode: list[MockWorker], dead: list[MockWorker]
) -> AsyncIterator[Fleet]:
    """All workers have an address; the dead ones do not listen at it."""
    everyone = [*prefill, *decode]
    for worker in everyone:
        await worker.start()
    for worker in dead:
        await worker.kill()
    try:
        yield Fleet(path, prefill, decode)
    finally:
        for worker in everyone:
            if worker._server is not None:
                await worker.kill()


@asynccontextmanager
async def router(where: Fleet, **options: Any) -> AsyncIterator[Rig]:
    """A router that gives those who do not answer little time, and a client."""
    given = {"startup_grace": 0.5, "health_interval": 0.02, "slow_start": 0.0, **options}
    config = RouterConfig(port=0, poll_interval=0.0, startup_timeout=60.0, **given)
    with bound_sockets(config) as sockets:
        async with open_router(config) as opened, listening(opened, sockets):
            url = f"http://127.0.0.1:{sockets['main'].getsockname()[1]}"
            async with aiohttp.ClientSession() as client:
                yield Rig(opened, where.prefill, where.decode, client, url)
    assert not [t for t in asyncio.all_tasks() if t.get_name() == "joining"]


@pytest.fixture(autouse=True)
def _impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(state, "_JOIN_SECONDS", 0.5)
    monkeypatch.setattr(discovery, "_AGAIN_SECONDS", 0.01)


async def states(r: Rig, role: str) -> dict[str, str]:
    """State by name, as operators see it."""
    async with r.client.get(r.url + "/workers") as response:
        return {row["name"]: row["state"] for row in (await response.json())[role]}


async def home(r: Rig, expert: int) -> str:
    """The decode worker of one request whose signature is on this expert."""
    r.prefill[0].expert = expert
    assert (await r.complete())[0] == 200
    return next(r.router.decisions.newest(1)).decision.worker.name


async def in_use(r: Rig, worker: MockWorker) -> None:
    """Waits until a worker that starts now gets requests; its pool knows it once."""
    await worker.start()
    name = worker.url
    pool = r.router.pool(worker.role)
    await until(lambda: (e := pool.get(name)) is not None and not e.awaited)
    assert (await states(r, worker.role))[name] == "up"


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
async def test_partition_keeps_the_centroid_of_a_worker_that_is_dead_at_the_start(
    source: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    options = {"policy": "locality_band", "partition": save_partition(GEOMETRY, CENTROIDS)}
    async with fleet(tmp_path, [prefill()], decode(3), dead=[]) as f:
        first, late, last = f.decode
        await late.kill()
        async with router(f, **options, **f.options(source, monkeypatch)) as r:
            refits = r.router.refits
            assert refits is not None
            digest = refits.partition.digest
            assert refits.partition.names == (first.url, late.url, last.url)
            assert [await home(r, e) for e in (0, 8)] == [first.url, last.url]
            assert await home(r, 4) != late.url
            await in_use(r, late)
            assert [await home(r, e) for e in (0, 4, 8)] == [first.url, late.url, last.url]
            assert refits.partition.digest == digest
            assert refits.outcomes["remapped"] == 0


async def test_other_members_come_and_go_before_the_dead_worker_is_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    options = {"policy": "locality_band", "partition": save_partition(GEOMETRY, CENTROIDS)}
    extra = MockWorker("decode")
    async with fleet(tmp_path, [prefill()], [*decode(3), extra], dead=[]) as f:
        f.decode.remove(extra)
        first, late, last = f.decode
        await late.kill()
        async with router(f, **options, **f.options("flags", monkeypatch)) as r:
            refits = r.router.refits
            assert refits is not None
            await r.router.add_worker("decode", extra.url)
            await until(lambda: refits.outcomes["remapped"] == 1)
            assert set(refits.partition.names) == {w.url for w in (first, late, last, extra)}
            r.router.decode.leave(extra.url)
            await until(lambda: refits.outcomes["remapped"] == 2)
            await in_use(r, late)
            assert [await home(r, e) for e in (0, 4, 8)] == [first.url, late.url, last.url]
            assert {e.name for e in r.router.decode.endpoints} == set(refits.partition.names)


@pytest.mark.parametrize("dead", ["unready", "ready"])
async def test_pod_of_another_name_takes_the_centroid_that_no_worker_had(
    dead: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Pods come back under new addresses: the place of one that never served is theirs."""
    options = {"policy": "locality_band", "partition": save_partition(GEOMETRY, CENTROIDS)}
    new = MockWorker("decode")
    async with fleet(tmp_path, [prefill()], [*decode(3), new], dead=[]) as f:
        f.decode.remove(new)
        f.pods.ready.remove(new)
        gone = f.decode[1]
        others = [w for w in f.decode if w is not gone]
        await gone.kill()
        if dead == "unready":
            f.pods.ready.remove(gone)
        async with router(f, **options, **f.options("kubernetes", monkeypatch)) as r:
            refits, before = r.router.refits, {}
            assert refits is not None
            for expert in (0, 4, 8):
                before[expert] = await home(r, expert)
            f.pods.ready = [*f.prefill, *others]
            await until(lambda: r.router.decode.get(gone.url) is None)
            assert {await home(r, e) for e in (0, 4, 8)} == {w.url for w in others}
            f.pods.ready.append(new)
            await until(lambda: r.router.decode.get(new.url) is not None)
            await until(lambda: new.url in refits.partition.names)
            homes = {expert: await home(r, expert) for expert in (0, 4, 8)}
            (theirs,) = (expert for expert, name in homes.items() if name == new.url)
            assert {e: n for e, n in homes.items() if e != theirs} == {
                e: n for e, n in before.items() if e != theirs
            }
            assert set(refits.partition.names) == {w.url for w in (*others, new)}
            assert len({c.tobytes() for c in refits.partition.centroids}) == 3


async def test_fewer_workers_than_centroids_by_name_are_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Flags and files say how many workers there are; that a cluster has fewer now, says less."""
    options = {"policy": "locality_band", "partition": save_partition(GEOMETRY, CENTROIDS)}
    async with fleet(tmp_path, [prefill()], decode(2), dead=[]) as f:
        for source in ("flags", "file"):
            with pytest.raises(StartError, match="fitted for 3 workers, but the fleet has 2"):
                async with router(f, **options, **f.options(source, monkeypatch)):
                    pass
        async with router(f, **options, **f.options("kubernetes", monkeypatch)) as r:
            raw = Path(options["partition"]).read_bytes()
            async with r.client.post(r.url + "/eldr/partition", data=raw) as response:
                assert response.status == 200
                names = (await response.json())["partition"]["workers"]
            assert {w.url for w in f.decode} < set(names)


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
