"""Signatures of a real router process: of what it served, and from its prefill workers."""

from __future__ import annotations

import asyncio
import json
import signal
import sys

import aiohttp

from eldr.demo.ports import free_ports
from eldr.geometry import Geometry
from eldr.routing import load_partition, load_recorded
from tests.serving.mocks.worker import MockWorker, workers

GEOMETRY = Geometry(2, 16, 2)
REQUESTS = 24


async def eldr(*arguments: str) -> tuple[int | None, dict[str, object], str]:
    """Exit code, the JSON object on stdout, and stderr."""
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "eldr", *arguments,
        stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE,
    )  # fmt: skip
    out, err = await asyncio.wait_for(process.communicate(), 240)
    return process.returncode, json.loads(out or "{}"), err.decode()


async def test_record_fit_and_assess_what_a_router_served(tmp_path):
    log, out = str(tmp_path / "decisions.jsonl"), str(tmp_path / "served.npz")
    prefill = [MockWorker("prefill", geometry=GEOMETRY) for _ in range(2)]
    decode = [MockWorker("decode") for _ in range(2)]
    async with workers(*prefill, *decode):
        port = free_ports(1)[0]
        url = f"http://127.0.0.1:{port}"
        router = await asyncio.create_subprocess_exec(
            sys.executable, "-m", "eldr", "serve", "--port", str(port),
            "--prefill", *(p.url for p in prefill), "--decode", *(d.url for d in decode),
            "--decision-log", log, "--decision-log-signatures",
            stderr=asyncio.subprocess.PIPE,
        )  # fmt: skip
        assert router.stderr is not None
        try:
            async with asyncio.timeout(60):
                while b"router ready" not in (line := await router.stderr.readline()):
                    assert line, "the router ended"
            async with aiohttp.ClientSession() as client:
                for i in range(REQUESTS):
                    for worker in prefill:
                        worker.expert = 8 * (i % 2)
                    body = {"model": "m", "prompt": "hello" * (i + 9), "max_tokens": 4}
                    async with client.post(f"{url}/v1/completions", json=body) as answer:
                        assert answer.status == 200
            prompts = tmp_path / "prompts.jsonl"
            prompts.write_text("".join(f'{{"prompt": "p{i}"}}\n' for i in range(6)))
            before = [worker.count for worker in prefill]
            code, told, err = await eldr(
                "record", "--router", url, "--prompts", str(prompts), "-o", out, "--json"
            )
            assert (code, told.get("signatures"), told.get("model")) == (0, 6, "m"), err
            assert [w.count - b for w, b in zip(prefill, before, strict=True)] == [3, 3]
            router.send_signal(signal.SIGTERM)
            await asyncio.wait_for(router.wait(), 120)
        finally:
            if router.returncode is None:
                router.kill()
            await router.wait()
    code, told, err = await eldr("record", "--log", log, "-o", out, "--json")
    assert (code, told.get("signatures"), told.get("failed")) == (0, REQUESTS, 0), err
    served = load_recorded(out)
    assert served.geometry == GEOMETRY
    assert served.counts[:, 0].argmax(axis=1).tolist() == [0, 8] * (REQUESTS // 2)
    assert (served.counts.sum(axis=2) == 2 * served.tokens[:, None]).all()
    target = str(tmp_path / "partition")
    code, told, err = await eldr(
        "fit", log, *(f"--worker={d.url}" for d in decode), "-o", target, "--json"
    )
    assert (code, told.get("sizes")) == (0, [REQUESTS // 2] * 2), err
    fitted = load_partition(target, geometry=GEOMETRY, workers=[d.url for d in decode])
    assert sorted(fitted.centroids[:, 0].argmax(axis=1)) == [0, 8]
    code, told, err = await eldr("assess", log, "--workers", "2", "--batch", "4", "--json")
    assert (code, told.get("verdict")) == (3, "needs more data"), err
    assert told["signatures"] == REQUESTS
