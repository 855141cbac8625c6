"""Opens a router: probes the workers, builds every part, and takes all of it down again."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from functools import partial
from typing import Any

import aiohttp

from eldr.geometry import Geometry
from eldr.routing.fleet import Fleet
from eldr.serving.admission import Admission
from eldr.serving.background import start
from eldr.serving.config import RouterConfig
from eldr.serving.decision_log import DecisionLog
from eldr.serving.decisions import DecisionBuffer
from eldr.serving.decode_pool import DecodePool
from eldr.serving.discovery import Member, Source, follow, follow_late
from eldr.serving.discovery.file import FileSource, read_members
from eldr.serving.discovery.kubernetes import KubernetesSource, PodSelectors, connect
from eldr.serving.endpoints import Endpoint, Role
from eldr.serving.errors import StartError
from eldr.serving.experiment import Experiment
from eldr.serving.health import HealthChecker
from eldr.serving.kv_release import KvRelease
from eldr.serving.legs import LegLimits, Legs, WholeRules
from eldr.serving.metrics import Metrics
from eldr.serving.origins import Client
from eldr.serving.page import snapshots
from eldr.serving.policy import (
    PolicyMaker,
    check_names,
    decided,
    live_policies,
    signature_policy,
)
from eldr.serving.prefill_pool import PrefillPool
from eldr.serving.probe import geometry_of, unanswered, wait_for_fleet
from eldr.serving.refit import REMAP_WINDOW, RefitRules, Refits, with_partition
from eldr.serving.refit_metrics import RefitMetrics
from eldr.serving.retry import LEAST_RESERVE, RetryBudget, RetryRules
from eldr.serving.security import client_tls
from eldr.serving.shadow import Shadow
from eldr.serving.spans import open_spans
from eldr.serving.state import Router, make_endpoint
from eldr.serving.telemetry import Telemetry

log = logging.getLogger(__name__)

_ROLES: tuple[Role, Role] = ("prefill", "decode")


@asynccontextmanager
async def open_router(config: RouterConfig) -> AsyncIterator[Router]:
    """Probes the workers and builds the router.

    Raises:
        StartError: a worker, the partition or the policy does not fit.
        ConfigError: a worker URL is not one.
    """
    check_names(config)
    async with AsyncExitStack() as stack:
        tls = client_tls(config.worker_ca)
        client = Client(config.connect_timeout, tls)
        client.start()
        stack.push_async_callback(client.close)
        headers = {"Authorization": f"Bearer {config.worker_key}"} if config.worker_key else {}
        session = await stack.enter_async_context(
            aiohttp.ClientSession(connector=aiohttp.TCPConnector(ssl=tls), headers=headers)
        )
        members, source = await _members(config)
        prefill, decode = (
            [make_endpoint(config, client, role, m.url, m.rank) for m in members if m.role == role]
            for role in _ROLES
        )
        late = await _late(session, config, [*prefill, *decode])
        answering = [endpoint for endpoint in prefill if not endpoint.awaited]
        geometry = await geometry_of(session, answering, required_by=signature_policy(config))
        config = decided(config, geometry)
        metrics, decisions = Metrics(), DecisionBuffer(config.decision_buffer)
        prefill_pool = PrefillPool(prefill, config.prefill_policy)
        decode_pool = _decode_pool(config, geometry, decode, metrics, decisions)
        for pool in (prefill_pool, decode_pool):
            pool.on_event = metrics.count_worker_event
        legs = _legs(config, stack, metrics, prefill_pool, decode_pool)
        admission = Admission(config.max_concurrent, config.queue_size, config.queue_timeout)
        router = Router(
            config,
            client,
            session,
            prefill_pool,
            decode_pool,
            legs,
            admission,
            metrics,
            decisions,
            _decision_log(config),
            open_spans(config.otel_endpoint) if config.otel_endpoint else None,
        )
        metrics.watch(router)
        checker = HealthChecker(
            session,
            (prefill_pool, decode_pool),
            interval=config.health_interval,
            limit=config.health_timeout,
        )
        start(stack, "health", checker.run)
        if config.poll_interval:
            telemetry = Telemetry(
                session,
                (decode_pool, prefill_pool),
                decode_pool,
                interval=config.poll_interval,
                kv_high=config.kv_high,
            )
            start(stack, "telemetry", telemetry.run)
        if router.decision_log is not None:
            start(stack, "decision-log", router.decision_log.run)
            if period := config.decision_log_counters:
                rows = partial(snapshots.write, router, router.decision_log, period)
                start(stack, "decision-log-counters", rows)
        if (refits := _refits(config, router)) is not None:
            start(stack, "refits", refits.run)
        if source is not None:
            start(stack, "discovery", partial(follow, source, router))
        elif late:
            start(stack, "discovery", partial(follow_late, router))
        yield router


async def _members(config: RouterConfig) -> tuple[list[Member], Source | None]:
    """The workers to start with, and where changes come from."""
    if config.worker_file:
        first = read_members(config.worker_file)
        return _complete(first), FileSource(config.worker_file, config.discovery_interval)
    if config.k8s_decode:
        selectors = PodSelectors(
            config.k8s_namespace, config.k8s_prefill, config.k8s_decode, config.k8s_port
        )
        source = KubernetesSource(connect(), selectors, config.discovery_interval)
        return _complete(await source.first(config.startup_timeout)), source
    ranks = range(config.decode_ranks) if config.decode_ranks > 1 else (None,)
    prefill = [Member("prefill", url) for url in config.prefill]
    return [*prefill, *(Member("decode", u, r) for u in config.decode for r in ranks)], None


async def _late(
    session: aiohttp.ClientSession, config: RouterConfig, endpoints: list[Endpoint]
) -> bool:
    """Waits for the workers; whether the start goes on without some, which are then marked."""
    loop = asyncio.get_running_loop()
    begun = loop.time()
    silent = await wait_for_fleet(session, endpoints, config.startup_timeout, config.startup_grace)
    for endpoint, last in silent.items():
        endpoint.awaited = True
        log.warning(
            "%s The router starts without it: it is down until it answers, then it joins.",
            unanswered(endpoint, round(loop.time() - begun, 1), last),
        )
    return bool(silent)


def _complete(members: frozenset[Member]) -> list[Member]:
    for role in _ROLES:
        if not any(member.role == role for member in members):
            raise StartError(f"the discovery names no {role} worker")
    return sorted(members, key=lambda m: (m.role, m.url, m.rank or 0))


def _decode_pool(
    config: RouterConfig,
    geometry: Geometry | None,
    endpoints: list[Endpoint],
    metrics: Metrics,
    decisions: DecisionBuffer,
) -> DecodePool:
    maker = PolicyMaker(config, geometry, [endpoint.name for endpoint in endpoints])
    arms = {name: maker.make(name) for name in live_policies(config)}
    if signature_policy(config) is None:
        geometry = None  # nobody looks at signatures: they are taken out, and not read
    shared: dict[str, Any] = {"min_coverage": config.min_coverage, "seed": config.seed}
    experiment = None
    if config.ab:
        experiment = Experiment(config.ab, config.ab_design, config.ab_period, config.seed)
    return DecodePool(
        endpoints,
        Fleet(next(iter(arms.values())), geometry=geometry, **shared),
        metrics,
        decisions,
        worker_headers=config.worker_headers,
        shadows=[Shadow(maker.make(name), geometry, **shared) for name in config.shadow],
        experiment=experiment,
        arms=arms,
    )


def _refits(config: RouterConfig, router: Router) -> Refits | None:
    """Who looks after the partition; None if no policy, arm or shadow has one."""
    if not (policies := with_partition(router.decode)):
        return None
    rules = RefitRules(
        every=config.refit_every,
        window=config.refit_window if config.refit_every else REMAP_WINDOW,
        sample=config.refit_sample,
        seed=config.seed,
    )
    refits = router.refits = Refits(router.decode, policies, router.origin, rules)
    router.decode.on_signature = refits.add
    count = router.decode.on_event

    def on_event(endpoint: Endpoint, event: str) -> None:
        count(endpoint, event)
        refits.member_event(endpoint, event)

    router.decode.on_event = on_event
    router.metrics.registry.register(RefitMetrics(refits))
    return refits


def _decision_log(config: RouterConfig) -> DecisionLog | None:
    if not config.decision_log:
        return None
    try:
        with open(config.decision_log, "ab"):
            pass  # it can be written to, as far as one can know now
    except OSError as error:
        text = f"--decision-log: {error}. Name a file in a directory that the router may write to."
        raise StartError(text) from error
    return DecisionLog(
        config.decision_log,
        sample=config.decision_log_sample,
        size=config.decision_log_size,
        files=config.decision_log_files,
        signatures=config.decision_log_signatures,
        seed=config.seed,
    )


def _legs(
    config: RouterConfig,
    stack: AsyncExitStack,
    metrics: Metrics,
    prefill: PrefillPool,
    decode: DecodePool,
) -> Legs:
    kv_release = KvRelease(metrics)
    stack.push_async_callback(kv_release.close)
    rules = RetryRules(
        attempts=config.attempts,
        budget=config.retry_budget,
        # Who dies fails all that it holds at once: a full router's requests earn so many.
        reserve=max(LEAST_RESERVE, config.retry_budget * config.max_concurrent),
        base=config.retry_pause,
        growth=config.retry_growth,
        longest=config.retry_longest_pause,
    )
    return Legs(
        prefill,
        decode,
        budget=RetryBudget(rules, config.seed),
        limits=LegLimits(config.first_byte_timeout, config.idle_timeout),
        whole=WholeRules(config.unsplittable, config.several_choices, config.no_prefill),
        metrics=metrics,
        kv_release=kv_release,
    )
