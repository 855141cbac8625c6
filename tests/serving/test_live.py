"""The router in front of real, patched vLLM workers on a CPU: what clients do and what dies."""

from __future__ import annotations

import asyncio
import json
import os
import re
import signal
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp
import pytest

import eldr
from eldr.demo.config import MODEL_NAME
from eldr.demo.console import Console
from eldr.demo.ports import free_ports
from eldr.demo.processes import Child, Supervisor
from eldr.demo.workers import router_command, worker_command, worker_env
from tests.serving.rig import events

pytest.importorskip("vllm")
pytest.importorskip("vllm.eldr_hook", reason="vLLM is not patched: run `eldr patch apply`")
pytest.importorskip("nixl", reason="NIXL is not installed")

pytestmark = [pytest.mark.servers, pytest.mark.timeout(1500)]
MODEL = Path(eldr.__file__).parent / "workload" / "tiny_moe"
PROMPT = "The quick brown fox jumps over the lazy dog, and then it "


@dataclass
class Fleet:
    """The processes of the test and how to start a decode worker again."""

    supervisor: Supervisor
    prefill: Child
    decode: list[Child]
    router: Child
    side_channels: list[int]

    def kill(self, child: Child) -> None:
        """As the kernel does when memory is short."""
        os.killpg(child.process.pid, signal.SIGKILL)
        child.process.wait()

    def restart(self, index: int) -> None:
        """A dead decode worker at the same URL."""
        port = int(self.decode[index].url.rsplit(":", 1)[1])
        self.decode[index] = _worker(
            self.supervisor, "decode", f"decode-{index}-again", port, self.side_channels[index]
        )
        self.supervisor.wait_healthy([self.decode[index]], 900.0)


def _worker(supervisor: Supervisor, role: str, name: str, port: int, side: int) -> Child:
    command = worker_command(role, port, MODEL)
    return supervisor.start(name, command, f"http://127.0.0.1:{port}", worker_env(side))


@pytest.fixture(scope="module")
def fleet(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    """One prefill and two decode workers behind a router."""
    logs = tmp_path_factory.mktemp("live")
    ports = free_ports(7)
    with Supervisor(logs, Console()) as supervisor:
        prefill = _worker(supervisor, "prefill", "prefill", ports[0], ports[1])
        decode = [
            _worker(supervisor, "decode", f"decode-{i}", ports[2 + i], ports[4 + i])
            for i in range(2)
        ]
        supervisor.wait_healthy([prefill, *decode], 900.0)
        command = router_command(ports[6], prefill.url, [d.url for d in decode], "auto")
        command += ["--worker-headers", "--poll-interval", "0.5", "--health-interval", "1"]
        router = supervisor.start("router", command, f"http://127.0.0.1:{ports[6]}")
        supervisor.wait_healthy([router], 120.0)
        yield Fleet(supervisor, prefill, decode, router, ports[4:6])


@asynccontextmanager
async def asked(fleet: Fleet, path: str = "/v1/completions", **fields: Any) -> AsyncIterator[Any]:
    """A POST to the router; the open response."""
    body = {"model": MODEL_NAME, "prompt": PROMPT, "max_tokens": 24, "temperature": 0, **fields}
    if path.endswith("chat/completions"):
        del body["prompt"]
    async with (
        aiohttp.ClientSession() as client,
        client.post(fleet.router.url + path, json=body) as response,
    ):
        yield response


async def complete(fleet: Fleet, path: str = "/v1/completions", **fields: Any) -> Any:
    """The JSON of a successful plain answer."""
    async with asked(fleet, path, **fields) as response:
        assert response.status == 200, await response.text()
        return await response.json()


async def get(url: str) -> str:
    """The text at a URL."""
    async with aiohttp.ClientSession() as client, client.get(url) as response:
        return await response.text()


async def becomes(true: Any, seconds: float = 120.0) -> None:
    """Waits until an asynchronous question is answered with yes."""
    end = time.monotonic() + seconds
    while not await true():
        assert time.monotonic() < end
        await asyncio.sleep(0.2)


async def test_plain_and_streamed_answers_are_the_same(fleet: Fleet) -> None:
    plain = await complete(fleet)
    async with asked(fleet, stream=True, stream_options={"include_usage": True}) as response:
        got = [json.loads(e) for e in events(await response.read())[:-1]]
    text = "".join(e["choices"][0]["text"] for e in got if e["choices"])
    assert text == plain["choices"][0]["text"]
    for usage in (plain["usage"], got[-1]["usage"]):
        assert usage["completion_tokens"] == 24
    assert plain["usage"]["prompt_tokens"] == got[-1]["usage"]["prompt_tokens"] > 1


async def test_usage_counts_what_prefill_had_cached(fleet: Fleet) -> None:
    prompt = "Once upon a time there was a router that nobody noticed. " * 6
    usages = [(await complete(fleet, prompt=prompt))["usage"] for _ in range(2)]
    cached = [(u["prompt_tokens_details"] or {}).get("cached_tokens", 0) for u in usages]
    # Nothing was cached at first, though the decode worker fetched nearly all of its KV.
    assert cached[0] == 0
    assert 0 < cached[1] < usages[1]["prompt_tokens"]
    text = await get(fleet.router.url + "/metrics")
    assert f'prompt_tokens_total{{kind="cached"}} {cached[1]}.0' in text


async def test_decisions_are_made_by_marginal_cost_on_signatures(fleet: Fleet) -> None:
    await complete(fleet)
    row = json.loads(await get(fleet.router.url + "/eldr/decisions?limit=1"))["decisions"][0]
    assert (row["policy"], row["branch"], row["coverage"]) == ("marginal_cost", "marginal", 1.0)


async def test_several_choices(fleet: Fleet) -> None:
    answer = await complete(fleet, n=2, temperature=1.0)
    assert [choice["index"] for choice in answer["choices"]] == [0, 1]
    async with asked(fleet, n=2, temperature=1.0, stream=True) as response:
        got = [json.loads(e) for e in events(await response.read())[:-1]]
    assert {e["choices"][0]["index"] for e in got if e["choices"]} == {0, 1}


async def test_log_probabilities(fleet: Fleet) -> None:
    answer = await complete(fleet, logprobs=2)
    logprobs = answer["choices"][0]["logprobs"]
    assert len(logprobs["tokens"]) == len(logprobs["top_logprobs"]) == 24


async def test_wrong_requests_get_the_engines_own_words(fleet: Fleet) -> None:
    async with asked(fleet, model="nobody") as response:
        assert response.status == 404
        assert "nobody" in (await response.json())["error"]["message"]
    async with asked(fleet, temperature=-1.0) as response:
        assert response.status == 400
        assert (await response.json())["error"]["message"]


async def test_client_that_leaves_ends_its_request_everywhere(fleet: Fleet) -> None:
    async with asked(fleet, stream=True, max_tokens=400, ignore_eos=True) as response:
        await response.content.readany()
        worker = response.headers["x-eldr-decode-worker"]

    async def idle() -> bool:
        text = await get(worker + "/metrics")
        running = re.findall(r"^vllm:num_requests_running\S* (\S+)$", text, re.MULTILINE)
        rows = json.loads(await get(fleet.router.url + "/workers"))["decode"]
        return {float(x) for x in running} == {0.0} and not any(r["requests"] for r in rows)

    await becomes(idle)


async def test_decode_worker_that_dies_and_returns(fleet: Fleet) -> None:
    async with asked(fleet, stream=True, max_tokens=400, ignore_eos=True) as response:
        first = await response.content.readany()
        worker = response.headers["x-eldr-decode-worker"]
        index = [d.url for d in fleet.decode].index(worker)
        fleet.kill(fleet.decode[index])
        got = events(first + await response.read())
    assert "broke off" in json.loads(got[-2])["error"]["message"]
    assert got[-1] == b"[DONE]"
    for _ in range(4):  # the other one serves
        await complete(fleet)
    await asyncio.to_thread(fleet.restart, index)

    async def noticed() -> bool:
        text = await get(fleet.router.url + "/metrics")
        return 'worker_events_total{event="restarted",role="decode"} 1.0' in text

    await becomes(noticed)

    # The other one is drained, so the one that returned must carry requests again.
    other = {"name": fleet.decode[1 - index].url}

    async def drain(draining: str) -> None:
        url, query = fleet.router.url + "/workers/drain", {**other, "draining": draining}
        async with aiohttp.ClientSession() as client, client.post(url, params=query) as response:
            assert response.status == 200, await response.text()

    async def carries() -> bool:
        async with asked(fleet) as response:
            await response.read()
            by = response.headers.get("x-eldr-decode-worker")
            return response.status == 200 and by == fleet.decode[index].url

    await drain("true")
    await becomes(carries)
    await drain("false")


async def test_without_its_prefill_worker_requests_fail_soon_and_in_json(fleet: Fleet) -> None:
    fleet.kill(fleet.prefill)
    started = time.monotonic()
    async with asked(fleet) as response:
        assert response.status == 503
        assert (await response.json())["error"]["type"] == "prefill_connect"
    assert time.monotonic() - started < 30
