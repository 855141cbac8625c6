"""An engine as a Serve replica: its ASGI application in this process, called through the handle."""

from __future__ import annotations

import importlib
import logging
import os
from collections.abc import AsyncGenerator, Mapping
from contextlib import AsyncExitStack, aclosing
from typing import Any

import orjson

from eldr.geometry import Geometry
from eldr.serving.pd.decider import measured
from eldr.serving.pd.route import REPLICA_HEADER, Head, Headers, Leg
from eldr.serving.ray.asgi import exchange
from eldr.serving.ray.metrics import DecodeMetrics

log = logging.getLogger(__name__)

Whole = tuple[int, Headers, bytes]


class EngineReplica:
    """One prefill or decode engine.

    Serve calls `check_health`, `record_replica_metadata` and `record_routing_stats`, the proxy
    `whole`, `stream` and `ask`.
    """

    async def __init__(  # type: ignore[misc]  # Serve awaits it
        self, role: str, application: str, options: Mapping[str, Any]
    ) -> None:
        """Starts the engine; the replica is ready when it is.

        Args:
            role: "prefill" or "decode".
            application: `module:function` of a context manager, called with (options, host), that
                yields an ASGI application.
            options: of the engine.
        """
        from ray import util

        self._role = role
        self._stack = AsyncExitStack()
        module, _, name = application.partition(":")
        opener = getattr(importlib.import_module(module), name)
        host = util.get_node_ip_address()
        self._application = await self._stack.enter_async_context(opener(dict(options), host))
        self._counters: dict[str, Any] = {}
        self._intervals = 0
        status, _, raw = await self.whole("", Leg("GET", "/eldr/info"))
        self._info: dict[str, Any] = orjson.loads(raw) if status == 200 else {}
        if not self._info:
            log.warning("the engine has no /eldr/info (HTTP %d): routed by load alone", status)
        self._metrics = DecodeMetrics() if role == "decode" else None

    async def __del__(self) -> None:
        """Serve calls this when the replica has drained."""
        await self._stack.aclose()

    # Requests

    async def whole(self, request_id: str, leg: Leg) -> Whole:
        """One request, answered in one piece: status, headers, body."""
        body, head = b"", Head(500, [])
        async with aclosing(exchange(self._application, leg)) as pieces:
            async for piece in pieces:
                if isinstance(piece, Head):
                    head = piece
                else:
                    body += piece
        return head.status, [*head.headers, (REPLICA_HEADER, _context().replica_id.unique_id)], body

    async def ask(self, leg: Leg) -> dict[str, Any]:
        """One request of an operator, with who answered it."""
        status, _, body = await self.whole("", leg)
        return {
            "replica": _context().replica_id.unique_id,
            "rank": _rank(),
            "pid": os.getpid(),
            "status": status,
            "body": body.decode("utf-8", "replace"),
        }

    async def stream(self, route: str, leg: Leg) -> AsyncGenerator[tuple[int, Headers] | bytes]:
        """One request, answered as it comes: (status, headers), then pieces of the body.

        Args:
            route: what is left of a `Route` here: the request's id.
            leg: the request.
        """
        async with aclosing(exchange(self._application, leg)) as pieces:
            async for piece in pieces:
                yield (piece.status, piece.headers) if isinstance(piece, Head) else piece

    # What Serve asks

    async def check_health(self) -> None:
        """Raises if the engine is dead; Serve then replaces the replica."""
        status, _, raw = await self.whole("", Leg("GET", "/health"))
        if status != 200:
            raise RuntimeError(f"{self._role} engine: /health answers {status}: {raw[:200]!r}")

    def record_replica_metadata(self) -> dict[str, Any]:
        """For the routers, once: what this engine serves, and its rank at first."""
        shape = self._info.get("geometry")
        names = ("layers", "experts", "top_k")
        return {
            "rank": _rank(),
            "model": self._info.get("model"),
            "geometry": None if shape is None else [shape[name] for name in names],
        }

    async def record_routing_stats(self) -> dict[str, Any]:
        """For the routers, regularly: the rank, and what a decode engine did since last time."""
        stats: dict[str, Any] = {"rank": _rank()}
        if self._role != "decode" or not self._info:
            return stats
        status, _, raw = await self.whole("", Leg("GET", "/eldr/decode"))
        if status == 200:
            now = orjson.loads(raw)
            self._intervals += 1
            stats["sample"] = measured(self._intervals, now, self._counters)
            if self._metrics is not None:
                self._metrics.add(stats["sample"])
            self._counters = now
        return stats


def geometry_of(metadata: Mapping[str, Any]) -> Geometry | None:
    """The geometry in a replica's metadata, None if its engine is not patched."""
    shape = metadata.get("geometry")
    return None if shape is None else Geometry(*shape)


def _context() -> Any:
    from ray import serve

    return serve.get_replica_context()


def _rank() -> int:
    return int(_context().rank.rank)
