"""One router process: its configuration, pools and counters, opened and closed together."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from dataclasses import dataclass
from typing import Any

import aiohttp

from eldr.routing.fleet import Fleet
from eldr.serving.condition import Rules
from eldr.serving.config import RouterConfig
from eldr.serving.decisions import DecisionBuffer
from eldr.serving.decode_pool import DecodePool
from eldr.serving.endpoints import Endpoint, worker_url
from eldr.serving.health import HealthChecker
from eldr.serving.kv_release import KvRelease
from eldr.serving.legs import LegLimits, Legs
from eldr.serving.metrics import Metrics
from eldr.serving.origins import Client
from eldr.serving.policy import build_policy, needs_signatures
from eldr.serving.prefill_pool import PrefillPool
from eldr.serving.probe import geometry_of, wait_for
from eldr.serving.retry import RetryBudget, RetryRules

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
        now = asyncio.get_running_loop().time()
        loads = {row["name"]: row for row in self.decode.fleet.status()}

        def row(endpoint: Endpoint) -> dict[str, Any]:
            state = str(endpoint.condition.state(now))
            out = {"name": endpoint.name, "state": state, "requests": endpoint.running}
            return {**loads.get(endpoint.name, {}), **out}

        return {
            "prefill": [row(endpoint) for endpoint in self.prefill.endpoints],
            "decode": [row(endpoint) for endpoint in self.decode.endpoints],
        }


@asynccontextmanager
async def open_router(config: RouterConfig) -> AsyncIterator[Router]:
    """Probes the workers and builds the router.

    Raises:
        StartError: a worker, the partition or the policy does not fit.
        ConfigError: a worker URL is not one.
    """
    metrics, decisions = Metrics(), DecisionBuffer(config.decision_buffer)
    async with AsyncExitStack() as stack:
        client = Client(config.connect_timeout)
        client.start()
        stack.push_async_callback(client.close)
        session = await stack.enter_async_context(aiohttp.ClientSession())
        prefill, decode = _endpoints(config, client)
        await wait_for(session, [*prefill, *decode], config.startup_timeout)
        required_by = config.policy if needs_signatures(config.policy) else None
        geometry = await geometry_of(session, prefill, required_by=required_by)
        fleet = Fleet(
            build_policy(config, geometry, [endpoint.name for endpoint in decode]),
            geometry=geometry,
            min_coverage=config.min_coverage,
            seed=config.seed,
        )
        prefill_pool = PrefillPool(prefill, config.prefill_policy)
        decode_pool = DecodePool(
            decode, fleet, metrics, decisions, worker_headers=config.worker_headers
        )
        for pool in (prefill_pool, decode_pool):
            pool.on_event = metrics.count_worker_event
        kv_release = KvRelease(metrics)
        stack.push_async_callback(kv_release.close)
        legs = Legs(
            prefill_pool,
            decode_pool,
            budget=RetryBudget(
                RetryRules(attempts=config.attempts, budget=config.retry_budget), config.seed
            ),
            limits=LegLimits(config.first_byte_timeout, config.idle_timeout),
            metrics=metrics,
            kv_release=kv_release,
        )
        checker = HealthChecker(
            session,
            (prefill_pool, decode_pool),
            interval=config.health_interval,
            limit=config.health_timeout,
        )
        stack.push_async_callback(_cancel, asyncio.create_task(checker.run(), name="health"))
        yield Router(config, session, prefill_pool, decode_pool, legs, metrics, decisions)


def _endpoints(config: RouterConfig, client: Client) -> tuple[list[Endpoint], list[Endpoint]]:
    rules = Rules(
        failures=config.eject_failures,
        pause=config.eject_seconds,
        ramp=config.slow_start,
        check_failures=config.health_failures,
    )
    return (
        [Endpoint("prefill", worker_url(url), client, rules=rules) for url in config.prefill],
        [Endpoint("decode", worker_url(url), client, rules=rules) for url in config.decode],
    )


async def _cancel(task: asyncio.Task[None]) -> None:
    task.cancel()
    with suppress(asyncio.CancelledError):
        await task
