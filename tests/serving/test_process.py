"""The process itself: start, errors at start, signals, TLS."""

from __future__ import annotations

import asyncio
import json
import os
import resource
import signal
import socket
import ssl
import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import aiohttp
import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer

from eldr.demo.ports import free_ports
from eldr.geometry import Geometry
from tests.serving.mocks.worker import FOREVER, MockWorker, Plan, workers
from tests.serving.partitions import save_partition
from tests.serving.rig import events, rig, until


def _free() -> int:
    return free_ports(1)[0]


def _command(prefill: list[str], decode: list[str], *options: str) -> list[str]:
    start = [sys.executable, "-m", "eldr", "serve", "--prefill", *prefill]
    return [*start, "--decode", *decode, *options]


async def _fails(*command: str) -> tuple[int, str]:
    """Exit code and message of a router that does not start."""
    process = await asyncio.create_subprocess_exec(*command, stderr=asyncio.subprocess.PIPE)
    _, err = await asyncio.wait_for(process.communicate(), 180)
    assert process.returncode is not None
    assert b"Traceback" not in err, err.decode()
    return process.returncode, err.decode()


@asynccontextmanager
async def _router(
    prefill: MockWorker, decode: MockWorker, *options: str
) -> AsyncIterator[tuple[asyncio.subprocess.Process, str]]:
    """A real router process, and its URL once it is ready."""
    # The kernel picks the port: one found first could be taken before the router binds it.
    command = _command([prefill.url], [decode.url], "--port", "0", *options)
    process = await asyncio.create_subprocess_exec(*command, stderr=asyncio.subprocess.PIPE)
    assert process.stderr is not None
    said: list[str] = []
    try:
        async with asyncio.timeout(180):
            while not said or "router ready" not in said[-1]:
                line = await process.stderr.readline()
                assert line, f"the router ended: {''.join(said)}"
                said.append(line.decode())
        port = said[-1].split("://", 1)[1].split(" ", 1)[0].rsplit(":", 1)[1]
        yield process, f"http://127.0.0.1:{port}"
    finally:
        if process.returncode is None:
            process.kill()
        await process.wait()


async def test_worker_that_does_not_answer_is_named_with_time_and_last_error() -> None:
    dead = f"http://127.0.0.1:{_free()}"
    command = _command([dead], [dead], "--port", "0", "--startup-timeout", "0.5")
    code, err = await _fails(*command)
    assert code == 3
    assert dead in err
    assert "0.5 s" in err
    assert "last error" in err


async def test_redirect_is_no_answer_of_a_worker() -> None:
    """A worker behind a login page is not there, and nobody may send the router elsewhere."""
    elsewhere = MockWorker("decode")

    async def redirect(request: web.Request) -> web.Response:
        raise web.HTTPFound(elsewhere.url + request.path)

    app = web.Application()
    app.router.add_get("/{path:.*}", redirect)
    async with workers(elsewhere), TestServer(app) as server:
        url = str(server.make_url("")).rstrip("/")
        command = _command([url], [url], "--port", "0", "--startup-timeout", "0.5")
        code, err = await _fails(*command)
    assert code == 3
    assert "HTTP 302" in err
    assert not elsewhere.gets


async def test_port_in_use_is_said_before_workers_are_waited_for() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = str(taken.getsockname()[1])
        dead = "http://127.0.0.1:9"
        code, err = await _fails(*_command([dead], [dead], "--port", port))
    assert code == 3
    assert f"127.0.0.1:{port} is in use" in err


async def test_unknown_policy_is_said_before_workers_are_waited_for() -> None:
    dead = "http://127.0.0.1:9"
    code, err = await _fails(*_command([dead], [dead], "--port", "0", "--policy", "fastest"))
    assert code == 3
    assert "unknown policy 'fastest'; there are" in err
    assert "marginal_cost" in err


@pytest.mark.parametrize(
    ("option", "value"),
    [("--decision-log", "missing/decisions.jsonl"), ("--otel-endpoint", "collector:4318")],
)
async def test_what_could_never_be_written_is_said_at_start(option: str, value: str) -> None:
    p, d = MockWorker("prefill"), MockWorker("decode")
    async with workers(p, d):
        code, err = await _fails(*_command([p.url], [d.url], "--port", "0", option, value))
    assert code == 3
    assert option in err
    assert value in err


async def test_policy_that_needs_signatures_and_a_worker_without_the_patch() -> None:
    p, d = MockWorker("prefill"), MockWorker("decode")
    async with workers(p, d):
        command = _command([p.url], [d.url], "--port", "0", "--policy", "marginal_cost")
        code, err = await _fails(*command)
    assert code == 3
    assert p.url in err
    assert "eldr patch apply" in err


@pytest.mark.parametrize("patched", [True, False])
async def test_default_policy_is_what_the_workers_allow(patched: bool) -> None:
    p = MockWorker("prefill", geometry=Geometry(2, 8, 2) if patched else None)
    async with rig([p], 2) as r:
        expected = "marginal_cost" if patched else "least_requests"
        assert r.router.config.policy == r.router.decode.fleet.policy.name == expected
        assert (await r.complete())[0] == 200
        assert (
            next(r.router.decisions.newest(1)).decision.branch
            == {
                True: "marginal",
                False: "least_requests",
            }[patched]
        )


@pytest.mark.parametrize("what", ["geometry", "workers", "missing", "unused"])
async def test_partition_that_does_not_fit(what: str) -> None:
    p, d = MockWorker("prefill", geometry=Geometry(2, 8, 2)), MockWorker("decode")
    other = Geometry(3, 8, 2) if what == "geometry" else Geometry(2, 8, 2)
    path = save_partition(other, [[0], [1]] if what == "workers" else [[0]])
    options = ["--policy", "locality_band", "--partition", path]
    if what == "missing":
        options = options[:2]
    if what == "unused":
        options = ["--policy", "random", *options[2:]]
    async with workers(p, d):
        code, err = await _fails(*_command([p.url], [d.url], "--port", "0", *options))
    assert code == 3
    assert {"geometry": "3 layers", "workers": "2 workers"}.get(what, "--partition") in err


async def test_decode_worker_given_as_prefill_worker() -> None:
    p = MockWorker("decode", geometry=Geometry(2, 8, 2))
    d = MockWorker("decode")
    async with workers(p, d):
        code, err = await _fails(*_command([p.url], [d.url], "--port", "0"))
    assert code == 3
    assert "--prefill" in err


async def test_idle_router_ends_at_once_with_0() -> None:
    p, d = MockWorker("prefill"), MockWorker("decode")
    async with workers(p, d), _router(p, d) as (process, _):
        process.send_signal(signal.SIGTERM)
        assert await asyncio.wait_for(process.wait(), 90) == 0


async def test_signal_while_waiting_for_workers_ends_it() -> None:
    dead = f"http://127.0.0.1:{_free()}"
    process = await asyncio.create_subprocess_exec(
        *_command([dead], [dead], "--port", "0", "--log-level", "debug"),
        stderr=asyncio.subprocess.PIPE,
    )
    assert process.stderr is not None
    await asyncio.wait_for(process.stderr.readline(), 180)  # the loop runs
    process.send_signal(signal.SIGTERM)
    assert await asyncio.wait_for(process.wait(), 90) == 0


async def test_sigterm_lets_a_running_stream_end_and_refuses_new_requests() -> None:
    p, d = MockWorker("prefill"), MockWorker("decode")
    gate = asyncio.Event()
    async with workers(p, d), _router(p, d) as (process, url), aiohttp.ClientSession() as client:
        d.plan = Plan(gate=gate)
        body = {"prompt": "x", "stream": True}
        running = asyncio.create_task(_read(client, url, body))
        await until(lambda: d.active == 1)
        process.send_signal(signal.SIGTERM)
        async with asyncio.timeout(60):
            while True:
                async with client.get(url + "/readiness") as response:
                    if response.status == 503:
                        break
        status, _ = await _read(client, url, body)
        assert status == 503
        gate.set()
        status, raw = await running
        assert status == 200
        assert b"error" not in raw
        assert await asyncio.wait_for(process.wait(), 90) == 0


@pytest.mark.parametrize("how", ["time limit", "second signal"])
async def test_stream_cut_by_the_drain_ends_in_an_error_event(how: str) -> None:
    p, d = MockWorker("prefill"), MockWorker("decode")
    limit = "0.3" if how == "time limit" else "60"
    async with (
        workers(p, d),
        _router(p, d, "--drain-timeout", limit) as (process, url),
        aiohttp.ClientSession() as client,
    ):
        d.plan = Plan(stall=2)
        async with client.post(
            url + "/v1/completions", json={"prompt": "x", "stream": True}
        ) as response:
            first = await response.content.readany()
            process.send_signal(signal.SIGTERM)
            if how == "second signal":
                async with asyncio.timeout(60):
                    while (await _status(client, url + "/readiness")) != 503:
                        pass
                process.send_signal(signal.SIGTERM)
            raw = first + await response.read()
        got = events(raw)
        assert "stopping" in json.loads(got[-2])["error"]["message"]
        assert got[-1] == b"[DONE]"
        assert await asyncio.wait_for(process.wait(), 90) == 0


async def test_start_loads_neither_torch_nor_vllm_and_is_quick() -> None:
    p, d = MockWorker("prefill"), MockWorker("decode")
    async with workers(p, d):
        p.plan = d.plan = Plan(wait=FOREVER)
        async with _router(p, d) as (process, _):
            maps = Path(f"/proc/{process.pid}/maps").read_text()
            assert "torch" not in maps
    script = (
        "import sys, eldr.cli.serve, eldr.serving.server;"
        "print([m for m in ('torch', 'vllm', 'triton', 'scipy', 'sklearn') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, check=True)
    assert done.stdout.strip() == b"[]"


async def test_t35_limit_of_open_files_is_raised_to_what_requests_need() -> None:
    p, d = MockWorker("prefill"), MockWorker("decode")
    few = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (200, few[1]))
    try:
        async with workers(p, d), _router(p, d, "--max-concurrent", "500") as (process, _):
            limits = Path(f"/proc/{process.pid}/limits").read_text()
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, few)
    (line,) = (line for line in limits.splitlines() if line.startswith("Max open files"))
    assert int(line.split()[3]) == min(2 * 500 + 1024, few[1])


async def test_a_start_costs_little_processor_time() -> None:
    p, d = MockWorker("prefill"), MockWorker("decode")
    async with workers(p, d), _router(p, d) as (process, _):
        fields = Path(f"/proc/{process.pid}/stat").read_text().rpartition(")")[2].split()
    used = (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
    # The bar is a second of wall time, of which 0.7 s are used; a busy machine needs longer for it.
    assert 0 < used < 1.5


@pytest.mark.parametrize("way", ["--short-way", "--no-short-way"])
async def test_tls_in_and_out(way: str, tmp_path: Path) -> None:
    cert, key = tmp_path / "cert.pem", tmp_path / "key.pem"
    made = subprocess.run(
        [
            *("openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2"),
            *("-subj", "/CN=localhost", "-addext", "subjectAltName=IP:127.0.0.1,DNS:localhost"),
            *("-keyout", str(key), "-out", str(cert)),
        ],
        capture_output=True,
        check=False,
    )
    if made.returncode:
        pytest.skip("openssl is not there to make a certificate")
    served = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    served.load_cert_chain(cert, key)
    p, d = MockWorker("prefill", tls=served), MockWorker("decode", tls=served)
    trusted = ssl.create_default_context(cafile=str(cert))
    options = [way, "--tls-cert", str(cert), "--tls-key", str(key), "--worker-ca", str(cert)]
    async with workers(p, d), _router(p, d, *options) as (_, url):
        secure = url.replace("http:", "https:")
        async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(ssl=trusted)) as client:
            status, raw = await _read(client, secure, {"prompt": "x", "stream": True})
            assert status == 200
            assert events(raw)[-1] == b"[DONE]"
        async with aiohttp.ClientSession() as client:
            with pytest.raises(aiohttp.ClientError):
                await _read(client, url, {"prompt": "x"})


async def _read(client: aiohttp.ClientSession, url: str, body: object) -> tuple[int, bytes]:
    async with client.post(url + "/v1/completions", json=body) as response:
        return response.status, await response.read()


async def _status(client: aiohttp.ClientSession, url: str) -> int:
    async with client.get(url) as response:
        return response.status
