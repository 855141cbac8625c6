"""The operator's surface: workers, decisions, the partition, metrics."""

from __future__ import annotations

import asyncio
import tempfile
from collections.abc import Awaitable, Callable
from typing import Annotated

import msgspec
from aiohttp import web

from eldr.serving.config import ConfigError
from eldr.serving.errors import ClientError, StartError
from eldr.serving.follow import follow
from eldr.serving.metrics import Metrics
from eldr.serving.pool import Pool
from eldr.serving.state import Router
from eldr.serving.strangers import Operators
from eldr.serving.web import json_answer, refusal

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]
_METRICS_TYPE = "text/plain; version=0.0.4; charset=utf-8"
_LARGEST_PARTITION = 2**28
_LONGEST_NUMBER = 9


class _Worker(msgspec.Struct, forbid_unknown_fields=True):
    role: str
    url: str
    rank: Annotated[int, msgspec.Meta(ge=0, lt=2**16)] | None = None


class Admin:
    """One method per route, all for operators alone."""

    def __init__(self, router: Router) -> None:
        self._router = router
        self._operators = Operators(router.config)
        self._stopping = asyncio.Event()

    async def _stop(self, app: web.Application) -> None:
        self._stopping.set()

    def add_to(self, app: web.Application) -> None:
        """Registers the routes."""
        app.on_shutdown.append(self._stop)
        routes = app.router
        routes.add_get("/workers", self._guarded(self.workers))
        routes.add_post("/workers", self._guarded(self.add_worker))
        routes.add_delete("/workers", self._guarded(self.remove_worker))
        routes.add_post("/workers/drain", self._guarded(self.drain_worker))
        routes.add_get("/eldr/decisions", self._guarded(self.decisions))
        routes.add_get("/eldr/experiment", self._guarded(self.experiment))
        routes.add_get("/eldr/partition", self._guarded(self.partition))
        routes.add_post("/eldr/partition", self._guarded(self.load_partition))

    def _guarded(self, handler: Handler) -> Handler:
        async def guarded(request: web.Request) -> web.StreamResponse:
            try:
                self._operators.check(request.headers)
                return await handler(request)
            except (ConfigError, StartError) as error:
                return refusal(request, ClientError(400, "invalid_request_error", str(error)))
            except ClientError as error:
                return refusal(request, error)

        return guarded

    async def workers(self, request: web.Request) -> web.StreamResponse:
        """GET /workers: both pools with state and load."""
        return json_answer(self._router.describe_workers())

    async def add_worker(self, request: web.Request) -> web.StreamResponse:
        """POST /workers {"role", "url", "rank"?}: a worker joins once it answers."""
        try:
            wanted = msgspec.json.decode(await request.read(), type=_Worker)
        except msgspec.DecodeError as error:
            raise _bad(f"expected role, url and rank: {error}") from error
        name = await self._router.add_worker(wanted.role, wanted.url, wanted.rank)
        return json_answer({"name": name}, 201)

    def _named(self, request: web.Request) -> tuple[Pool, str]:
        return self._router.member(request.query.get("name", ""), request.query.get("role", ""))

    async def remove_worker(self, request: web.Request) -> web.StreamResponse:
        """DELETE /workers?name=N[&role=R]: no new requests; leaves when its last one has ended."""
        pool, name = self._named(request)
        pool.leave(name)
        return json_answer({"name": name, "leaving": pool.get(name) is not None})

    async def drain_worker(self, request: web.Request) -> web.StreamResponse:
        """POST /workers/drain?name=N[&role=R][&draining=false]: stops or resumes new requests."""
        draining = request.query.get("draining", "true")
        if draining not in ("true", "false"):
            raise _bad("draining must be true or false")
        pool, name = self._named(request)
        pool.drain(name, draining == "true")
        return json_answer({"name": name, "draining": draining == "true"})

    async def decisions(self, request: web.Request) -> web.StreamResponse:
        """GET /eldr/decisions?limit=N: the last decisions, newest first; &follow=1: as events."""
        following = request.query.get("follow", "0")
        if following not in ("0", "1"):
            raise _bad("follow must be 0 or 1")
        text = request.query.get("limit", "100" if following == "0" else "0")
        if not (text.isascii() and text.isdigit() and len(text) <= _LONGEST_NUMBER):
            raise _bad(f"limit must be a number of up to {_LONGEST_NUMBER} digits")
        buffer = self._router.decisions
        if following == "1":
            return await follow(request, buffer, int(text), self._stopping)
        rows = [record.explain() for record in buffer.newest(int(text))]
        return json_answer({"v": 1, "total": buffer.total, "decisions": rows})

    async def experiment(self, request: web.Request) -> web.StreamResponse:
        """GET /eldr/experiment: what an A/B experiment has shown so far."""
        experiment = self._router.decode.experiment
        if experiment is None:
            raise ClientError(404, "no_experiment", "no experiment runs; start one with --ab")
        return json_answer(experiment.describe())

    async def partition(self, request: web.Request) -> web.StreamResponse:
        """GET /eldr/partition: what is loaded."""
        return json_answer(self._router.describe_partition())

    async def load_partition(self, request: web.Request) -> web.StreamResponse:
        """POST /eldr/partition with the file as body: decisions from now on use it."""
        # Not `max_body`: an operator may set that below the size of a partition.
        raw = await request.clone(client_max_size=_LARGEST_PARTITION).read()
        with tempfile.NamedTemporaryFile(suffix=".safetensors") as file:
            file.write(raw)
            file.flush()
            self._router.load_partition(file.name)
        return json_answer(self._router.describe_partition())


def add_metrics(app: web.Application, metrics: Metrics) -> None:
    """Registers GET /metrics, which needs no key."""

    async def show(request: web.Request) -> web.StreamResponse:
        return web.Response(body=metrics.render(), headers={"Content-Type": _METRICS_TYPE})

    app.router.add_get("/metrics", show)


def _bad(message: str) -> ClientError:
    return ClientError(400, "invalid_request_error", message)
