"""A prefill or decode worker on raw asyncio streams, with faults at every place that matters."""

from __future__ import annotations

import asyncio
import json
import ssl
from collections import deque
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from eldr.geometry import Geometry
from eldr.signature import Signature, encode

FOREVER = 3600.0


@dataclass
class Plan:
    """How one request is answered.

    Attributes:
        status: HTTP status; anything but 200 sends `body` or an error object.
        body: replaces the generated body.
        headers: extra answer headers.
        wait: seconds before the first byte; FOREVER = hang.
        gate: the answer's first byte waits for it.
        reset: drops the connection with RST: "request" (before reading it), "answer" (before the
            first byte), or the number of events after which it happens.
        fin: closes the connection properly after that many events, mid-body.
        clean_end: ends the stream properly after that many events, without [DONE].
        stall: hangs after that many events.
        events: events before [DONE].
        piece: sends the body in pieces of so many bytes.
        pause: seconds between events.
        raw: sent instead of an HTTP answer; then the connection closes.
        error_event: the stream's only event is this error object.
    """

    status: int = 200
    body: bytes | None = None
    headers: dict[str, str] = field(default_factory=dict)
    wait: float = 0.0
    gate: asyncio.Event | None = None
    reset: str | int | None = None
    fin: int | None = None
    clean_end: int | None = None
    stall: int | None = None
    events: int = 4
    piece: int = 0
    pause: float = 0.0
    raw: bytes | None = None
    error_event: dict[str, Any] | None = None


@dataclass
class Seen:
    """A request as the worker saw it."""

    method: str
    path: str
    headers: dict[str, str]
    raw: bytes

    @property
    def body(self) -> dict[str, Any]:
        return json.loads(self.raw)


class MockWorker:
    """One worker.

    Attributes:
        plans: answers of the next requests; then `plan` holds.
        seen: POST requests in order of arrival.
        active: requests that are being answered now.
        aborted: requests whose client went before the end.
        engine_id: changes with every (re)start, like NIXL's.
        count: POST requests so far.
        metrics: body of /metrics, or who makes it; without it there is no such route.
        counters: what /eldr/decode says, likewise.
        models_gate: answers of /v1/models wait for it.
        keep_seen: whether `seen` grows; long runs leave it out.
    """

    def __init__(
        self,
        role: str,
        *,
        geometry: Geometry | None = None,
        info: dict[str, Any] | None = None,
        tls: ssl.SSLContext | None = None,
    ) -> None:
        self.role = role
        self.geometry = geometry
        self.info = info
        self._tls = tls
        self.plan = Plan()
        self.plans: deque[Plan] = deque()
        self.seen: list[Seen] = []
        self.gets: list[str] = []
        self.count = 0
        self.keep_seen = True
        self.active = 0
        self.aborted = 0
        self.healthy = True
        self.starts = 0
        self.expert = 0
        self.port = 0
        self.mutate_kv: dict[str, Any] = {}
        self.mutate_signature: dict[str, Any] = {}
        self.no_kv = False
        self.metrics: str | Callable[[], str] | None = None
        self.counters: dict[str, Any] | None = None
        self.models_gate: asyncio.Event | None = None
        self._server: asyncio.Server | None = None
        self._tasks: set[asyncio.Task[None]] = set()

    @property
    def url(self) -> str:
        return f"{'https' if self._tls else 'http'}://127.0.0.1:{self.port}"

    @property
    def engine_id(self) -> str:
        return f"engine-{self.port}-{self.starts}"

    async def start(self) -> None:
        """Listens, on the same port as before if there was one."""
        self.starts += 1
        self._server = await asyncio.start_server(
            self._accept, "127.0.0.1", self.port, backlog=2048, limit=2**26, ssl=self._tls
        )
        self.port = self._server.sockets[0].getsockname()[1]

    async def kill(self) -> None:
        """Stops listening and resets every connection, as the death of the process does."""
        assert self._server is not None
        self._server.close()
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self._server = None

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        try:
            while await self._one(reader, writer):
                pass
        except (ConnectionError, asyncio.IncompleteReadError, asyncio.CancelledError):
            pass  # the client went, or the worker is killed
        finally:
            self._tasks.discard(task)
            writer.transport.abort()

    async def _one(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bool:
        head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1")
        first, *lines = head.split("\r\n")
        method, path, _ = first.split(" ", 2)
        headers = {k.lower(): v.strip() for k, _, v in (x.partition(":") for x in lines) if k}
        raw = await reader.readexactly(int(headers.get("content-length", "0")))
        if method == "GET":
            if self.keep_seen:
                self.gets.append(path)
            return await self._get(path, writer)
        seen = Seen(method, path, headers, raw)
        self.count += 1
        if self.keep_seen:
            self.seen.append(seen)
        plan = self.plans.popleft() if self.plans else self.plan
        self.active += 1
        watch = asyncio.ensure_future(reader.read(1))  # resolves when the client goes away
        answer = asyncio.ensure_future(self._answer(plan, seen, writer))
        try:
            await asyncio.wait((watch, answer), return_when=asyncio.FIRST_COMPLETED)
            if not answer.done():
                self.aborted += 1
                return False
            return await answer
        finally:
            self.active -= 1
            for task in (watch, answer):
                task.cancel()
            await asyncio.gather(watch, answer, return_exceptions=True)

    async def _get(self, path: str, writer: asyncio.StreamWriter) -> bool:
        if path == "/health":
            _write(writer, 200 if self.healthy else 503, b"")
        elif path == "/v1/models":
            if self.models_gate is not None:
                await self.models_gate.wait()
            _write(writer, 200, b'{"object":"list","data":[{"id":"m","object":"model"}]}')
        elif path == "/eldr/info" and (self.info is not None or self.geometry is not None):
            _write(writer, 200, json.dumps(self.info or self._info()).encode())
        elif path == "/metrics" and self.metrics is not None:
            text = self.metrics if isinstance(self.metrics, str) else self.metrics()
            _write(writer, 200, text.encode())
        elif path == "/eldr/decode" and self.counters is not None:
            _write(writer, 200, json.dumps(self.counters).encode())
        else:
            _write(writer, 404, b'{"detail":"Not Found"}')
        await writer.drain()
        return True

    def _info(self) -> dict[str, Any]:
        g = self.geometry
        assert g is not None
        shape = {"layers": g.layers, "experts": g.experts, "top_k": g.top_k, "digest": g.digest}
        return {
            "v": 1,
            "role": self.role,
            "model": "m",
            "vllm": "0.32.0",
            "series": "1",
            "geometry": shape,
            "block_size": 16,
            "histogram_bytes": 0,
        }

    async def _answer(self, plan: Plan, seen: Seen, writer: asyncio.StreamWriter) -> bool:
        if plan.reset in ("request", "answer"):
            return False
        if plan.wait:
            await asyncio.sleep(plan.wait)
        if plan.gate is not None:
            await plan.gate.wait()
        if plan.raw is not None:
            writer.write(plan.raw)
            await writer.drain()
            writer.close()
            return False
        if plan.status != 200:
            error = {
                "error": {"message": f"status {plan.status}", "type": "E", "code": plan.status}
            }
            body = plan.body if plan.body is not None else json.dumps(error).encode()
            _write(writer, plan.status, body, plan.headers)
            await writer.drain()
            return True
        if self.role == "prefill":
            body = plan.body if plan.body is not None else self._prefill_body(seen)
            await self._whole(plan, body, writer)
            return plan.reset is None
        if seen.body.get("stream"):
            return await self._stream(plan, seen, writer)
        body = plan.body if plan.body is not None else _completion(seen)
        await self._whole(plan, body, writer)
        return plan.reset is None

    async def _whole(self, plan: Plan, body: bytes, writer: asyncio.StreamWriter) -> None:
        head = _head(200, {"Content-Type": "application/json", **plan.headers}, len(body))
        if plan.reset is not None or plan.fin is not None:
            writer.write(head + body[: len(body) // 2])
            await writer.drain()
            if plan.fin is not None:
                writer.close()
            raise ConnectionResetError
        await self._pieces(plan, head + body, writer)

    async def _pieces(self, plan: Plan, data: bytes, writer: asyncio.StreamWriter) -> None:
        step = plan.piece or len(data)
        for i in range(0, len(data), max(step, 1)):
            writer.write(data[i : i + step])
            await writer.drain()
            if plan.piece:
                await asyncio.sleep(0)

    async def _stream(self, plan: Plan, seen: Seen, writer: asyncio.StreamWriter) -> bool:
        head = {"Content-Type": "text/event-stream; charset=utf-8", **plan.headers}
        writer.write(_head(200, head, None))
        for i in range(plan.events):
            if plan.stall == i:
                await asyncio.sleep(FOREVER)
            if plan.reset == i:
                return False
            if plan.fin == i:
                writer.close()
                return False
            if plan.clean_end == i:
                writer.write(b"0\r\n\r\n")
                await writer.drain()
                return True
            event = plan.error_event if plan.error_event is not None else _event(seen, i)
            await self._pieces(
                plan, _chunk(b"data: " + json.dumps(event).encode() + b"\n\n"), writer
            )
            if plan.pause:
                await asyncio.sleep(plan.pause)
        await self._pieces(plan, _chunk(b"data: [DONE]\n\n") + b"0\r\n\r\n", writer)
        return True

    def _prefill_body(self, seen: Seen) -> bytes:
        tokens = max(1, len(seen.raw) // 8)
        kv: dict[str, Any] | None = None
        if not self.no_kv:
            kv = {
                "do_remote_prefill": True,
                "do_remote_decode": False,
                "remote_block_ids": [[1, 2, 3]],
                "remote_engine_id": self.engine_id,
                "remote_request_id": f"r{self.count}",
                "remote_host": "127.0.0.1",
                "remote_port": 5600,
                "tp_size": 1,
                "odd": 1.10,
                **self.mutate_kv,
            }
            if self.geometry is not None:
                kv["eldr"] = {**self._signature(tokens), **self.mutate_signature}
        answer = {
            "id": "x",
            "choices": [{"index": 0, "text": "t", "finish_reason": "length"}],
            "usage": {"prompt_tokens": tokens, "completion_tokens": 1, "total_tokens": tokens + 1},
            "kv_transfer_params": kv,
        }
        return json.dumps(answer).encode()

    def _signature(self, tokens: int) -> dict[str, Any]:
        """All hits on `top_k` experts that start at `expert`."""
        g = self.geometry
        assert g is not None
        counts = np.zeros((g.layers, g.experts), np.uint32)
        for k in range(g.top_k):
            counts[:, (self.expert + k) % g.experts] = tokens
        return encode(Signature(counts, tokens, 1.0), g)


def _event(seen: Seen, i: int) -> dict[str, Any]:
    if seen.path.endswith("chat/completions"):
        delta = {"index": 0, "delta": {"content": f" t{i}"}, "finish_reason": None}
        return {"id": "x", "object": "chat.completion.chunk", "choices": [delta]}
    choice = {"index": 0, "text": f" t{i}", "finish_reason": None}
    return {"id": "x", "object": "text_completion", "choices": [choice]}


def _completion(seen: Seen) -> bytes:
    usage = {"prompt_tokens": 8, "completion_tokens": 4, "total_tokens": 12}
    choices = [
        {"index": i, "text": " t", "finish_reason": "length"}
        for i in range(seen.body.get("n") or 1)
    ]
    return json.dumps({"id": "x", "choices": choices, "usage": usage}).encode()


def _head(status: int, headers: dict[str, str], length: int | None) -> bytes:
    framing = "Transfer-Encoding: chunked" if length is None else f"Content-Length: {length}"
    lines = [f"HTTP/1.1 {status} X", framing, *(f"{k}: {v}" for k, v in headers.items())]
    return ("\r\n".join(lines) + "\r\n\r\n").encode()


def _write(
    writer: asyncio.StreamWriter, status: int, body: bytes, headers: dict[str, str] | None = None
) -> None:
    head = {"Content-Type": "application/json", **(headers or {})}
    writer.write(_head(status, head, len(body)) + body)


def _chunk(data: bytes) -> bytes:
    return b"%x\r\n%b\r\n" % (len(data), data)


@asynccontextmanager
async def workers(*mocks: MockWorker) -> AsyncIterator[None]:
    """Starts the mocks and stops them."""
    for mock in mocks:
        await mock.start()
    try:
        yield
    finally:
        for mock in mocks:
            if mock._server is not None:
                await mock.kill()
