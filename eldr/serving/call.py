"""One client call while it is being served: its body, identity and what the legs need of it."""

from __future__ import annotations

import uuid
from dataclasses import dataclass, field

from aiohttp import web
from multidict import CIMultiDict

from eldr.serving.bodies import Body
from eldr.serving.prefill_pool import PREFIX_BYTES

REQUEST_ID = "X-Request-Id"
# Of the client's headers, these reach the workers; none of them can pick a worker or a file.
FORWARDED = (
    REQUEST_ID,
    "traceparent",
    "tracestate",
    "baggage",
    "X-Session-ID",
    "X-User-ID",
    "X-Tenant-ID",
    "X-Correlation-ID",
)


@dataclass(slots=True)
class Call:
    """A parsed request on its way through both legs.

    Attributes:
        request: the client's side.
        path: API path, the same on both legs.
        request_id: the client's X-Request-Id, or a fresh one.
        headers: headers of both legs.
        prefix: first bytes of the prompt, for prefill affinity.
        attempts: tries so far, both legs together.
    """

    request: web.BaseRequest
    path: str
    body: Body
    request_id: str
    headers: CIMultiDict[str]
    prefix: bytes
    attempts: int = 0
    prefill_worker: str = ""
    timings: dict[str, float] = field(default_factory=dict)


def open_call(request: web.BaseRequest, path: str, body: Body) -> Call:
    """Collects what both legs need from the client's request."""
    request_id = request.headers.get(REQUEST_ID) or uuid.uuid4().hex
    headers: CIMultiDict[str] = CIMultiDict()
    headers["Content-Type"] = "application/json"
    headers[REQUEST_ID] = request_id
    for name in FORWARDED[1:]:
        value = request.headers.get(name)
        if value is not None:
            headers[name] = value
    prompt = body.fields.get("messages" if body.chat else "prompt", b"")
    prefix = bytes(memoryview(prompt)[:PREFIX_BYTES])
    return Call(request, path, body, request_id, headers, prefix)
