"""The client's surface: completions, models and health."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Iterator
from contextlib import contextmanager

import aiohttp
from aiohttp import web

from eldr.serving.bodies import parse
from eldr.serving.call import Call, open_call
from eldr.serving.errors import ClientError, error_body
from eldr.serving.logs import request_id
from eldr.serving.security import Keys, refuse_media_urls
from eldr.serving.state import Router
from eldr.serving.web import json_answer, refusal

log = logging.getLogger(__name__)

CHAT = "/v1/chat/completions"
_MODELS_SECONDS = 5.0
_CLIENT_GONE = 499
# A request whose time is over is ended by its worker's deadline; this is for what does not see it.
_GRACE_SECONDS = 5.0


class Surface:
    """One method per route."""

    def __init__(self, router: Router) -> None:
        self._router = router
        self._keys = Keys(router.config.api_key)

    def add_to(self, app: web.Application) -> None:
        """Registers the routes."""
        app.router.add_post("/v1/completions", self.complete)
        app.router.add_post(CHAT, self.complete)
        app.router.add_get("/v1/models", self.models)
        app.router.add_get("/health", self.health)
        app.router.add_get("/liveness", self.health)
        app.router.add_get("/readiness", self.readiness)

    async def complete(self, request: web.Request) -> web.StreamResponse:
        """POST /v1/completions and /v1/chat/completions."""
        started = time.perf_counter()
        outcome = "router_error"
        try:
            self._keys.check(request.headers.get("Authorization"))
            if self._router.draining:
                raise ClientError(
                    503, "router_stopping", "this router is stopping", retry_after=1.0
                )
            async with self._router.admission:
                call = await self._open(request)
                request_id.set(call.request_id)
                with _ends_at(call.expires + _GRACE_SECONDS):
                    response = await self._router.legs.serve(call)
                outcome = _outcome(call, response)
                self._router.observe(call, outcome)
                return response
        except ClientError as error:
            outcome = "client_error" if error.status < 500 else "worker_error"
            return refusal(request, error)
        except asyncio.CancelledError:
            outcome = "cancelled"  # the client went
            raise
        except ConnectionResetError:
            outcome = "cancelled"  # it went while we were writing: nobody will see this answer
            return web.Response(status=_CLIENT_GONE)
        except Exception:
            log.exception("a request failed inside the router")
            return json_answer(error_body("internal router error", "router_error", 500), 500)
        finally:
            self._router.metrics.request_ended(request.path, outcome, time.perf_counter() - started)

    async def _open(self, request: web.Request) -> Call:
        config = self._router.config
        try:
            if request.content.is_eof():  # it came together with the head, as most do
                raw = await request.read()
            else:
                async with asyncio.timeout(config.body_timeout):
                    raw = await request.read()
        except web.HTTPRequestEntityTooLarge as error:
            text = f"the body exceeds {config.max_body} bytes"
            raise ClientError(413, "request_too_large", text) from error
        except TimeoutError as error:
            text = f"the body did not arrive within {config.body_timeout:g} s"
            raise ClientError(408, "request_timeout", text) from error
        path = request.path
        body = parse(raw, chat=path == CHAT)
        if not config.allow_media_urls:
            refuse_media_urls(body)
        expires = asyncio.get_running_loop().time() + config.request_timeout
        return open_call(request, path, body, expires)

    async def models(self, request: web.Request) -> web.StreamResponse:
        """GET /v1/models: the answer of the first worker that has one."""
        try:
            self._keys.check(request.headers.get("Authorization"))
        except ClientError as error:
            return refusal(request, error)
        for endpoint in self._router.endpoints():
            try:
                async with (
                    asyncio.timeout(_MODELS_SECONDS),
                    self._router.session.get(endpoint.route("/v1/models")) as response,
                ):
                    raw = await response.read()
                    if response.status == 200:
                        return json_answer(raw)
            except (aiohttp.ClientError, OSError) as error:
                log.info("/v1/models of %s: %s", endpoint.name, error or type(error).__name__)
        return refusal(request, ClientError(503, "no_worker", "no worker answers /v1/models"))

    async def health(self, request: web.Request) -> web.StreamResponse:
        """GET /health, /liveness: the process runs."""
        return json_answer({"status": "ok"})

    async def readiness(self, request: web.Request) -> web.StreamResponse:
        """GET /readiness: requests are taken, and a worker of each kind is there for them."""
        router = self._router
        reasons = ["stopping"] if router.stopping else []
        reasons += [f"no {p.role} worker" for p in (router.prefill, router.decode) if not p.able()]
        status = "not ready" if reasons else "ready"
        return json_answer({"status": status, "reasons": reasons}, 503 if reasons else 200)


@contextmanager
def _ends_at(when: float) -> Iterator[None]:
    """Cancels the current task at a loop time: a client that stops reading cannot stay for ever."""
    task = asyncio.current_task()
    assert task is not None
    timer = asyncio.get_running_loop().call_at(when, task.cancel)
    try:
        yield
    finally:
        timer.cancel()


def _outcome(call: Call, response: web.StreamResponse) -> str:
    if call.broken:
        return "broken_stream"
    if response.status < 400:
        return "ok"
    return "client_error" if response.status < 500 else "worker_error"
