"""The coordinator as a process: an aiohttp server in front of the two calls."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import aiohttp
from aiohttp import web
from prometheus_client import CollectorRegistry, Counter, generate_latest

from eldr.geometry import Geometry
from eldr.serving.decisions import Record
from eldr.serving.errors import ClientError
from eldr.serving.histogram import Histogram
from eldr.serving.http1 import UpstreamError
from eldr.serving.llmd.config import CoordinatorConfig
from eldr.serving.llmd.gateway import Gateway
from eldr.serving.pd.decider import Decider, Replica
from eldr.serving.pd.legs import Legs
from eldr.serving.pd.route import Headers
from eldr.serving.pd.surface import COMPLETIONS, Surface, refuse

_SECONDS = (1e-5, 2e-5, 5e-5, 1e-4, 2e-4, 5e-4, 1e-3, 2e-3, 5e-3, 1e-2)


class Metrics:
    """The coordinator's counters, in a registry of their own."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self._decisions = self._counter(
            "decisions", "decode decisions by policy and branch", "policy", "branch"
        )
        self._fallback = self._counter(
            "fallback", "decisions made on load alone, by reason", "reason"
        )
        self._requests = self._counter("requests", "requests by outcome", "outcome")
        self._retries = self._counter("retries", "repeated calls by phase", "leg")
        self._seconds = Histogram(
            "eldr_coordinator_decision_seconds",
            "from the raw signature to the reserved group",
            _SECONDS,
            (),
            self.registry,
        )

    def _counter(self, name: str, text: str, *labels: str) -> Counter:
        return Counter(f"eldr_coordinator_{name}", text, labels, registry=self.registry)

    def decided(self, record: Record) -> None:
        """Counts a decision."""
        decision = record.decision
        self._decisions.labels(decision.policy, decision.branch).inc()
        if decision.reason is not None:
            self._fallback.labels(str(decision.reason)).inc()
        self._seconds.observe(record.decision_us / 1e6)

    def retried(self, leg: str) -> None:
        """Counts a repeated call."""
        self._retries.labels(leg).inc()

    def ended(self, outcome: str) -> None:
        """Counts a request."""
        self._requests.labels(outcome).inc()


class _Client:
    """Writes one answer to an aiohttp request."""

    def __init__(self, request: web.Request) -> None:
        self._request = request
        self._response: web.StreamResponse | None = None

    @property
    def started(self) -> bool:
        return self._response is not None

    async def start(self, status: int, headers: Headers) -> None:
        self._response = web.StreamResponse(status=status)
        self._response.headers.extend(headers)
        await self._response.prepare(self._request)

    async def write(self, data: bytes) -> None:
        assert self._response is not None
        await self._response.write(data)

    async def end(self) -> web.StreamResponse:
        assert self._response is not None
        await self._response.write_eof()
        return self._response


class Coordinator:
    """The application's routes."""

    def __init__(self, session: aiohttp.ClientSession, config: CoordinatorConfig) -> None:
        self.metrics = Metrics()
        self.decider = Decider(config.routing, self.metrics.decided)
        clusters, geometry = config.resolved()
        self.decider.members(groups(clusters, geometry))
        legs = Legs(Gateway(session, config, self.decider), config.requests, self.metrics.retried)
        self._surface = Surface(legs, config.requests, self.metrics.ended)

    def add_to(self, app: web.Application) -> None:
        """Registers the routes; those of health are llm-d's names."""
        for path in sorted(COMPLETIONS):
            app.router.add_post(path, self.complete)
        for path in ("/healthz", "/readyz"):
            app.router.add_get(path, self.healthy)
        app.router.add_get("/metrics", self.render)

    async def complete(self, request: web.Request) -> web.StreamResponse:
        """Both phases of one request."""

        async def body() -> bytes:
            try:
                return await request.read()
            except web.HTTPRequestEntityTooLarge as error:
                raise self._surface.too_large() from error

        client = _Client(request)
        headers = {k.lower(): v for k, v in request.headers.items()}
        try:
            await self._surface.complete(request.path, headers, body, client)
        except (ClientError, UpstreamError) as error:
            await refuse(client, error)
        return await client.end()

    async def healthy(self, request: web.Request) -> web.Response:
        """The process runs; it keeps no connection and no worker whose health it could tell."""
        return web.Response(text="ok")

    async def render(self, request: web.Request) -> web.Response:
        """GET /metrics."""
        return web.Response(body=generate_latest(self.metrics.registry), content_type="text/plain")


def groups(clusters: int, geometry: Geometry) -> list[Replica]:
    """The groups of decode pods, named by the value of their label."""
    return [Replica(str(number), number, geometry) for number in range(clusters)]


@asynccontextmanager
async def open_coordinator(config: CoordinatorConfig) -> AsyncIterator[web.Application]:
    """The application, ready to be served.

    Raises:
        ConfigError: the configuration does not fit the partition.
    """
    connector = aiohttp.TCPConnector(limit=config.connections)
    timeout = aiohttp.ClientTimeout(total=None)  # the legs have limits of their own
    async with aiohttp.ClientSession(
        connector=connector, timeout=timeout, auto_decompress=False
    ) as session:
        app = web.Application(client_max_size=config.requests.max_body)
        Coordinator(session, config).add_to(app)
        yield app
