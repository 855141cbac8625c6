"""One router process: its configuration, pools and counters, opened and closed together."""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

import aiohttp

from eldr.routing.fleet import Fleet
from eldr.routing.worker import Worker
from eldr.serving.config import RouterConfig
from eldr.serving.decisions import DecisionBuffer
from eldr.serving.decode_pool import DecodePool
from eldr.serving.endpoints import Endpoint, worker_url
from eldr.serving.legs import Legs
from eldr.serving.metrics import Metrics
from eldr.serving.origins import Client
from eldr.serving.policy import build_policy, needs_signatures
from eldr.serving.prefill_pool import PrefillPool
from eldr.serving.probe import geometry_of, wait_for

log = logging.getLogger(__name__)


@dataclass(slots=True)
class Router:
    """What the HTTP surface works on."""

    config: RouterConfig
    session: aiohttp.ClientSession
    prefill: PrefillPool
    decode: DecodePool
    legs: Legs
    metrics: Metrics
    decisions: DecisionBuffer

    def endpoints(self) -> list[Endpoint]:
        """All workers of both pools, decode first."""
        return [*self.decode.endpoints, *self.prefill.endpoints]

    def describe_workers(self) -> dict[str, Any]:
        """Both pools as JSON values."""
        return {
            "prefill": [{"name": e.name, "requests": e.running} for e in self.prefill.endpoints],
            "decode": self.decode.fleet.status(),
        }


@asynccontextmanager
async def open_router(config: RouterConfig) -> AsyncIterator[Router]:
    """Probes the workers and builds the router.

    Raises:
        StartError: a worker, the partition or the policy does not fit.
        ConfigError: a worker URL is not one.
    """
    client = Client(config.connect_timeout)
    prefill = [Endpoint("prefill", worker_url(text), client) for text in config.prefill]
    decode = [Endpoint("decode", worker_url(text), client) for text in config.decode]
    session = aiohttp.ClientSession()
    client.start()
    try:
        await wait_for(session, [*prefill, *decode], config.startup_timeout)
        required_by = config.policy if needs_signatures(config.policy) else None
        geometry = await geometry_of(session, prefill, required_by=required_by)
        names = [endpoint.name for endpoint in decode]
        fleet = Fleet(
            build_policy(config, geometry, names),
            [Worker(e.name, str(e.base), e.rank) for e in decode],
            geometry=geometry,
            min_coverage=config.min_coverage,
            seed=config.seed,
        )
        metrics, decisions = Metrics(), DecisionBuffer(config.decision_buffer)
        pool = PrefillPool(prefill, config.prefill_policy)
        decode_pool = DecodePool(
            decode, fleet, metrics, decisions, worker_headers=config.worker_headers
        )
        legs = Legs(
            pool,
            decode_pool,
            attempts=config.attempts,
            first_byte=config.first_byte_timeout,
            idle=config.idle_timeout,
        )
        yield Router(config, session, pool, decode_pool, legs, metrics, decisions)
    finally:
        await client.close()
        await session.close()
