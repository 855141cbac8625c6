"""The connections to workers: one pool per origin, and one ticker that watches every deadline."""

from __future__ import annotations

import asyncio
import contextlib
import ssl
from collections import deque

from eldr.serving.http1 import Connection, FailureKind, UpstreamError


class Origin:
    """The connections to one host and port.

    Attributes:
        lost: connections that the other side ended.
    """

    def __init__(
        self, host: str, port: int, tls: ssl.SSLContext | None, connect_timeout: float
    ) -> None:
        self.host, self.port = host, port
        self._tls = tls
        self._connect_timeout = connect_timeout
        self.idle: deque[Connection] = deque()
        self.busy: set[Connection] = set()
        self.lost = 0

    def take(self) -> Connection | None:
        """A kept connection, if there is one; it must be given back by `give_back`."""
        while self.idle:
            connection = self.idle.pop()
            if connection.alive:
                self.busy.add(connection)
                return connection
        return None

    async def connect(self) -> Connection:
        """A new connection; it must be given back by `give_back`.

        Raises:
            UpstreamError: `connect`.
        """
        loop = asyncio.get_running_loop()
        try:
            async with asyncio.timeout(self._connect_timeout):
                _, connection = await loop.create_connection(
                    lambda: Connection(loop, self._count_lost), self.host, self.port, ssl=self._tls
                )
        except TimeoutError as error:
            text = f"no connection to {self.host}:{self.port} in {self._connect_timeout:g} s"
            raise UpstreamError("connect", False, text) from error
        except OSError as error:  # includes TLS errors
            text = f"no connection to {self.host}:{self.port}: {error}"
            raise UpstreamError("connect", False, text) from error
        self.busy.add(connection)
        return connection

    def _count_lost(self) -> None:
        self.lost += 1

    def give_back(self, connection: Connection) -> None:
        """Keeps the connection for the next exchange, or drops it if this one is not over."""
        self.busy.discard(connection)
        if connection.reusable:
            connection.idle_since = asyncio.get_running_loop().time()
            self.idle.append(connection)
        else:
            connection.close()

    def tick(self, now: float, keep_alive: float) -> None:
        """Fails exchanges whose deadline passed; closes connections that idled for too long."""
        for connection in list(self.busy):
            connection.check_deadlines(now)
        while self.idle and self.idle[0].idle_since < now - keep_alive:
            self.idle.popleft().close()

    def heard_since(self, time: float) -> bool:
        """Whether a byte of an answer came since a time."""
        return any(c.heard and c.heard_at >= time for c in self.busy)

    def fail_silent(
        self, since: float, kind: FailureKind = "timeout", why: str = "the worker is down"
    ) -> None:
        """Fails the exchanges on which nothing came since a time."""
        for connection in [c for c in self.busy if c.heard_at < since and not c.complete]:
            connection.fail(kind, why)

    def drop_idle(self) -> None:
        """Drops the connections that nobody uses."""
        while self.idle:
            self.idle.pop().close()

    def close(self) -> None:
        """Drops all connections."""
        for connection in [*self.idle, *self.busy]:
            connection.close()
        self.idle.clear()


class Client:
    """All origins, and the ticker that watches their deadlines."""

    # uvicorn, which vLLM runs on, drops connections that idle for 5 s; ours must go first, or a
    # request meets a closing connection.
    KEEP_ALIVE_SECONDS = 4.0
    TICK_SECONDS = 0.2

    def __init__(self, connect_timeout: float, tls: ssl.SSLContext | None = None) -> None:
        self._connect_timeout = connect_timeout
        self._tls = tls
        self._origins: dict[tuple[str, int, bool], Origin] = {}
        self._ticker: asyncio.Task[None] | None = None

    def origin(self, host: str, port: int, *, tls: bool) -> Origin:
        """The origin of that address, always the same object."""
        key = (host, port, tls)
        found = self._origins.get(key)
        if found is None:
            context = (self._tls or ssl.create_default_context()) if tls else None
            found = self._origins[key] = Origin(host, port, context, self._connect_timeout)
        return found

    def fail_all(self, why: str) -> None:
        """Ends every exchange with an error."""
        for origin in self._origins.values():
            for connection in list(origin.busy):
                connection.fail("cut", why)

    def start(self) -> None:
        """Starts the ticker."""
        self._ticker = asyncio.create_task(self._tick(), name="http1-deadlines")

    async def _tick(self) -> None:
        loop = asyncio.get_running_loop()
        while True:
            await asyncio.sleep(self.TICK_SECONDS)
            now = loop.time()
            for origin in self._origins.values():
                origin.tick(now, self.KEEP_ALIVE_SECONDS)

    async def close(self) -> None:
        """Stops the ticker and drops all connections."""
        if self._ticker is not None:
            self._ticker.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._ticker
        for origin in self._origins.values():
            origin.close()
