"""The HTTP surface of the router: routes, error bodies, counters."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable

import aiohttp
import orjson
from aiohttp import web

from eldr.serving.bodies import parse
from eldr.serving.call import REQUEST_ID, open_call
from eldr.serving.errors import ClientError, error_body
from eldr.serving.state import Router

log = logging.getLogger(__name__)

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]
_JSON = "application/json"
_MODELS_SECONDS = 5.0


def build(router: Router) -> web.Application:
    """The application that serves clients."""
    app = web.Application(client_max_size=router.config.max_body)
    surface = Surface(router)
    app.router.add_post("/v1/completions", surface.complete)
    app.router.add_post("/v1/chat/completions", surface.complete)
    app.router.add_get("/v1/models", surface.models)
    app.router.add_get("/health", surface.health)
    app.router.add_get("/metrics", surface.metrics)
    app.router.add_get("/workers", surface.workers)
    app.router.add_get("/eldr/decisions", surface.decisions)
    return app


class Surface:
    """One method per route."""

    def __init__(self, router: Router) -> None:
        self._router = router

    async def complete(self, request: web.Request) -> web.StreamResponse:
        """POST /v1/completions and /v1/chat/completions."""
        started = time.perf_counter()
        outcome = "router_error"
        try:
            response = await self._complete(request)
            outcome = _outcome(response)
            return response
        except ClientError as error:
            outcome = "client_error" if error.status < 500 else "worker_error"
            return _refusal(request, error)
        except asyncio.CancelledError:
            outcome = "cancelled"
            raise
        except ConnectionResetError:
            outcome = "cancelled"  # the client went while we were writing
            raise
        except Exception:
            log.exception("request failed inside the router")
            return _json(error_body("internal router error", "router_error", 500), 500)
        finally:
            metrics = self._router.metrics
            metrics.requests.labels(request.path, outcome).inc()
            metrics.duration.labels(request.path).observe(time.perf_counter() - started)

    async def _complete(self, request: web.Request) -> web.StreamResponse:
        try:
            raw = await request.read()
        except web.HTTPRequestEntityTooLarge as error:
            limit = self._router.config.max_body
            raise ClientError(
                413, "request_too_large", f"the body exceeds {limit} bytes"
            ) from error
        path = request.path
        body = parse(raw, chat=path == "/v1/chat/completions")
        expires = asyncio.get_running_loop().time() + self._router.config.request_timeout
        return await self._router.legs.serve(open_call(request, path, body, expires))

    async def models(self, request: web.Request) -> web.StreamResponse:
        """GET /v1/models: the answer of the first worker that has one."""
        for endpoint in self._router.endpoints():
            try:
                async with (
                    asyncio.timeout(_MODELS_SECONDS),
                    self._router.session.get(endpoint.route("/v1/models")) as response,
                ):
                    raw = await response.read()
                    if response.status == 200:
                        return _json(raw)
            except (aiohttp.ClientError, OSError) as error:
                log.info("/v1/models of %s: %s", endpoint.name, error or type(error).__name__)
        return _refusal(request, ClientError(503, "no_worker", "no worker answers /v1/models"))

    async def health(self, request: web.Request) -> web.StreamResponse:
        """GET /health: the process serves requests."""
        return _json(b'{"status":"ok"}')

    async def metrics(self, request: web.Request) -> web.StreamResponse:
        """GET /metrics: Prometheus text."""
        return web.Response(
            body=self._router.metrics.render(),
            headers={"Content-Type": "text/plain; version=0.0.4; charset=utf-8"},
        )

    async def workers(self, request: web.Request) -> web.StreamResponse:
        """GET /workers: both pools with their load."""
        return _json(orjson.dumps(self._router.describe_workers()))

    async def decisions(self, request: web.Request) -> web.StreamResponse:
        """GET /eldr/decisions?limit=N: the last decisions, newest first."""
        try:
            limit = int(request.query.get("limit", "100"))
        except ValueError:
            return _refusal(
                request, ClientError(400, "invalid_request_error", "limit must be a number")
            )
        buffer = self._router.decisions
        rows = [record.explain() for record in buffer.newest(max(0, limit))]
        return _json(orjson.dumps({"v": 1, "total": buffer.total, "decisions": rows}))


def _json(body: bytes, status: int = 200) -> web.Response:
    return web.Response(status=status, body=body, headers={"Content-Type": _JSON})


def _refusal(request: web.BaseRequest, error: ClientError) -> web.Response:
    response = _json(error.body, error.status)
    if error.retry_after is not None:
        response.headers["Retry-After"] = str(max(1, round(error.retry_after)))
    if REQUEST_ID in request.headers:
        response.headers[REQUEST_ID] = request.headers[REQUEST_ID]
    return response


def _outcome(response: web.StreamResponse) -> str:
    if response.status < 400:
        return "ok"
    return "client_error" if response.status < 500 else "worker_error"
