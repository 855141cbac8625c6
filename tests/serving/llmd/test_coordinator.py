"""The coordinator against a mock gateway that checks llm-d's protocol call by call."""

import asyncio
import json
from contextlib import asynccontextmanager
from pathlib import Path

import aiohttp
import pytest
from aiohttp.test_utils import TestServer

from eldr.serving.config import ConfigError
from eldr.serving.llmd.config import read_config
from eldr.serving.llmd.server import open_coordinator
from tests.serving.llmd.epp import Endpoint, Pod
from tests.serving.pd.test_decider import partition
from tests.serving.ray.engine import TOPICS, text_of


@pytest.fixture
def file(tmp_path: Path) -> str:
    partition().save(tmp_path / "p.safetensors")
    return str(tmp_path / "p.safetensors")


def pods(per_cluster: int = 1) -> list[Pod]:
    decode = [Pod(f"d{c}-{i}", "decode", str(c)) for c in range(TOPICS) for i in range(per_cluster)]
    return [Pod("p0", "prefill"), *decode]


@asynccontextmanager
async def coordinator(endpoint: Endpoint, file: str, **requests):
    """A client of a coordinator in front of the endpoint."""
    async with TestServer(endpoint.application()) as gateway:
        config = read_config(
            {
                "gateway": str(gateway.make_url("/")),
                "routing": {"policy": "locality_band", "partition": file, "tau": 0.0},
                "requests": {"worker_headers": True, **requests},
            }
        )
        async with (
            open_coordinator(config) as app,
            TestServer(app) as server,
            aiohttp.ClientSession(server.make_url("/")) as client,
        ):
            yield client


async def complete(client, topic: int, word: str = "x", **fields) -> tuple[int, bytes, str]:
    body = {"model": "m", "prompt": f"topic {topic} {word}", "max_tokens": 6, **fields}
    async with client.post("/v1/completions", json=body) as answer:
        return answer.status, await answer.read(), answer.headers.get("x-eldr-decode-worker", "")


async def test_each_request_is_two_calls_with_profiles_and_a_cluster(file) -> None:
    endpoint = Endpoint(pods())
    async with coordinator(endpoint, file) as client:
        for topic in range(TOPICS):
            status, raw, group = await complete(client, topic)
            assert status == 200
            assert json.loads(raw)["choices"][0]["text"].split() == text_of(f"topic {topic} x")
            assert group == str(topic)
    assert endpoint.violations == []
    expected = [[("prefill", "p0", ""), ("decode", f"d{t}-0", str(t))] for t in range(TOPICS)]
    assert endpoint.calls == [call for pair in expected for call in pair]


async def test_streams_and_chat_pass_and_the_picker_balances_inside_a_cluster(file) -> None:
    endpoint = Endpoint(pods(per_cluster=2))
    async with coordinator(endpoint, file) as client:
        jobs = [complete(client, i % TOPICS, f"w{i}", stream=True) for i in range(32)]
        answers = await asyncio.gather(*jobs)
        message = {"role": "user", "content": "topic 2 chat"}
        body = {"model": "m", "messages": [message], "max_tokens": 6}
        async with client.post("/v1/chat/completions", json=body) as answer:
            assert answer.status == 200
    assert all(raw.endswith(b"data: [DONE]\n\n") for _, raw, _ in answers)
    assert endpoint.violations == []
    for pod in endpoint.pods[1:]:
        assert set(pod.served) <= {int(pod.cluster)}
        assert pod.served


async def test_failures_before_the_first_byte_are_repeated_with_a_new_prefill(file) -> None:
    endpoint = Endpoint(pods())
    endpoint.pods[1].fail = 1
    async with coordinator(endpoint, file) as client:
        status, raw, group = await complete(client, 0, stream=True)
        metrics = await (await client.get("/metrics")).text()
    assert (status, group != "0") == (200, True)
    assert raw.endswith(b"data: [DONE]\n\n")
    assert [profile for profile, _, _ in endpoint.calls] == ["prefill", "decode"] * 2
    assert endpoint.violations == []
    assert 'eldr_coordinator_retries_total{leg="decode"} 1.0' in metrics
    assert 'eldr_coordinator_requests_total{outcome="ok"} 1.0' in metrics


async def test_a_stream_that_breaks_off_ends_in_an_error_event(file) -> None:
    endpoint = Endpoint(pods())
    for pod in endpoint.pods[1:]:
        pod.hang_up = 1
    async with coordinator(endpoint, file) as client:
        status, raw, _ = await complete(client, 1, stream=True)
    events = raw.split(b"\n\n")
    assert status == 200
    assert events[0].startswith(b'data: {"choices"')
    assert events[1].startswith(b'data: {"error"')
    assert events[2] == b"data: [DONE]"


async def test_refusals_pass_and_bad_requests_call_nobody(file) -> None:
    endpoint = Endpoint(pods())
    async with coordinator(endpoint, file) as client:
        status, raw, _ = await complete(client, 0, model="other")
        assert (status, b"no such model" in raw) == (404, True)
        status, raw, _ = await complete(client, 0, prompt=None)
        assert (status, b"`prompt` is missing" in raw) == (400, True)
        assert (await client.get("/healthz")).status == 200
    assert [profile for profile, _, _ in endpoint.calls] == ["prefill"]


async def test_no_gateway_is_a_clean_error(file, unused_tcp_port_factory) -> None:
    config = read_config(
        {
            "gateway": f"http://127.0.0.1:{unused_tcp_port_factory()}",
            "routing": {"policy": "locality_band", "partition": file},
            "requests": {"attempts": 2},
        }
    )
    async with (
        open_coordinator(config) as app,
        TestServer(app) as server,
        aiohttp.ClientSession(server.make_url("/")) as client,
    ):
        status, raw, _ = await complete(client, 0)
    assert (status, json.loads(raw)["error"]["type"]) == (503, "prefill_connect")


async def test_the_mock_refuses_calls_that_break_the_protocol() -> None:
    """A test of the test: without it, `violations == []` would prove nothing."""
    endpoint = Endpoint(pods())
    good = {"do_remote_decode": True, "do_remote_prefill": False}
    bad = [
        ({}, {"model": "m", "prompt": "topic 0 x"}),
        ({"EPP-Profile": "prefill"}, {"model": "m", "prompt": "topic 0 x", "max_tokens": 1}),
        (
            {"EPP-Profile": "prefill", "x-eldr-cluster": "1"},
            {"model": "m", "prompt": "topic 0 x", "max_tokens": 1, "kv_transfer_params": good},
        ),
        (
            {"EPP-Profile": "prefill"},
            {"model": "m", "prompt": "topic 0 x", "max_tokens": 9, "kv_transfer_params": good},
        ),
        (
            {"EPP-Profile": "decode", "x-eldr-cluster": "1"},
            {"model": "m", "prompt": "topic 0 x", "kv_transfer_params": {"remote_id": "none"}},
        ),
    ]
    async with (
        TestServer(endpoint.application()) as gateway,
        aiohttp.ClientSession(gateway.make_url("/")) as client,
    ):
        for headers, body in bad:
            async with client.post("/v1/completions", json=body, headers=headers) as answer:
                assert answer.status == 421
    assert len(endpoint.violations) == len(bad)


@pytest.mark.parametrize(
    ("values", "text"),
    [
        ({"gateway": "gateway:80"}, "expected an http"),
        ({"gateway": "http://g", "clustres": 2}, "did you mean clusters"),
        ({"gateway": "http://g"}, "needs clusters and geometry"),
        ({"gateway": "http://g", "routing": {"policy": "x"}}, "no policy 'x'"),
    ],
)
def test_configurations_that_cannot_work_are_refused(values, text) -> None:
    with pytest.raises(ConfigError, match=text):
        read_config(values)
