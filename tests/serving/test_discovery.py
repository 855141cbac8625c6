"""Workers that come and go: a watched file, Kubernetes labels, and what is done with them."""

from __future__ import annotations

import asyncio
import json
import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer

from eldr.demo.ports import free_ports
from eldr.serving import discovery, state
from eldr.serving.config import ConfigError, RouterConfig
from eldr.serving.discovery import Member, Membership
from eldr.serving.discovery.file import read_members
from eldr.serving.discovery.kubernetes import KubernetesSource, PodSelectors, connect
from eldr.serving.errors import StartError
from eldr.serving.opening import open_router
from tests.serving.mocks.worker import MockWorker, Plan, workers
from tests.serving.rig import rig, until


def _write(path: Path, text: str) -> None:
    scratch = path.with_suffix(".new")
    scratch.write_text(text)
    os.replace(scratch, path)


def test_file_lists_urls_and_ranks(tmp_path: Path) -> None:
    path = tmp_path / "workers.toml"
    _write(path, 'prefill = ["http://p:1"]\ndecode = ["http://a:1", {url="http://b:1", ranks=2}]')
    assert read_members(str(path)) == {
        Member("prefill", "http://p:1"),
        Member("decode", "http://a:1"),
        Member("decode", "http://b:1", 0),
        Member("decode", "http://b:1", 1),
    }


@pytest.mark.parametrize(
    "text",
    [
        "=",
        "prefil = []",
        "prefill = [3]",
        'prefill = ["ftp://x"]',
        'decode = [{url="http://b:1", ranks=0}]',
        'decode = [{url="http://b:1", rank=1}]',
    ],
)
def test_wrong_file_says_which_and_why(tmp_path: Path, text: str) -> None:
    path = tmp_path / "workers.toml"
    path.write_text(text)
    with pytest.raises(ConfigError):
        read_members(str(path))
    with pytest.raises(ConfigError, match="worker file"):
        read_members(str(tmp_path / "missing.toml"))


async def test_edited_file_moves_workers_without_dropping_a_request(tmp_path: Path) -> None:
    p, old, new = MockWorker("prefill"), MockWorker("decode"), MockWorker("decode")
    path = tmp_path / "workers.toml"
    async with workers(p, old, new):
        _write(path, f'prefill = ["{p.url}"]\ndecode = ["{old.url}"]')
        config = RouterConfig(worker_file=str(path), discovery_interval=0.02, startup_timeout=60.0)
        async with open_router(config) as router:
            names = lambda: [e.name for e in router.decode.endpoints]  # noqa: E731
            assert names() == [old.url]
            _write(path, "not toml = = =")
            await asyncio.sleep(0.1)
            assert names() == [old.url]
            _write(path, f'prefill = ["{p.url}"]\ndecode = ["{new.url}", "http://127.0.0.1:9"]')
            await until(lambda: names() == [new.url], 30.0)
            assert router.decode.fleet.names == (new.url,)


async def test_nobody_leaves_before_one_in_its_place_is_there(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A member that is named before it listens joins when it does; it is reported once."""
    monkeypatch.setattr(state, "_JOIN_SECONDS", 0.05)
    monkeypatch.setattr(discovery, "_AGAIN_SECONDS", 0.01)
    late = MockWorker("decode")
    await late.start()
    await late.kill()
    async with rig(1, 2) as r:
        names = lambda: {e.name for e in r.router.decode.endpoints}  # noqa: E731
        old = {w.url for w in r.decode}
        p = Member("prefill", r.prefill[0].url)
        membership = Membership(r.router)
        membership.want(frozenset({p, Member("decode", late.url)}))
        await until(lambda: "asked again" in caplog.text)
        assert names() == old
        assert (await r.complete())[0] == 200
        await late.start()
        await until(lambda: names() == {late.url})
        assert (await r.complete())[0] == 200
        assert late.count == 1
        assert caplog.text.count("asked again") == 1
        # With one of its kind there, who is no longer named need not wait for the others.
        membership.want(frozenset({p, Member("decode", late.url), Member("decode", _dead())}))
        await until(lambda: caplog.text.count("asked again") == 2)
        membership.want(frozenset({p, Member("decode", r.decode[0].url)}))
        await until(lambda: names() == {r.decode[0].url})
        await membership.close()
        assert not [t for t in asyncio.all_tasks() if t.get_name() == "joining"]
    await late.kill()


def _dead() -> str:
    return f"http://127.0.0.1:{free_ports(1)[0]}"


async def test_member_that_is_busy_leaves_after_its_last_request() -> None:
    async with rig(1, 2) as r:
        gate = asyncio.Event()
        for worker in r.decode:
            worker.plan = Plan(gate=gate)
        calls = [asyncio.create_task(r.complete()) for _ in range(4)]
        await until(lambda: sum(w.active for w in r.decode) == 4)
        p, keep = r.prefill[0].url, r.decode[1].url
        Membership(r.router).want(frozenset({Member("prefill", p), Member("decode", keep)}))
        assert len(r.router.decode.endpoints) == 2
        gate.set()
        assert {status for status, _ in await asyncio.gather(*calls)} == {200}
        await until(lambda: [e.name for e in r.router.decode.endpoints] == [keep])


async def test_worker_that_returns_while_it_leaves_stays() -> None:
    async with rig(1, 2) as r:
        gate = asyncio.Event()
        for worker in r.decode:
            worker.plan = Plan(gate=gate)
        calls = [asyncio.create_task(r.complete()) for _ in range(2)]
        await until(lambda: sum(w.active for w in r.decode) == 2)
        everyone = frozenset(
            {Member("prefill", r.prefill[0].url), *(Member("decode", w.url) for w in r.decode)}
        )
        membership = Membership(r.router)
        membership.want(everyone - {Member("decode", r.decode[0].url)})
        assert [e.leaving for e in r.router.decode.endpoints] == [True, False]
        membership.want(everyone)
        await until(lambda: not any(e.leaving for e in r.router.decode.endpoints))
        gate.set()
        await asyncio.gather(*calls)
        assert len(r.router.decode.endpoints) == 2
        assert all(not row["draining"] for row in r.router.decode.fleet.status())


async def test_engine_in_both_pools_joins_and_leaves_each() -> None:
    both = MockWorker("decode")
    async with workers(both), rig(1, 1) as r:
        others = {Member("prefill", r.prefill[0].url), Member("decode", r.decode[0].url)}
        twice = {Member("prefill", both.url), Member("decode", both.url)}
        membership = Membership(r.router)
        membership.want(frozenset(others | twice))
        await until(lambda: len(r.router.endpoints()) == 4)
        assert {(e.role, e.name) for e in r.router.endpoints()} == {
            (member.role, member.url) for member in others | twice
        }
        membership.want(frozenset(others | {Member("prefill", both.url)}))
        assert [e.name for e in r.router.decode.endpoints] == [r.decode[0].url]
        assert both.url in {e.name for e in r.router.prefill.endpoints}


async def test_source_that_names_nobody_is_not_believed() -> None:
    async with rig(1, 2) as r:
        Membership(r.router).want(frozenset())
        assert len(r.router.endpoints()) == 3
        assert not any(e.leaving for e in r.router.endpoints())


def _pod(ip: str, ready: str = "True", **more: Any) -> Any:
    condition = SimpleNamespace(type="Ready", status=ready)
    status = SimpleNamespace(pod_ip=ip, phase=more.get("phase", "Running"), conditions=[condition])
    meta = SimpleNamespace(
        name=f"pod-{ip}",
        annotations=more.get("annotations"),
        deletion_timestamp=more.get("deleted"),
    )
    return SimpleNamespace(status=status, metadata=meta)


class _Api:
    """The one call of the official client that the source makes."""

    def __init__(self, pods: dict[str, list[Any]]) -> None:
        self.pods = pods
        self.asked = 0

    def list_namespaced_pod(
        self, namespace: str, label_selector: str, _request_timeout: tuple[float, float]
    ) -> Any:
        assert namespace == "ns"
        self.asked += 1
        return SimpleNamespace(items=self.pods[label_selector])


def test_ready_pods_are_members() -> None:
    api = _Api(
        {
            "role=p": [_pod("10.0.0.1"), _pod("10.0.0.2", ready="False")],
            "role=d": [
                _pod("10.0.0.3", annotations={"eldr.ai/port": "9000", "eldr.ai/ranks": "2"}),
                _pod("10.0.0.4", deleted="now"),
                _pod("10.0.0.5", phase="Pending"),
                _pod("fd00::1"),
                _pod("10.0.0.6", annotations={"eldr.ai/port": "x"}),
                _pod("10.0.0.7", annotations={"eldr.ai/port": "80"}),
                _pod("10.0.0.8", annotations={"eldr.ai/port": "99999"}),
                _pod("169.254.0.9"),
                _pod(""),
            ],
        }
    )
    source = KubernetesSource(api, PodSelectors("ns", "role=p", "role=d", 8000), 1.0)
    assert source.members() == {
        Member("prefill", "http://10.0.0.1:8000"),
        Member("decode", "http://10.0.0.3:9000", 0),
        Member("decode", "http://10.0.0.3:9000", 1),
        Member("decode", "http://[fd00::1]:8000"),
        Member("decode", "http://10.0.0.7"),  # as pools call it
    }


async def test_failing_api_server_changes_nothing_and_is_reported_once(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level("INFO")
    api = _Api({"role=p": [_pod("10.0.0.1")], "role=d": [_pod("10.0.0.2")]})
    source = KubernetesSource(api, PodSelectors("ns", "role=p", "role=d", 8000), 0.01)
    changes = source.watch()
    first = await anext(changes)
    pods, api.pods = api.pods, {}
    later = asyncio.ensure_future(anext(changes))
    asked = api.asked
    await until(lambda: api.asked > asked + 3)
    assert not later.done()
    api.pods = {**pods, "role=d": [_pod("10.0.0.3")]}
    assert await asyncio.wait_for(later, 60) != first
    assert caplog.text.count("stay as they are") == caplog.text.count("answers again") == 1


async def test_start_waits_for_a_pod_of_each_role(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO")
    api = _Api({"role=p": [_pod("10.0.0.1")], "role=d": []})
    source = KubernetesSource(api, PodSelectors("ns", "role=p", "role=d", 8000), 0.01)
    with pytest.raises(StartError, match=r"no decode pod is ready after 0\.05 s"):
        await source.first(0.05)
    waiting = asyncio.ensure_future(source.first(60.0))
    await until(lambda: caplog.text.count("waiting") == 2)
    api.pods["role=d"] = [_pod("10.0.0.2")]
    assert len(await waiting) == 2
    api.pods = {}
    with pytest.raises(StartError, match="KeyError: 'role=p' after"):
        await source.first(0.0)


async def test_official_client(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What the stand-ins above assume of it: the call, the answer, errors, and a silent server."""
    pytest.importorskip("kubernetes")
    pod = {
        "metadata": {"name": "p", "annotations": {"eldr.ai/port": "9000"}},
        "status": {
            "phase": "Running",
            "podIP": "10.0.0.1",
            "conditions": [{"type": "Ready", "status": "True"}],
        },
    }
    asked: list[str] = []
    status = 200
    silent = asyncio.Event()

    async def answer(request: web.Request) -> web.Response:
        asked.append(request.path_qs)
        assert request.headers["Authorization"] == "Bearer t"
        await silent.wait()
        if status != 200:
            return web.json_response({"kind": "Status", "message": "may not list"}, status=status)
        return web.json_response({"kind": "PodList", "apiVersion": "v1", "items": [pod]})

    app = web.Application()
    app.router.add_get("/{path:.*}", answer)
    async with TestServer(app) as server:
        here = {"cluster": "c", "user": "u"}
        config = {
            "clusters": [{"name": "c", "cluster": {"server": str(server.make_url(""))}}],
            "contexts": [{"name": "x", "context": here}],
            "users": [{"name": "u", "user": {"token": "t"}}],
            "current-context": "x",
        }
        path = tmp_path / "kubeconfig"
        path.write_text(json.dumps(config))
        monkeypatch.setenv("KUBECONFIG", str(path))
        monkeypatch.setattr("kubernetes.config.kube_config.KUBE_CONFIG_DEFAULT_LOCATION", str(path))
        monkeypatch.setattr("eldr.serving.discovery.kubernetes._SECONDS", (5.0, 0.2))
        api = connect()
        source = KubernetesSource(api, PodSelectors("ns", "role=p", "role=d", 8000), 0.01)
        with pytest.raises(StartError, match="imed out"):
            await source.first(0.0)
        assert len(asked) == 1  # nothing is tried again behind our back
        silent.set()
        wanted = {Member(role, "http://10.0.0.1:9000") for role in ("prefill", "decode")}
        assert await source.first(5.0) == wanted
        assert asked[-1].startswith("/api/v1/namespaces/ns/pods?labelSelector=role%3Dd")
        status = 403
        with pytest.raises(StartError, match=r"Forbidden.*may not list.* after 0 s") as caught:
            await source.first(0.0)
        assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "options",
    [
        {"worker_file": "f", "prefill": ("http://p:1",)},
        {"k8s_prefill": "a=b"},
        {"k8s_prefill": "a", "k8s_decode": "b", "worker_file": "f"},
    ],
)
def test_workers_come_from_one_place(options: dict[str, Any]) -> None:
    with pytest.raises(ConfigError):
        RouterConfig(**options)
