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

import aiohttp
import orjson
from aiohttp import web

from eldr.serving.errors import ClientError
from eldr.serving.page import build, numbers, render
from eldr.serving.page.counters import Counters, parse
from eldr.serving.page.facts import Fact, of_record
from eldr.serving.page.heat import heat
from eldr.serving.page.window import Window
from eldr.serving.security import Keys
from eldr.serving.state import Router
from eldr.serving.web import json_answer, refusal

log = logging.getLogger(__name__)

TICK_SECONDS = 0.5
POLL_SECONDS = 4.0
SEND_SECONDS = 2.0
MOST_VIEWERS = 16
# Of a page with every layer's heat map.
_MOST_CELLS = 1 << 16
_KEPT_FACTS = 1000
_ANSWER_SECONDS = 2.0
_LARGEST_ANSWER = 1 << 24
_HEADERS = {
    "Cache-Control": "no-store",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
}


class Watch:
    """Looks at a router while it has viewers."""

    def __init__(self, router: Router) -> None:
        self._router = router
        self._window = Window()
        self._facts: deque[Fact] = deque(maxlen=_KEPT_FACTS)
        self._seen = 0
        self._viewers = 0
        self._task: asyncio.Task[None] | None = None
        self._polled = float("-inf")
        self._polling = asyncio.Lock()
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
            self._begin()
            self._task = asyncio.create_task(self._run(), name="operator-page")
        try:
            yield
        finally:
            self._viewers -= 1
            if not self._viewers and self._task is not None:
                self._task.cancel()
                self._task = None

    def _begin(self) -> None:
        # Between two looks nobody has looked: what was seen before says nothing about now.
        self._window = Window()
        self._polled = float("-inf")

    async def glance(self) -> None:
        """Looks once, for a reader who does not stay."""
        if not self._viewers:
            if time.monotonic() - self._polled > POLL_SECONDS:
                self._begin()
            self._tick()
        await self.poll()

    async def _run(self) -> None:
        while True:
            try:
                self._tick()
                if time.monotonic() - self._polled >= POLL_SECONDS:
                    await self.poll()
            except Exception:
                log.exception("the operator page could not look at the router")
            await asyncio.sleep(TICK_SECONDS)

    def _tick(self) -> None:
        decode = self._router.decode
        geometry = decode.fleet.geometry
        if geometry is not None:
            self._window.layers = geometry.layers
        shadows = {shadow.name: shadow.fleet.status() for shadow in decode.shadows}
        self._window.tick(decode.fleet.status(), shadows)

    async def poll(self) -> None:
        """Asks every decode worker for its counters; one second apart at least."""
        async with self._polling:
            if time.monotonic() - self._polled < min(1.0, POLL_SECONDS):
                return
            # Ranks of one engine share its counters.
            bases = {str(e.base): e.route("/eldr/decode") for e in self._router.decode.endpoints}
            answers = await asyncio.gather(*(self._ask(url) for url in bases.values()))
            now = self._polled = time.monotonic()
            self._window.poll(now, dict(zip(bases, answers, strict=True)))

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
        router, window = self._router, self._window
        self._catch_up()
        changes = window.changes()
        heat_map = heat(changes, layer, window.problems)
        expected, shadows = window.expected()
        experiment = router.decode.experiment
        measured = numbers.measured_differences(experiment.describe() if experiment else None)
        experts = numbers.experts(
            window.realised(), expected, shadows, measured, heat_map["why"] or "no decode step yet"
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
        cells = sum(c.use.size for c in changes.values())
        if every_layer and heat_map["why"] is None and cells <= _MOST_CELLS:
            chosen = [None, *range(heat_map["layers"])]
            out["heats"] = {
                "all" if at is None else str(at): heat(changes, at, window.problems)
                for at in chosen
            }
        return out

    def _catch_up(self) -> None:
        buffer = self._router.decisions
        missed = min(buffer.total - self._seen, _KEPT_FACTS)
        self._facts.extend(reversed([of_record(record) for record in buffer.newest(missed)]))
        self._seen = buffer.total


class OperatorPage:
    """The page and its data; the data need the admin key if there is one, the page holds none."""

    def __init__(self, router: Router) -> None:
        self._watch = Watch(router)
        self._keys = Keys([router.config.admin_key] if router.config.admin_key else [])
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
            ClientError: 401, or 400 for a layer that is no number.
        """
        self._keys.check(request.headers.get("Authorization"))
        text = request.query.get("layer", "all")
        if text == "all":
            return None
        if not (text.isascii() and text.isdigit() and len(text) < 6):
            raise ClientError(400, "invalid_request_error", "layer must be a number or all")
        return int(text)
