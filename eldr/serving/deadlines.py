"""When requests must have ended, whatever they wait for.

Their legs watch the time themselves; this is for a client that stops reading. One look at all
requests now and then costs less than a timer for each.
"""

from __future__ import annotations

import asyncio

_LOOK_SECONDS = 1.0


class Deadlines:
    """Loop times at which tasks are cancelled, to about a second."""

    def __init__(self) -> None:
        self._due: dict[asyncio.Task[None], float] = {}

    def add(self, when: float) -> asyncio.Task[None]:
        """The current task ends by then, unless it is discarded before."""
        task = asyncio.current_task()
        assert task is not None
        self._due[task] = when
        return task

    def discard(self, task: asyncio.Task[None]) -> None:
        """The task's request has ended."""
        self._due.pop(task, None)

    async def run(self) -> None:
        """Cancels tasks whose time is over, until cancelled itself."""
        loop = asyncio.get_running_loop()
        while True:
            await asyncio.sleep(_LOOK_SECONDS)
            now = loop.time()
            for task, when in list(self._due.items()):
                if when < now:
                    task.cancel()
