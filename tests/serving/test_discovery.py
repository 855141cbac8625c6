"""Workers that come and go: a watched file, Kubernetes labels, and what is done with them."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from eldr.serving.config import ConfigError, RouterConfig
from eldr.serving.discovery import Member, reconcile
from eldr.serving.discovery.file import read_members
from eldr.serving.discovery.kubernetes import KubernetesSource, PodSelectors
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
            await until(lambda: new.url in names(), 30.0)
            await until(lambda: names() == [new.url], 30.0)
            assert router.decode.fleet.names == (new.url,)


async def test_member_that_is_busy_leaves_after_its_last_request() -> None:
    async with rig(1, 2) as r:
        gate = asyncio.Event()
        for worker in r.decode:
            worker.plan = Plan(gate=gate)
        calls = [asyncio.create_task(r.complete()) for _ in range(4)]
        await until(lambda: sum(w.active for w in r.decode) == 4)
        p, keep = r.prefill[0].url, r.decode[1].url
        await reconcile(r.router, frozenset({Member("prefill", p), Member("decode", keep)}))
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
        await reconcile(r.router, everyone - {Member("decode", r.decode[0].url)})
        await reconcile(r.router, everyone)
        gate.set()
        await asyncio.gather(*calls)
        assert len(r.router.decode.endpoints) == 2
        assert all(not row["draining"] for row in r.router.decode.fleet.status())


async def test_engine_in_both_pools_joins_and_leaves_each() -> None:
    both = MockWorker("decode")
    async with workers(both), rig(1, 1) as r:
        others = {Member("prefill", r.prefill[0].url), Member("decode", r.decode[0].url)}
        twice = {Member("prefill", both.url), Member("decode", both.url)}
        await reconcile(r.router, frozenset(others | twice))
        assert {(e.role, e.name) for e in r.router.endpoints()} == {
            (member.role, member.url) for member in others | twice
        }
        await reconcile(r.router, frozenset(others | {Member("prefill", both.url)}))
        assert [e.name for e in r.router.decode.endpoints] == [r.decode[0].url]
        assert both.url in {e.name for e in r.router.prefill.endpoints}


async def test_source_that_names_nobody_is_not_believed() -> None:
    async with rig(1, 2) as r:
        await reconcile(r.router, frozenset())
        assert len(r.router.endpoints()) == 3


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

    def list_namespaced_pod(self, namespace: str, label_selector: str) -> Any:
        assert namespace == "ns"
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
    }


async def test_failing_api_server_changes_nothing() -> None:
    api = _Api({"role=p": [_pod("10.0.0.1")], "role=d": [_pod("10.0.0.2")]})
    source = KubernetesSource(api, PodSelectors("ns", "role=p", "role=d", 8000), 0.01)
    changes = source.watch()
    first = await anext(changes)
    pods, api.pods = api.pods, {}
    later = asyncio.ensure_future(anext(changes))
    await asyncio.sleep(0.05)
    assert not later.done()
    api.pods = {**pods, "role=d": [_pod("10.0.0.3")]}
    assert await asyncio.wait_for(later, 60) != first


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
