"""One exchange with one worker: sends a body, yields the answer, gives the connection back."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from eldr.serving.endpoints import Endpoint
from eldr.serving.http1 import Connection, UpstreamError

# Headers that belong to one hop, or that this server writes itself.
_NOT_PASSED = frozenset(
    {
        b"connection",
        b"content-length",
        b"date",
        b"keep-alive",
        b"proxy-authenticate",
        b"server",
        b"te",
        b"trailer",
        b"transfer-encoding",
        b"upgrade",
    }
)

Pairs = Iterable[tuple[bytes, bytes]]


@dataclass(slots=True)
class Attempt:
    """One try of a leg on one worker; `sent` is true once the worker may have seen the request."""

    sent: bool = False


@dataclass(slots=True)
class Limits:
    """Time limits of one exchange, in seconds; `expires` is loop time."""

    first_byte: float
    idle: float
    expires: float


@dataclass(slots=True)
class Answer:
    """A complete answer, a worker's or the router's own."""

    status: int
    raw_headers: list[tuple[bytes, bytes]]
    body: bytes

    def passed(self, extra: Pairs = ()) -> Answer:
        """The answer as a client gets it: end-to-end headers only, and further ones."""
        return Answer(self.status, [*passed(self.raw_headers), *extra], self.body)

    def header(self, name: bytes) -> bytes | None:
        """The first value of a header, by its lower-case name."""
        return next((v for k, v in self.raw_headers if k.lower() == name), None)


def passed(raw: Pairs) -> list[tuple[bytes, bytes]]:
    """The headers that are not this hop's own."""
    return [pair for pair in raw if pair[0].lower() not in _NOT_PASSED]


class Exchange:
    """An open exchange; `with` gives its connection back however it ends."""

    __slots__ = ("_endpoint", "connection")

    def __init__(self, endpoint: Endpoint, connection: Connection) -> None:
        self._endpoint = endpoint
        self.connection = connection

    def __enter__(self) -> Exchange:
        return self

    def __exit__(self, *_: object) -> None:
        self._endpoint.origin.give_back(self.connection)

    @property
    def streams(self) -> bool:
        """Whether the answer is a stream of server-sent events."""
        for name, value in self.connection.headers:
            if name.lower() == b"content-type":
                return value.lower().startswith(b"text/event-stream")
        return False

    def passed_headers(self) -> list[tuple[bytes, bytes]]:
        """The answer's end-to-end headers."""
        return passed(self.connection.headers)

    async def answer(self, limit: int) -> Answer:
        """The whole answer.

        Raises:
            UpstreamError: it broke off, stayed silent, or exceeds `limit` bytes.
        """
        connection = self.connection
        body = connection.whole(limit)
        if body is None:
            body = await connection.read_all(limit)
        return Answer(connection.status, connection.headers, body)


async def open_exchange(
    endpoint: Endpoint, path: str, headers: bytes, body: bytes, limits: Limits, attempt: Attempt
) -> Exchange:
    """Sends a request and returns when the answer's status and headers are there.

    A kept connection that the worker closed in the same moment is replaced by a new one, once.

    Raises:
        UpstreamError: no answer.
    """
    data = b"%b%bContent-Length: %d\r\n\r\n%b" % (endpoint.head(path), headers, len(body), body)
    origin = endpoint.origin
    fresh = False
    while True:
        connection = None if fresh else origin.take()
        if connection is None:
            connection = await origin.connect()
        try:
            attempt.sent = True
            connection.send(data, limits.first_byte, limits.idle, limits.expires)
            await connection.head()
            return Exchange(endpoint, connection)
        except UpstreamError as error:
            origin.give_back(connection)
            stale = error.kind == "reset" and connection.used > 1 and not connection.heard
            if fresh or not stale:
                raise
            fresh = True
        except BaseException:
            origin.give_back(connection)
            raise
