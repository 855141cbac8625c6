"""The mock workers of `router_mocks` as an engine of `eldr.serving.ray`, with the same answers."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from typing import Any

from benchmarks.router_mocks import DECODE, INFO, MODELS, PARTS, PREFILL


def _body(answer: bytes) -> bytes:
    """The body of a canned HTTP answer."""
    return answer.partition(b"\r\n\r\n")[2]


def _event(chunk: bytes) -> bytes:
    """The data of one chunk of a chunked body."""
    return chunk.partition(b"\r\n")[2].removesuffix(b"\r\n")


_EVENTS = [_event(part) for part in PARTS] + [b"data: [DONE]\n\n"]
_INFO, _MODELS, _PREFILL, _DECODE = map(_body, (INFO, MODELS, PREFILL, DECODE))


@asynccontextmanager
async def open_application(options: Mapping[str, Any], host: str) -> AsyncIterator[Any]:
    """An engine of the role that the options name; `pause`: seconds after each event."""
    role, pause = options["additional-config"]["eldr"]["role"], options["pause"]

    async def application(scope: Any, receive: Any, send: Any) -> None:
        body = (await receive())["body"]
        if scope["path"] in ("/eldr/info", "/health", "/v1/models"):
            known = {"/eldr/info": _INFO}
            await _whole(send, known.get(scope["path"], _MODELS))
        elif scope["path"] == "/eldr/decode":
            await _whole(send, b"{}", 404)
        elif role == "prefill":
            await _whole(send, _PREFILL)
        elif b'"stream":true' not in body.replace(b" ", b""):
            await _whole(send, _DECODE)
        else:
            await _start(send, 200, b"text/event-stream")
            for event in _EVENTS:
                await send({"type": "http.response.body", "body": event, "more_body": True})
                await asyncio.sleep(pause)
            await send({"type": "http.response.body", "body": b"", "more_body": False})

    yield application


async def _start(send: Any, status: int, kind: bytes) -> None:
    headers = [(b"content-type", kind)]
    await send({"type": "http.response.start", "status": status, "headers": headers})


async def _whole(send: Any, body: bytes, status: int = 200) -> None:
    await _start(send, status, b"application/json")
    await send({"type": "http.response.body", "body": body, "more_body": False})
