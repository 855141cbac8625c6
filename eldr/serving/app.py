"""The client's surface: completions, models and health."""

from __future__ import annotations

import asyncio
import logging
import time

from aiohttp import web

from eldr.serving.bodies import parse
from eldr.serving.call import Call, Incoming, open_call
from eldr.serving.deadlines import Deadlines
from eldr.serving.errors import ClientError
from eldr.serving.logs import request_id
from eldr.serving.models import first_models
from eldr.serving.request import Request
from eldr.serving.security import Keys, refuse_media_urls
from eldr.serving.state import Router
from eldr.serving.upstream import Answer, Pairs
from eldr.serving.web import as_headers, as_response, json_answer, refusal, refused

log = logging.getLogger(__name__)

CHAT = "/v1/chat/completions"
_CLIENT_GONE = 499
# A request whose time is over is ended by its worker's deadline; this is for what does not see it.
_GRACE_SECONDS = 5.0


class AiohttpRequest:
    """A request that aiohttp has read.

    Attributes:
        response: the streamed answer, None before it began.
    """

    def __init__(self, request: web.Request) -> None:
        self._request = request
        self.path = request.path
        self.headers = request.headers
        self.response: web.StreamResponse | None = None

    async def body(self, limit: int, seconds: float) -> bytes:
        """The body; `limit` is the one that the application has."""
        try:
            async with asyncio.timeout(seconds):
                return await self._request.read()
        except web.HTTPRequestEntityTooLarge as error:
            text = f"the body exceeds {limit} bytes"
            raise ClientError(413, "request_too_large", text) from error
        except TimeoutError as error:
            text = f"the body did not arrive within {seconds:g} s"
            raise ClientError(408, "request_timeout", text) from error

    async def begin(self, headers: Pairs) -> None:
        """Starts a streamed answer."""
        self.response = web.StreamResponse(headers=as_headers(headers))
        await self.response.prepare(self._request)

    async def write(self, data: bytes) -> None:
        """Sends a piece of it."""
        assert self.response is not None
        await self.response.write(data)

    async def end(self) -> None:
        """Ends it."""
        assert self.response is not None
        await self.response.write_eof()


class Surface:
    """One method per route.

    Attributes:
        deadlines: of the requests that run; somebody must run it.
    """

    def __init__(self, router: Router) -> None:
        self._router = router
        self.deadlines = Deadlines()
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
        """POST /v1/completions and /v1/chat/completions, as aiohttp has read them."""
        client = AiohttpRequest(request)
        answer = await self.serve(client)
        if answer is not None:
            return as_response(answer)
        assert client.response is not None  # it was streamed
        return client.response

    async def short_way(self, request: Request) -> None:
        """The same, as the short way has read them."""
        answer = await self.serve(request)
        if answer is not None:
            request.close = request.close or self._router.draining
            try:
                await request.answer(answer)
            except ConnectionResetError:
                return  # the client went: nobody will see this answer

    async def serve(self, client: Incoming) -> Answer | None:
        """Serves a completion; the answer, or None when it was streamed."""
        started = time.perf_counter()
        outcome = "router_error"
        own_id = client.headers.get("x-request-id")
        call: Call | None = None
        try:
            self._keys.check(client.headers.get("authorization"))
            if self._router.draining:
                raise ClientError(
                    503, "router_stopping", "this router is stopping", retry_after=1.0
                )
            async with self._router.admission:
                call = await self._open(client)
                request_id.set(call.request_id)
                task = self.deadlines.add(call.expires + _GRACE_SECONDS)
                try:
                    answer = await self._router.legs.serve(call)
                finally:
                    self.deadlines.discard(task)
                outcome = _outcome(call, answer)
                return answer
        except ClientError as error:
            outcome = "client_error" if error.status < 500 else "worker_error"
            return refused(error, own_id)
        except asyncio.CancelledError:
            outcome = "cancelled"  # the client went
            raise
        except ConnectionResetError:
            outcome = "cancelled"  # it went while we were writing: nobody will see this answer
            return Answer(_CLIENT_GONE, [], b"")
        except Exception:
            log.exception("a request failed inside the router")
            return refused(ClientError(500, "router_error", "internal router error"), own_id)
        finally:
            if call is not None:
                self._note(call, outcome)
            self._router.metrics.request_ended(client.path, outcome, time.perf_counter() - started)

    def _note(self, call: Call, outcome: str) -> None:
        """Takes note of a request that has ended, however it did."""
        try:
            self._router.observe(call, outcome)
        except Exception:  # its answer may be out already, and must not change any more
            log.exception("a request was served, but not noted")

    async def _open(self, client: Incoming) -> Call:
        config = self._router.config
        raw = await client.body(config.max_body, config.body_timeout)
        body = parse(raw, chat=client.path == CHAT)
        if not config.allow_media_urls:
            refuse_media_urls(body)
        expires = asyncio.get_running_loop().time() + config.request_timeout
        return open_call(client, body, expires)

    async def models(self, request: web.Request) -> web.StreamResponse:
        """GET /v1/models: the answer of the first worker that has one."""
        try:
            self._keys.check(request.headers.get("Authorization"))
        except ClientError as error:
            return refusal(request, error)
        raw = await first_models(self._router.session, self._router.endpoints())
        if raw is not None:
            return json_answer(raw)
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


def _outcome(call: Call, answer: Answer | None) -> str:
    if call.broken:
        return "broken_stream"
    if answer is None or answer.status < 400:
        return "ok"
    return "client_error" if answer.status < 500 else "worker_error"
