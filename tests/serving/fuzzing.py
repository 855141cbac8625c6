"""Generated requests and worker answers, and what must hold for each of them.

Used by test_fuzz in small and by benchmarks/fuzz.py in large.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import msgspec
from hypothesis import HealthCheck, example, given, seed, settings
from hypothesis import strategies as st

from eldr.geometry import Geometry
from eldr.serving.answers import MalformedAnswer, PushConnector, parse_prefill
from eldr.serving.bodies import parse, unsplittable
from eldr.serving.errors import ClientError
from eldr.serving.security import Keys, refuse_media_urls
from tests.serving.mocks.worker import MockWorker, Plan
from tests.serving.rig import rig
from tests.serving.wire import HEADS, REQUESTS, WIRE, bytes_of_a_client, bytes_on_the_wire

_scalars = st.one_of(
    st.none(), st.booleans(), st.integers(), st.floats(allow_nan=False), st.text(max_size=12)
)
_json = st.recursive(
    _scalars,
    lambda inner: st.one_of(
        st.lists(inner, max_size=4), st.dictionaries(st.text(max_size=8), inner, max_size=4)
    ),
    max_leaves=12,
)
_FIELDS = (
    *("model", "prompt", "messages", "stream", "max_tokens", "min_tokens", "n", "best_of", "echo"),
    *("logprobs", "prompt_logprobs", "use_beam_search", "stream_options", "kv_transfer_params"),
    *("max_completion_tokens", "response_format", "tools", "image_url", "eldr"),
)
_bodies = st.dictionaries(st.one_of(st.sampled_from(_FIELDS), st.text(max_size=6)), _json)
_mangled = st.one_of(
    st.binary(max_size=200),
    _json.map(lambda v: json.dumps(v).encode()),
    _bodies.map(lambda v: json.dumps(v).encode()),
    st.tuples(_bodies, st.integers(0, 200), st.binary(max_size=4)).map(
        lambda t: (raw := json.dumps(t[0]).encode())[: t[1]] + t[2] + raw[t[1] :]
    ),
)


def request_body(raw: bytes, chat: bool) -> None:
    """Parsed, or refused with a JSON error; what is parsed reaches decode byte for byte."""
    refused = None
    try:
        body = parse(raw, chat=chat)
        refuse_media_urls(body)
        unsplittable(body)
    except ClientError as error:
        refused = error
    if refused is not None:
        assert 400 <= refused.status < 500
        json.loads(refused.body)
        return
    prefill = msgspec.json.decode(body.prefill())
    assert prefill["max_tokens"] == 1
    assert prefill["stream"] is False
    sent = body.decode(b'{"do_remote_prefill":true}')
    decoded = msgspec.json.decode(sent, type=dict[str, msgspec.Raw])
    assert bytes(decoded.pop("kv_transfer_params")) == b'{"do_remote_prefill":true}'
    assert {k: bytes(v) for k, v in decoded.items()} == {
        k: bytes(v) for k, v in body.fields.items()
    }


_kv = st.one_of(
    _json,
    st.dictionaries(
        st.sampled_from(["eldr", "transfer_mode", "remote_engine_id", "do_remote_prefill", "x"]),
        _json,
    ),
)
_answers = st.one_of(
    _mangled,
    st.fixed_dictionaries(
        {}, optional={"kv_transfer_params": _kv, "usage": _json, "id": _json}
    ).map(lambda v: json.dumps(v).encode()),
)


def prefill_answer(raw: bytes) -> None:
    """Read, or refused; a handle that is passed on holds no signature."""
    try:
        prefilled = parse_prefill(raw)
    except (MalformedAnswer, PushConnector):
        return
    if prefilled.kv is not None:
        assert "eldr" not in msgspec.json.decode(prefilled.kv)
    assert prefilled.prompt_tokens >= 0


def authorization(header: str | None) -> None:
    """Accepted or refused with 401."""
    right = header is not None and header.lower().startswith("bearer ")
    right = right and header is not None and header[7:].strip() == "right"
    status = 200
    try:
        Keys(["right"]).check(header)
    except ClientError as error:
        status = error.status
    assert status == (200 if right else 401)


async def through_a_router(number: int, cases: int) -> None:
    """So many requests and answers at random, end to end; every answer is well formed.

    Args:
        number: seeds the random numbers.
        cases: requests.
    """
    rng = random.Random(number)
    prefill = MockWorker("prefill", geometry=Geometry(2, 8, 2))
    options: dict[str, Any] = {"slow_start": 0.0, "eject_seconds": 0.01, "health_interval": 60.0}
    async with rig([prefill], 1, policy="marginal_cost", attempts=1, **options) as r:
        for _ in range(cases):
            prefill.mutate_signature = _some_signature(rng)
            prefill.plan = rng.choice([Plan(), Plan(), Plan(body=_noise(rng)), _fault(rng)])
            r.decode[0].plan = rng.choice([Plan(), Plan(), Plan(body=_noise(rng)), _fault(rng)])
            raw = _noise(rng)
            path = rng.choice(["/v1/completions", "/v1/chat/completions"])
            async with r.client.post(r.url + path, data=raw) as response:
                body = await response.read()
                assert response.status in _STATUSES, raw
                if response.content_type == "text/event-stream":
                    assert body.endswith(b"data: [DONE]\n\n"), body
                elif response.status != 200:
                    assert "error" in json.loads(body)
        ended = r.router.metrics.requests.counts
        assert sum(ended.values()) >= cases
        assert not [labels for labels, n in ended.items() if "router_error" in labels and n]


_STATUSES = (200, 400, 404, 429, 500, 502, 503, 504)


def _fault(rng: random.Random) -> Plan:
    """A worker's answer that is not what was asked for."""
    return rng.choice(
        [
            Plan(raw=rng.randbytes(rng.randrange(60))),
            Plan(raw=b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n" + rng.randbytes(30)),
            Plan(status=rng.choice(_STATUSES[1:])),
            Plan(reset=rng.choice(["answer", 1, 2])),
            Plan(fin=rng.randrange(4)),
            Plan(clean_end=rng.randrange(4)),
            Plan(piece=rng.randrange(1, 40)),
            Plan(error_event={"error": rng.choice([None, {}, "x", {"code": 500}])}),
        ]
    )


def _some_signature(rng: random.Random) -> dict[str, Any]:
    field = rng.choice(["v", "geometry", "tokens", "coverage", "counts"])
    value = rng.choice(
        [None, -1, 0, 1, 2**40, "x", [], {}, 0.5, {"encoding": "u8", "data": "AA=="}]
    )
    return rng.choice([{}, {field: value}])


def _noise(rng: random.Random) -> bytes:
    fields = {
        rng.choice(_FIELDS): rng.choice([None, 1, "x", [], ["a"], {}, True, 1.5]) for _ in range(4)
    }
    raw = json.dumps({"prompt": "p", "messages": [{"role": "user"}], **fields}).encode()
    cut = rng.randrange(len(raw))
    return rng.choice([raw, raw, raw[:cut], raw[:cut] + b"\x00" + raw[cut:], b""])


@dataclass(frozen=True)
class Property:
    """Something that must hold for every generated case.

    Attributes:
        weight: its share of the cases.
        strategies: of the arguments.
        examples: cases that were wrong once.
    """

    check: Callable[..., None]
    weight: int
    strategies: tuple[st.SearchStrategy[Any], ...]
    examples: tuple[tuple[Any, ...], ...] = ()


PROPERTIES = (
    Property(
        request_body,
        6,
        (_mangled, st.booleans()),
        (
            (b'{"prompt":"\\ud800"}', False),
            (b'{"messages":[{"a_url":{"url":"http:"}}]}', True),
            (b'{"prompt":["aaaaaaaaaa",3]}', False),
            (b'{"messages":' + b"[" * 900 + b'{"a_url":"x"}' + b"]" * 900 + b"}", True),
        ),
    ),
    Property(prefill_answer, 6, (_answers,)),
    Property(bytes_of_a_client, 4, (REQUESTS, st.integers(1, 64), st.booleans())),
    Property(bytes_on_the_wire, 6, (HEADS, WIRE, st.integers(1, 64), st.booleans())),
    Property(
        authorization,
        1,
        (
            st.one_of(
                st.none(),
                st.text(max_size=30),
                st.sampled_from(["Bearer right", "bearer right "]),
            ),
        ),
    ),
)


def run(prop: Property, cases: int, number: int) -> int:
    """Checks so many cases; returns how many there were, examples included.

    Args:
        prop: what must hold.
        cases: to generate.
        number: seeds the generator; the same number gives the same cases.
    """
    done = 0

    def counted(*args: Any) -> None:
        nonlocal done
        done += 1
        prop.check(*args)

    # Names, since hypothesis binds positional strategies from the right.
    checked = given(*prop.strategies)(_named(counted, len(prop.strategies)))
    for case in prop.examples:
        checked = example(*case)(checked)
    limits = settings(
        max_examples=cases,
        deadline=None,
        suppress_health_check=list(HealthCheck),
        database=None,
    )
    seed(number)(limits(checked))()
    return done


def _named(check: Callable[..., None], arguments: int) -> Callable[..., None]:
    """`check` with so many named arguments, which hypothesis asks for."""
    if arguments == 1:
        return lambda a: check(a)
    if arguments == 2:
        return lambda a, b: check(a, b)
    if arguments == 3:
        return lambda a, b, c: check(a, b, c)
    return lambda a, b, c, d: check(a, b, c, d)
