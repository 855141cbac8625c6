"""The operator page at GET /eldr/, live by server-sent events.

Workers are asked for their counters only while somebody looks, and at a bounded rate.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

import orjson
from aiohttp import web

from eldr.serving.errors import ClientError
from eldr.serving.page import build, numbers, render
from eldr.serving.page.facts import Fact, of_record
from eldr.serving.page.heat import heat
from eldr.serving.page.look import TICK_SECONDS, Look
from eldr.serving.state import Router
from eldr.serving.strangers import Operators
from eldr.serving.web import json_answer, refusal

log = logging.getLogger(__name__)

POLL_SECONDS = 4.0
SEND_SECONDS = 2.0
MOST_VIEWERS = 16
_KEPT_FACTS = 1000
_HEADERS = {
    "Cache-Control": "no-store",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
}


class Watch:
    """Looks at a router while it has viewers."""

    def __init__(self, router: Router) -> None:
        self._router = router
        self._look = Look(router)
        self._facts: deque[Fact] = deque(maxlen=_KEPT_FACTS)
        self._seen = 0
        self._viewers = 0
        self._task: asyncio.Task[None] | None = None
        self._made: dict[tuple[str, int | None], tuple[float, bytes]] = {}

    @contextmanager
    def viewer(self) -> Iterator[None]:
        """Keeps the watch going inside the block.

        Raises:
            ClientError: 503, too many viewers.
        """
        if self._viewers >= MOST_VIEWERS:
            raise ClientError(503, "too_many_viewers", "too many people look at this page")
        self._viewers += 1
        if self._task is None:
            self._look.begin()
            self._task = asyncio.create_task(self._run(), name="operator-page")
        try:
            yield
        finally:
            self._viewers -= 1
            if not self._viewers and self._task is not None:
                self._task.cancel()
                self._task = None

    async def glance(self) -> None:
        """Looks once, for a reader who does not stay."""
        if not self._viewers:
            if time.monotonic() - self._look.polled > POLL_SECONDS:
                self._look.begin()
            self._look.tick()
        await self.poll()

    async def poll(self) -> None:
        """Asks the decode workers for their counters; one second apart at least."""
        await self._look.poll(min(1.0, POLL_SECONDS))

    async def _run(self) -> None:
        while True:
            try:
                self._look.tick()
                await self._look.poll(POLL_SECONDS)
            except Exception:
                log.exception("the operator page could not look at the router")
            await asyncio.sleep(TICK_SECONDS)

    def event(self, name: str, layer: int | None) -> bytes:
        """The page's data as one server-sent event; viewers of one moment share it."""
        now = time.monotonic()
        made = self._made.get((name, layer))
        if made is None or now - made[0] >= SEND_SECONDS / 2:
            if len(self._made) >= MOST_VIEWERS:
                self._made.clear()
            raw = b"data: " + orjson.dumps(self.data(name, layer)) + b"\n\n"
            made = self._made[name, layer] = (now, raw)
        return made[1]

    def data(self, name: str, layer: int | None, *, every_layer: bool = False) -> dict[str, Any]:
        """The page's data now; `name` is what the viewer calls this router."""
        router, window = self._router, self._look.window
        self._catch_up()
        changes = window.changes()
        heat_map = heat(changes, layer, window.problems)
        expected, shadows = window.expected()
        experts = numbers.experts(
            window.realised(),
            expected,
            shadows,
            self._look.measured(),
            heat_map["why"] or "no decode step yet",
        )
        if router.decode.shadows and not shadows:
            experts["notes"][-1] = "the shadow's figure needs signatures and running requests"
        out = build.live(
            name=name,
            now=time.time(),
            policy=router.decode.fleet.policy.name,
            total=router.decisions.total,
            facts=self._facts,
            rows=[r.explain() for r in router.decisions.newest(build.SHOWN_DECISIONS)],
            load=window.load(),
            experts=experts,
            pairs=list(window.pairs),
            heat_map=heat_map,
            window=window.span(),
        )
        if every_layer:
            out |= build.every_layer(heat_map, changes, window.problems)
        return out

    def _catch_up(self) -> None:
        buffer = self._router.decisions
        missed = min(buffer.total - self._seen, _KEPT_FACTS)
        self._facts.extend(reversed([of_record(record) for record in buffer.newest(missed)]))
        self._seen = buffer.total


class OperatorPage:
    """The page and its data; the data are for operators alone, the page holds none."""

    def __init__(self, router: Router) -> None:
        self._watch = Watch(router)
        self._operators = Operators(router.config)
        self._stopping = asyncio.Event()

    def add_to(self, app: web.Application) -> None:
        """Registers the routes."""
        app.router.add_get("/eldr", self.redirect)
        app.router.add_get("/eldr/", self.page)
        app.router.add_get("/eldr/data", self.data)
        app.router.add_get("/eldr/events", self.events)
        app.on_shutdown.append(self._stop)

    async def _stop(self, app: web.Application) -> None:
        self._stopping.set()

    async def redirect(self, request: web.Request) -> web.StreamResponse:
        """GET /eldr: to the page, relative to whatever prefix a proxy put in front."""
        return web.Response(status=308, headers={"Location": "eldr/"})

    async def page(self, request: web.Request) -> web.StreamResponse:
        """GET /eldr/: the page without data; it asks for a key where one is needed."""
        headers = {**_HEADERS, "Content-Security-Policy": render.policy()}
        headers["Content-Security-Policy"] += "; frame-ancestors 'none'"
        return web.Response(text=render.page(), content_type="text/html", headers=headers)

    async def data(self, request: web.Request) -> web.StreamResponse:
        """GET /eldr/data[?layer=N]: what the page shows, once, with every layer if it fits."""
        try:
            layer = self._check(request)
        except ClientError as error:
            return refusal(request, error)
        await self._watch.glance()
        return json_answer(self._watch.data(request.host, layer, every_layer=True))

    async def events(self, request: web.Request) -> web.StreamResponse:
        """GET /eldr/events[?layer=N]: the same as server-sent events, until the client goes."""
        try:
            layer = self._check(request)
            with self._watch.viewer():
                return await self._send(request, layer)
        except ClientError as error:
            return refusal(request, error)

    async def _send(self, request: web.Request, layer: int | None) -> web.StreamResponse:
        headers = {**_HEADERS, "Content-Type": "text/event-stream", "X-Accel-Buffering": "no"}
        response = web.StreamResponse(headers=headers)
        await response.prepare(request)
        await self._watch.poll()
        with suppress(ConnectionResetError):  # the viewer went
            while not self._stopping.is_set():
                await response.write(self._watch.event(request.host, layer))
                with suppress(TimeoutError):
                    await asyncio.wait_for(self._stopping.wait(), SEND_SECONDS)
        return response

    def _check(self, request: web.Request) -> int | None:
        """The layer asked for, None for all.

        Raises:
            ClientError: 401 or 403, or 400 for a layer that is no number.
        """
        self._operators.check(request.headers)
        text = request.query.get("layer", "all")
        if text == "all":
            return None
        if not (text.isascii() and text.isdigit() and len(text) < 6):
            raise ClientError(400, "invalid_request_error", "layer must be a number or all")
        return int(text)
