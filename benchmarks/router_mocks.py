"""Fast mock workers for benchmarks/router.py: canned answers on raw protocols, many ports at once.

    python -m benchmarks.router_mocks PAUSE PORT:ROLE...

PAUSE is the time between events, ROLE is prefill or decode. Prefill answers carry a NIXL-like
handle and a signature of the shape of Qwen3-30B-A3B; decode answers are plain JSON, or 16 events
when the request streams.
"""

from __future__ import annotations

import asyncio
import json
import sys

import numpy as np
import uvloop

from eldr.geometry import Geometry
from eldr.signature import Signature, encode

GEOMETRY = Geometry(48, 128, 8)
EVENTS = 16
_TOKENS = 512


def _answer(body: bytes, status: bytes = b"200 OK") -> bytes:
    head = b"HTTP/1.1 %b\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n"
    return head % (status, len(body)) + body


def _prefill() -> bytes:
    rng = np.random.default_rng(0)
    popularity = rng.dirichlet(np.full(GEOMETRY.experts, 0.3), GEOMETRY.layers)
    counts = np.minimum(rng.poisson(popularity * _TOKENS * GEOMETRY.top_k), _TOKENS)
    over = counts.sum(axis=1, keepdims=True) / (_TOKENS * GEOMETRY.top_k)
    counts = (counts / np.maximum(over, 1.0)).astype(np.uint32)
    handle = {
        "do_remote_prefill": True,
        "do_remote_decode": False,
        "remote_block_ids": [list(range(32))],
        "remote_engine_id": "3f0c7c5e-5a39-4d0c-9d2b-0c1d6c1f7a11",
        "remote_request_id": "cmpl-x-0-1",
        "remote_host": "127.0.0.1",
        "remote_port": 5600,
        "tp_size": 1,
        "eldr": encode(Signature(counts, _TOKENS), GEOMETRY),
    }
    choice = {"index": 0, "text": "t", "finish_reason": "length"}
    usage = {"prompt_tokens": _TOKENS, "completion_tokens": 1, "total_tokens": _TOKENS + 1}
    answer = {"id": "x", "choices": [choice], "usage": usage, "kv_transfer_params": handle}
    return _answer(json.dumps(answer).encode())


def _chunk(data: bytes) -> bytes:
    return b"%x\r\n%b\r\n" % (len(data), data)


def _event(i: int) -> bytes:
    delta = {"index": 0, "delta": {"content": f" token{i}"}, "finish_reason": None}
    event = {"id": "x", "object": "chat.completion.chunk", "model": "m", "choices": [delta]}
    return _chunk(b"data: " + json.dumps(event).encode() + b"\n\n")


PREFILL = _prefill()
DECODE = _answer(
    json.dumps(
        {
            "id": "x",
            "choices": [
                {"index": 0, "message": {"role": "assistant", "content": " token" * EVENTS}}
            ],
            "usage": {"prompt_tokens": _TOKENS, "completion_tokens": EVENTS, "total_tokens": 528},
        }
    ).encode()
)
STREAM = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"
PARTS = [_event(i) for i in range(EVENTS)]
END = _chunk(b"data: [DONE]\n\n") + b"0\r\n\r\n"
_SHAPE = {"layers": GEOMETRY.layers, "experts": GEOMETRY.experts, "top_k": GEOMETRY.top_k}
INFO = _answer(json.dumps({"v": 1, "role": "prefill", "model": "m", "geometry": _SHAPE}).encode())
MODELS = _answer(b'{"object":"list","data":[{"id":"m","object":"model"}]}')
NOTHING = _answer(b"{}", b"404 Not Found")


class Worker(asyncio.Protocol):
    """One connection; requests come one after the other."""

    def __init__(self, role: str, pause: float) -> None:
        self._role, self._pause = role, pause
        self._buffer = b""
        self._transport: asyncio.Transport | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        self._transport = transport

    def connection_lost(self, error: Exception | None) -> None:
        self._transport = None

    def data_received(self, data: bytes) -> None:
        self._buffer += data
        end = self._buffer.find(b"\r\n\r\n")
        if end < 0:
            return
        head = self._buffer[:end].lower()
        at = head.find(b"content-length:")
        length = int(head[at + 15 :].split(b"\r\n", 1)[0]) if at >= 0 else 0
        if len(self._buffer) < end + 4 + length:
            return
        body = self._buffer[end + 4 : end + 4 + length]
        self._buffer = self._buffer[end + 4 + length :]
        self._reply(head, body)

    def _reply(self, head: bytes, body: bytes) -> None:
        assert self._transport is not None
        if head.startswith(b"get"):
            path = head.split(b" ", 2)[1]
            info = INFO if self._role == "prefill" else NOTHING
            known = {b"/eldr/info": info, b"/v1/models": MODELS, b"/health": MODELS}
            self._transport.write(known.get(path, NOTHING))
        elif self._role == "prefill":
            self._transport.write(PREFILL)
        elif b'"stream":true' not in body.replace(b" ", b""):
            self._transport.write(DECODE)
        else:
            self._task = asyncio.ensure_future(self._stream())

    async def _stream(self) -> None:
        for part in (STREAM, *PARTS):
            if self._transport is None:
                return
            self._transport.write(part)
            await asyncio.sleep(self._pause)
        if self._transport is not None:
            self._transport.write(END)


async def main() -> None:
    """Serves until killed."""
    pause, loop = float(sys.argv[1]), asyncio.get_running_loop()
    for pair in sys.argv[2:]:
        port, role = pair.split(":")
        await loop.create_server(
            lambda role=role: Worker(role, pause), "127.0.0.1", int(port), backlog=4096
        )
    print("ready", flush=True)
    await asyncio.Event().wait()


if __name__ == "__main__":
    uvloop.run(main())
