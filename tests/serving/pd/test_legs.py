"""Both legs over pools that fail on purpose: what is repeated, what reaches the client."""

import asyncio
import json
from collections import deque
from dataclasses import dataclass, field

import pytest

from eldr.serving.bodies import parse
from eldr.serving.errors import ClientError
from eldr.serving.http1 import UpstreamError
from eldr.serving.pd.decider import Decider, Replica
from eldr.serving.pd.legs import Call, Legs
from eldr.serving.pd.options import RequestOptions, RoutingOptions
from eldr.serving.pd.route import Head
from eldr.serving.upstream import Answer
from tests.serving.ray.engine import GEOMETRY

JSON = [("content-type", "application/json")]
EVENTS = [("content-type", "text/event-stream")]
LOST = UpstreamError("reset", True, "the actor died")
DONE = b"data: [DONE]\n\n"
HANG = object()


@dataclass
class Pools:
    """Plays answers; an exception is raised, HANG waits for ever."""

    prefills: deque = field(default_factory=deque)
    decodes: deque = field(default_factory=deque)
    handles: int = 0
    seen: list = field(default_factory=list)

    def __post_init__(self) -> None:
        self.decider = Decider(RoutingOptions(policy="least_requests"))
        self.decider.members([Replica(n, i, GEOMETRY) for i, n in enumerate("abc")])

    async def prefill(self, request_id, leg):
        if self.prefills and (plan := self.prefills.popleft()) is not None:
            if isinstance(plan, Exception):
                raise plan
            return plan
        self.handles += 1
        handle = {"do_remote_prefill": True, "handle": self.handles, "eldr": {"v": 99}}
        body = json.dumps({"kv_transfer_params": handle, "usage": {"prompt_tokens": 3}})
        return Answer(200, [(b"x-eldr-replica", b"p")], body.encode())

    async def decode(self, route, leg):
        body = json.loads(leg.body)
        self.decider.reserve(route, self.decider.fleet.names)
        self.seen.append((route.worker, body.get("kv_transfer_params", {}).get("handle")))
        assert "eldr" not in body.get("kv_transfer_params", {})
        if body["model"] == "eldr-kv-release":
            yield Head(404, JSON)
            return
        for item in self.decodes.popleft():
            if isinstance(item, Exception):
                raise item
            if item is HANG:
                await asyncio.Event().wait()
            yield item


class Client:
    def __init__(self) -> None:
        self.status, self.headers, self.body = 0, {}, b""
        self.started = False

    async def start(self, status, headers) -> None:
        assert not self.status
        self.status, self.headers = status, dict(headers)

    async def write(self, data) -> None:
        self.body += data


def call(**fields) -> Call:
    raw = json.dumps({"model": "m", "prompt": "p", "max_tokens": 4, **fields}).encode()
    return Call("/v1/completions", parse(raw, chat=False), "r", JSON)


def legs(pools: Pools, **options) -> tuple[Legs, list[str]]:
    retries: list[str] = []
    return Legs(pools, RequestOptions(**options), retries.append), retries


async def run(pools: Pools, *, options: dict | None = None, **fields):
    the, retries = legs(pools, **(options or {}))
    client, one = Client(), call(**fields)
    await the.serve(one, client)
    assert pools.decider.fleet.running == 0
    pools.decider.fleet.check_integrity()
    return client, one, retries


def ok(text: bytes = b"{}") -> list:
    return [Head(200, JSON), text]


async def test_plain_and_streamed_answers_pass_unchanged() -> None:
    pools = Pools(decodes=deque([ok(b'{"a":1}'), [Head(200, EVENTS), b"data: 1\n\n", DONE]]))
    client, _, _ = await run(pools)
    assert (client.status, client.body) == (200, b'{"a":1}')
    assert "x-eldr-replica" not in client.headers
    assert client.headers["content-length"] == "7"
    client, one, _ = await run(pools, stream=True)
    assert client.body == b"data: 1\n\n" + DONE
    assert not one.broken


@pytest.mark.parametrize(
    "failure",
    [
        [LOST],
        [Head(200, EVENTS), LOST],
        [Head(200, EVENTS), b'data: {"error": {"message": "KV load failed"}}\n\n'],
        [Head(503, JSON), b"full"],
        [Head(500, JSON), b"no KV"],
    ],
    ids=["died", "died before its first event", "error event", "full", "500"],
)
async def test_until_the_first_byte_another_replica_serves_with_a_new_prefill(failure) -> None:
    pools = Pools(decodes=deque([failure, [Head(200, EVENTS), b"data: 1\n\n", DONE]]))
    client, _, retries = await run(pools, stream=True)
    assert client.body == b"data: 1\n\n" + DONE
    (first, kv), (second, new_kv) = pools.seen
    assert first != second
    assert (kv, new_kv) == (1, 2)  # the first replica may have taken the first KV
    assert retries == ["decode"]


async def test_what_never_left_keeps_its_kv() -> None:
    refused = UpstreamError("connect", False, "Serve takes no request")
    pools = Pools(decodes=deque([[refused], ok()]))
    await run(pools)
    assert [kv for _, kv in pools.seen] == [1, 1]


async def test_after_the_first_byte_a_broken_stream_ends_in_an_error_event() -> None:
    pools = Pools(decodes=deque([[Head(200, EVENTS), b"data: 1\n\n", LOST]]))
    client, one, _ = await run(pools, stream=True)
    assert client.body.startswith(b"data: 1\n\n" + b'data: {"error"')
    assert client.body.endswith(DONE)
    assert one.broken


async def test_a_stream_without_end_mark_is_broken_and_one_that_dies_after_it_is_not() -> None:
    pools = Pools(decodes=deque([[Head(200, EVENTS), b"data: 1\n\n"]]))
    client, one, _ = await run(pools, stream=True)
    assert one.broken
    assert b"without its end mark" in client.body
    pools = Pools(decodes=deque([[Head(200, EVENTS), b"data: 1\n\n", DONE, LOST]]))
    client, one, _ = await run(pools, stream=True)
    assert client.body == b"data: 1\n\n" + DONE
    assert not one.broken


async def test_refusals_reach_the_client_as_they_are() -> None:
    pools = Pools(decodes=deque([[Head(400, JSON), b"bad"]]))
    client, _, retries = await run(pools)
    assert (client.status, client.body, retries) == (400, b"bad", [])
    pools = Pools(prefills=deque([Answer(404, [], b"no model")]))
    client, _, _ = await run(pools)
    assert (client.status, client.body) == (404, b"no model")


async def test_prefill_failures_are_repeated() -> None:
    pools = Pools(prefills=deque([LOST, Answer(503, [], b""), Answer(200, [], b"{")]))
    pools.decodes.append(ok())
    client, _, retries = await run(pools)
    assert client.status == 200
    assert retries == ["prefill"] * 3


async def test_attempts_end_and_the_last_words_are_told() -> None:
    pools = Pools(decodes=deque([[LOST]] * 3))
    the, _ = legs(pools, attempts=3)
    with pytest.raises(ClientError, match="the actor died") as found:
        await the.serve(call(), Client())
    assert found.value.status == 502
    assert len({worker for worker, _ in pools.seen}) == 3
    assert pools.decider.fleet.running == 0


async def test_silence_is_a_failure() -> None:
    pools = Pools(decodes=deque([[HANG], [Head(200, EVENTS), b"data: 1\n\n", HANG]]))
    options = {"first_byte_timeout": 0.05, "idle_timeout": 0.05}
    client, one, _ = await run(pools, options=options, stream=True)
    assert one.broken
    assert b"silent for 0.05 s" in client.body


async def test_a_client_that_leaves_frees_the_reservation() -> None:
    pools = Pools(decodes=deque([[Head(200, EVENTS), b"data: 1\n\n", HANG]]))
    the, _ = legs(pools)
    client = Client()
    task = asyncio.ensure_future(the.serve(call(stream=True), client))
    while not client.body:
        await asyncio.sleep(0)
    assert pools.decider.fleet.running == 1
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert pools.decider.fleet.running == 0


async def test_kv_that_reached_nobody_is_freed() -> None:
    refused = UpstreamError("connect", False, "no replica")
    pools = Pools(decodes=deque([[refused]]))
    the, _ = legs(pools, attempts=1)
    with pytest.raises(ClientError):
        await the.serve(call(), Client())
    await asyncio.gather(*the._releases)
    assert [kv for _, kv in pools.seen] == [1, 1]
    assert pools.decider.fleet.running == 0


async def test_requests_for_which_two_legs_make_no_sense() -> None:
    pools = Pools(decodes=deque([ok(), ok()]))
    await run(pools, prompt=["a", "b"])
    await run(pools, n=2, options={"several_choices": "whole"})
    assert [kv for _, kv in pools.seen] == [None, None]
    the, _ = legs(pools, unsplittable="fail")
    with pytest.raises(ClientError, match="not served"):
        await the.serve(call(prompt_logprobs=1), Client())
