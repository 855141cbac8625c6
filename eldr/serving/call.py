"""One client call while it is being served: its body, identity and what the legs need of it."""

from __future__ import annotations

import time
import uuid
from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import count
from typing import TYPE_CHECKING, Protocol

from eldr.serving.bodies import Body
from eldr.serving.errors import legible
from eldr.serving.prefill_pool import PREFIX_BYTES
from eldr.serving.relay import Client

if TYPE_CHECKING:
    from eldr.serving.decode_pool import Ticket

REQUEST_ID = "X-Request-Id"
# Of the client's headers, these reach the workers; none of them can pick a worker or a file.
FORWARDED = (
    "traceparent",
    "tracestate",
    "baggage",
    "X-Session-ID",
    "X-User-ID",
    "X-Tenant-ID",
    "X-Correlation-ID",
)
_FORWARDED = tuple((name, name.lower()) for name in FORWARDED)
# Names of requests that come without one: this process, and a running number.
_PROCESS, _NUMBER = uuid.uuid4().hex[:16], count()


class Incoming(Client, Protocol):
    """A client's request as it came, and the way back.

    Attributes:
        path: API path.
    """

    path: str

    @property
    def headers(self) -> Mapping[str, str]:
        """Found by lower-case name."""

    async def body(self, limit: int, seconds: float) -> bytes:
        """The body.

        Raises:
            ClientError: 413, longer than `limit` bytes; 408, not there in time.
        """


@dataclass(slots=True)
class Call:
    """A parsed request on its way through both legs.

    Attributes:
        client: the client's side.
        path: API path, the same on both legs.
        request_id: the client's X-Request-Id, or a fresh one, as logs and JSON can hold it.
        session: session key for affinity, or None, likewise.
        headers: header lines that both legs get, ready to be sent.
        prefix: first bytes of the prompt, for prefill affinity.
        expires: loop time at which the request ends, whatever it does.
        started: `time.perf_counter()` when the body was there.
        prefill_worker: who did the prefill, "" before that.
        prefilled: `time.perf_counter()` at the end of the first prefill leg, None before it.
        ttft: seconds to the first byte of a stream, None before it.
        tpot: seconds per event after the first, None for less than two events.
        events: of a stream that was passed on, 0 before its end.
        broken: the stream ended with an error event.
        ticket: the reservation of the decode leg that served it.
    """

    client: Incoming
    path: str
    body: Body
    request_id: str
    session: str | None
    headers: bytes
    prefix: bytes
    expires: float
    started: float = field(default_factory=time.perf_counter)
    prefill_worker: str = ""
    prefilled: float | None = None
    ttft: float | None = None
    tpot: float | None = None
    events: int = 0
    broken: bool = False
    ticket: Ticket | None = None

    def last_byte(self, events: int) -> None:
        """Marks the end of a stream that passed so many events."""
        self.events = events
        if self.ttft is not None and events > 1:
            streamed = time.perf_counter() - self.started - self.ttft
            self.tpot = streamed / (events - 1)

    def first_byte(self) -> None:
        """Marks the moment at which the client gets its first byte."""
        self.ttft = time.perf_counter() - self.started


def open_call(client: Incoming, body: Body, expires: float) -> Call:
    """Collects what both legs need from the client's request."""
    given = client.headers
    request_id = given.get("x-request-id") or f"{_PROCESS}-{next(_NUMBER):x}"
    lines = f"Content-Type: application/json\r\n{REQUEST_ID}: {request_id}\r\n"
    for name, key in _FORWARDED:
        if key in given:
            lines += f"{name}: {given[key]}\r\n"
    prompt = body.fields.get("messages" if body.chat else "prompt", b"")
    prefix = bytes(memoryview(prompt)[:PREFIX_BYTES])
    session = given.get("x-session-id")
    headers = lines.encode("utf-8", "surrogateescape")
    return Call(
        client,
        client.path,
        body,
        legible(request_id),
        None if session is None else legible(session),
        headers,
        prefix,
        expires,
    )
