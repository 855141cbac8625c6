"""Looks at a router and its decode workers: loads and expectations now, counters over HTTP."""

from __future__ import annotations

import asyncio
import time
from typing import Any

import aiohttp
import orjson

from eldr.serving.page import numbers
from eldr.serving.page.counters import Counters, parse
from eldr.serving.page.window import Window
from eldr.serving.state import Router

TICK_SECONDS = 0.5
_ANSWER_SECONDS = 2.0
_LARGEST_ANSWER = 1 << 24


class Look:
    """What one observer has seen of a router.

    Attributes:
        window: the history; `begin` starts a new one.
        polled: `time.monotonic()` of the last poll, -inf before the first.
    """

    def __init__(self, router: Router) -> None:
        self._router = router
        self._polling = asyncio.Lock()
        self.begin()

    def begin(self) -> None:
        """Forgets what was seen: nothing is known about a time in which nobody looked."""
        self.window = Window()
        self.polled = float("-inf")

    def tick(self) -> None:
        """Takes the loads and expectations of this moment."""
        decode = self._router.decode
        geometry = decode.fleet.geometry
        if geometry is not None:
            self.window.layers = geometry.layers
        shadows = {shadow.name: shadow.fleet.status() for shadow in decode.shadows}
        self.window.tick(decode.fleet.status(), shadows)

    async def poll(self, pause: float) -> None:
        """Asks every decode worker for its counters, but not within `pause` s of the last time."""
        async with self._polling:
            if time.monotonic() - self.polled < pause:
                return
            # Ranks of one engine share its counters.
            bases = {str(e.base): e.route("/eldr/decode") for e in self._router.decode.endpoints}
            answers = await asyncio.gather(*(self._ask(url) for url in bases.values()))
            now = self.polled = time.monotonic()
            self.window.poll(now, dict(zip(bases, answers, strict=True)))

    def measured(self) -> list[dict[str, Any]]:
        """What a running A/B experiment has found out so far."""
        experiment = self._router.decode.experiment
        return numbers.measured_differences(experiment.describe() if experiment else None)

    async def _ask(self, url: Any) -> Counters | str:
        try:
            async with (
                asyncio.timeout(_ANSWER_SECONDS),
                self._router.session.get(url, allow_redirects=False) as response,
            ):
                if response.status == 404:
                    return numbers.NO_COUNTERS
                if response.status != 200:
                    return f"GET /eldr/decode: HTTP {response.status}"
                raw = await response.content.read(_LARGEST_ANSWER)
                while len(raw) < _LARGEST_ANSWER and (more := await response.content.read(1 << 16)):
                    raw += more
        except (aiohttp.ClientError, OSError) as error:  # TimeoutError is an OSError
            return f"GET /eldr/decode: {str(error) or 'no answer in time'}"
        try:
            return await asyncio.to_thread(lambda: parse(orjson.loads(raw)))
        except ValueError as error:
            return f"GET /eldr/decode: {error}"
