"""The ingress: an OpenAI-compatible ASGI application that runs both legs of every request."""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable, MutableMapping
from itertools import islice
from typing import Any

import orjson

from eldr.serving.errors import ClientError
from eldr.serving.http1 import UpstreamError
from eldr.serving.pd.decider import Decider, registered
from eldr.serving.pd.legs import Legs, send_whole
from eldr.serving.pd.route import Headers, Leg
from eldr.serving.pd.surface import COMPLETIONS, JSON, Surface, refuse
from eldr.serving.ray.config import RayConfig
from eldr.serving.ray.handles import Handles
from eldr.serving.ray.metrics import ProxyMetrics

Message = MutableMapping[str, Any]
Send = Callable[[Message], Awaitable[None]]
Receive = Callable[[], Awaitable[Message]]

_PREFILL = "/eldr/prefill"  # + path: a request to any prefill replica, as it is
_EVERY = "/eldr/every/"  # + pool + path: a request without body to all replicas of a pool


class _Client:
    """Writes one answer."""

    def __init__(self, send: Send) -> None:
        self._send = send
        self.started = False

    async def start(self, status: int, headers: Headers) -> None:
        self.started = True
        raw = [(k.encode("latin-1"), v.encode("latin-1")) for k, v in headers]
        await self._send({"type": "http.response.start", "status": status, "headers": raw})

    async def write(self, data: bytes) -> None:
        await self._send({"type": "http.response.body", "body": data, "more_body": True})

    async def end(self) -> None:
        await self._send({"type": "http.response.body", "body": b"", "more_body": False})


class PDProxy:
    """Serve deployment; replicas of it decide on their own, see docs/ray.md."""

    def __init__(self, config: RayConfig, prefill: Any, decode: Any) -> None:
        self._config = config
        self._prefill, self._decode = prefill, decode
        metrics = ProxyMetrics()
        self._handles = Handles(prefill, decode)
        legs = Legs(self._handles, config.requests, metrics.retried)
        self._surface = Surface(legs, config.requests, metrics.ended)

    def __serve_build_asgi_app__(self) -> Any:
        """Serve asks for the application after the constructor."""

        async def application(scope: Message, receive: Receive, send: Send) -> None:
            await self.application(scope, receive, send)

        return application  # uvicorn takes methods for the protocol's old version

    async def application(self, scope: Message, receive: Receive, send: Send) -> None:
        """One HTTP request, or the lifespan protocol."""
        if scope["type"] == "lifespan":
            while (message := await receive())["type"] != "lifespan.shutdown":
                await send({"type": f"{message['type']}.complete"})
            await send({"type": "lifespan.shutdown.complete"})
            return
        client = _Client(send)
        headers = {k.decode("latin-1").lower(): v.decode("latin-1") for k, v in scope["headers"]}
        method, path = scope["method"], scope["path"].removeprefix(scope.get("root_path", ""))
        try:
            if method == "POST" and path in COMPLETIONS:
                await self._surface.complete(path, headers, lambda: self._body(receive), client)
            elif path == "/health":
                await send_whole(client, 200, JSON, b'{"status":"ok"}')
            elif path == "/v1/models":
                await self._on_prefill(Leg("GET", path), client)
            elif self._config.operator and path.startswith("/eldr/"):
                await self._operator(method, path, headers, receive, client)
            else:
                raise ClientError(404, "not_found", f"no route {method} {path}")
        except (ClientError, UpstreamError) as error:
            await refuse(client, error)
        await client.end()

    async def _body(self, receive: Receive) -> bytes:
        parts, size = [], 0
        while True:
            message = await receive()
            if message["type"] == "http.disconnect":
                raise ClientError(400, "client_gone", "the client left before its body was here")
            parts.append(message.get("body", b""))
            size += len(parts[-1])
            if size > self._config.requests.max_body:
                raise self._surface.too_large()
            if not message.get("more_body", False):
                return b"".join(parts)

    # Operator

    async def _operator(
        self, method: str, path: str, headers: dict[str, str], receive: Receive, client: _Client
    ) -> None:
        if path.startswith(f"{_PREFILL}/"):
            passed = [(k, v) for k, v in headers.items() if k == "content-type"]
            leg = Leg(method, path.removeprefix(_PREFILL), passed, await self._body(receive))
            await self._on_prefill(leg, client)
        elif path.startswith(_EVERY):
            pool, _, inner = path.removeprefix(_EVERY).partition("/")
            handle = {"prefill": self._prefill, "decode": self._decode}.get(pool)
            if handle is None:
                raise ClientError(404, "not_found", f"no pool {pool!r}: prefill or decode")
            asked = handle.broadcast("ask", Leg(method, f"/{inner}"))
            answers = await asked.results_async(return_exceptions=True)
            rows = [x if isinstance(x, dict) else {"error": str(x)} for x in answers]
            await send_whole(client, 200, JSON, orjson.dumps(rows))
        elif (method, path) == ("GET", "/eldr/decisions"):
            await send_whole(client, 200, JSON, orjson.dumps(self._describe_decisions()))
        elif (method, path) == ("GET", "/eldr/workers"):
            await send_whole(
                client, 200, JSON, orjson.dumps({"decode": self._decider().fleet.status()})
            )
        else:
            raise ClientError(404, "not_found", f"no route {method} {path}")

    def _decider(self) -> Decider:
        decider = registered(self._decode.deployment_name)
        if decider is None:
            raise ClientError(503, "no_worker", "this proxy has not met its decode replicas yet")
        return decider

    def _describe_decisions(self) -> dict[str, Any]:
        kept = self._decider().decisions
        rows = [record.explain() for record in islice(kept.newest(kept.total), 1000)]
        return {"v": 1, "total": kept.total, "decisions": rows}

    async def _on_prefill(self, leg: Leg, client: _Client) -> None:
        found = await self._handles.prefill(f"operator-{time.monotonic_ns()}", leg)
        status, raw = found.status, found.raw_headers
        kept = [(k.decode(), v.decode()) for k, v in raw if k.lower() == b"content-type"]
        await send_whole(client, status, kept, found.body)
