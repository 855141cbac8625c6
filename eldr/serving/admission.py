"""How many requests are served at once, and who waits: a bounded queue in order of arrival."""

from __future__ import annotations

import asyncio
from collections import deque

from eldr.serving.errors import ClientError


class Admission:
    """A bound on concurrent requests with a bounded queue before it; `async with` it to pass.

    Attributes:
        running: requests that were let in and have not ended.
    """

    def __init__(self, most: int, queue: int, patience: float) -> None:
        """Bounds.

        Args:
            most: requests at once.
            queue: requests that may wait.
            patience: seconds that one may wait.
        """
        self._most = most
        self._queue = queue
        self._patience = patience
        self._waiting: deque[asyncio.Future[None]] = deque()
        self.running = 0

    @property
    def waiting(self) -> int:
        """Requests in the queue."""
        return len(self._waiting)

    async def __aenter__(self) -> None:
        """Lets a request in, now or after those before it.

        Raises:
            ClientError: 429, the queue is full or the wait was too long.
        """
        if self.running >= self._most or self._waiting:
            await self._wait()  # whoever leaves hands its place over: `running` stays
        else:
            self.running += 1

    async def __aexit__(self, *_: object) -> None:
        """The request has ended."""
        self._leave()

    async def _wait(self) -> None:
        if len(self._waiting) >= self._queue:
            raise _full(f"{self.running} requests are running and {self.waiting} waiting")
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.append(turn)
        try:
            async with asyncio.timeout(self._patience):
                await turn
        except BaseException as error:
            if turn.done() and not turn.cancelled():
                self._leave()  # the place came in the same moment: pass it on
            elif turn in self._waiting:
                self._waiting.remove(turn)
            if isinstance(error, TimeoutError):
                raise _full(f"the request waited for {self._patience:g} s") from error
            raise

    def _leave(self) -> None:
        while self._waiting:
            turn = self._waiting.popleft()
            if not turn.done():
                turn.set_result(None)
                return
        self.running -= 1


def _full(why: str) -> ClientError:
    return ClientError(429, "router_full", f"the router is full: {why}", retry_after=1.0)
