"""One router: configuration, pools, counters, and what an operator may change while it runs."""

from __future__ import annotations

import asyncio
import logging
import time
from dataclasses import dataclass, field
from typing import Any

import aiohttp
import orjson

from eldr.geometry import Geometry
from eldr.serving.admission import Admission
from eldr.serving.call import Call
from eldr.serving.condition import Rules
from eldr.serving.config import ConfigError, RouterConfig
from eldr.serving.decision_log import DecisionLog
from eldr.serving.decisions import DecisionBuffer
from eldr.serving.decode_pool import DecodePool, Ticket
from eldr.serving.endpoints import Endpoint, Role, worker_url
from eldr.serving.errors import StartError
from eldr.serving.legs import Legs
from eldr.serving.metrics import Metrics
from eldr.serving.origins import Client
from eldr.serving.policy import read_partition
from eldr.serving.pool import Pool
from eldr.serving.prefill_pool import PrefillPool
from eldr.serving.probe import geometry_of, wait_for
from eldr.serving.refit import Origin, Refits
from eldr.serving.spans import Spans

log = logging.getLogger(__name__)

_JOIN_SECONDS = 10.0


@dataclass(slots=True)
class Router:
    """What the HTTP surfaces, the discovery and the drain work on.

    Attributes:
        origin: of the partition, where there is one.
        stopping: the process will stop soon; /readiness says no.
        draining: new requests are refused.
    """

    config: RouterConfig
    client: Client
    session: aiohttp.ClientSession
    prefill: PrefillPool
    decode: DecodePool
    legs: Legs
    admission: Admission
    metrics: Metrics
    decisions: DecisionBuffer
    decision_log: DecisionLog | None = None
    spans: Spans | None = None
    origin: Origin = field(default_factory=Origin)
    refits: Refits | None = None
    stopping: bool = False
    draining: bool = False
    _joining: set[tuple[Role, str]] = field(default_factory=set)

    def endpoints(self) -> list[Endpoint]:
        """All workers of both pools, decode first."""
        return [*self.decode.endpoints, *self.prefill.endpoints]

    def observe(self, call: Call, outcome: str) -> None:
        """Takes note of a request that has ended: metrics, experiment, decision log."""
        if call.ttft is not None:
            self.metrics.ttft.observe(call.ttft)
        if call.tpot is not None:
            self.metrics.tpot.observe(call.tpot)
        if self.spans is not None:
            self.spans.record(call, call.client.headers, outcome)
        ticket = call.ticket
        if ticket is None:
            return
        experiment = self.decode.experiment
        if experiment is not None and ticket.slot is not None and outcome == "ok":
            waited = time.perf_counter() - call.started
            started = asyncio.get_running_loop().time() - waited
            experiment.observe(ticket.slot, started, call.ttft, call.tpot)
        if self.decision_log is not None and self.decision_log.wanted():
            self.decision_log.add(self._log_row(call, ticket, outcome, self.decision_log))

    @staticmethod
    def _log_row(call: Call, ticket: Ticket, outcome: str, log: DecisionLog) -> dict[str, Any]:
        row = ticket.record.explain()
        row["arm"] = None if ticket.slot is None else ticket.slot.arm.name
        row["shadows"] = ticket.shadows
        row["outcome"] = outcome
        row["ttft_s"], row["tpot_s"] = call.ttft, call.tpot
        row["events"] = call.events
        row["seconds"] = time.perf_counter() - call.started
        if log.signatures and ticket.signature is not None:
            row["signature"] = orjson.Fragment(ticket.signature)
        return row

    # Workers

    async def add_worker(self, role: str, url: str, rank: int | None = None) -> str:
        """Adds a worker once it answers, and returns its name.

        One that was named at the start and did not answer then is a member already; it gets
        requests from now on, under the centroid that it has in a partition.

        Raises:
            ConfigError: no such role, or not a worker URL.
            StartError: it does not answer, or serves another model.
        """
        pool = self.pool(role)
        endpoint = make_endpoint(self.config, self.client, pool.role, url, rank)
        known = pool.get(endpoint.name)
        joining = (pool.role, endpoint.name)
        if joining in self._joining:
            raise ConfigError(f"{role} worker {endpoint.name} joins already, when it answers")
        if known is not None and not known.awaited:
            if not known.leaving:
                raise ConfigError(f"{role} worker {endpoint.name} is in the pool already")
            pool.drain(known.name, draining=False)  # it changed its mind
            return known.name
        self._joining.add(joining)
        try:
            await wait_for(self.session, endpoint, _JOIN_SECONDS)
            if role == "prefill":
                self._fits(await geometry_of(self.session, [endpoint], required_by=None), endpoint)
            if known is None:
                pool.join(endpoint)
            elif pool.get(known.name) is known and not known.leaving:
                pool.arrived(known)
            else:
                raise ConfigError(f"{role} worker {known.name} was removed before it answered")
        finally:
            self._joining.discard(joining)
        pool.on_event(endpoint, "joined")
        log.info("%s worker %s joined", role, endpoint.name)
        return endpoint.name

    def _fits(self, found: Geometry | None, endpoint: Endpoint) -> None:
        mine = self.decode.fleet.geometry
        # Unpatched workers are routed by load; so is everyone if no policy reads signatures.
        if found is not None and mine is not None and found != mine:
            raise StartError(f"{endpoint.base} serves {found}, the other workers serve {mine}")

    def pool(self, role: str) -> Pool:
        """The pool of a role.

        Raises:
            ConfigError: no such role.
        """
        if role not in ("prefill", "decode"):
            raise ConfigError(f"role must be prefill or decode, got {role!r}")
        return self.prefill if role == "prefill" else self.decode

    def member(self, name: str, role: str = "") -> tuple[Pool, str]:
        """The pool that a worker is in; one engine may be in both.

        Raises:
            ConfigError: no such worker, or two of that name and no role.
        """
        pools = [self.pool(role)] if role else [self.prefill, self.decode]
        found = [pool for pool in pools if pool.get(name) is not None]
        if not found:
            raise ConfigError(f"no worker {name!r}; see GET /workers")
        if len(found) > 1:
            raise ConfigError(f"{name!r} is in both pools: add role=prefill or role=decode")
        return found[0], name

    def describe_workers(self) -> dict[str, Any]:
        """Both pools as JSON values."""
        now = asyncio.get_running_loop().time()
        loads = {row["name"]: row for row in self.decode.fleet.status()}

        def row(endpoint: Endpoint) -> dict[str, Any]:
            state = str(endpoint.condition.state(now))
            out = {"name": endpoint.name, "state": state, "requests": endpoint.running}
            out["others"], out["kv_usage"] = endpoint.others, endpoint.kv_usage
            return {**loads.get(endpoint.name, {}), **out}

        return {
            "prefill": [row(endpoint) for endpoint in self.prefill.endpoints],
            "decode": [row(endpoint) for endpoint in self.decode.endpoints],
        }

    # Partition

    def load_partition(self, path: str) -> None:
        """Replaces the partition of every policy that has one; decisions from now on use it.

        Raises:
            ConfigError: the policy uses none.
            StartError: it is unreadable or does not fit.
        """
        if self.refits is None:
            raise ConfigError(f"policy {self.decode.fleet.policy.name} uses no partition")
        names = [endpoint.name for endpoint in self.decode.endpoints]
        geometry, vacant = self.decode.fleet.geometry, bool(self.config.k8s_decode)
        self.refits.replace(read_partition(path, geometry, names, vacant=vacant))

    def describe_partition(self) -> dict[str, Any]:
        """The loaded partition as JSON values."""
        policy = self.decode.fleet.policy
        if self.refits is None:
            return {"policy": policy.name, "partition": None, "refit": None}
        partition, refit = self.refits.partition, self.refits.describe()
        if partition is None:
            return {"policy": policy.name, "partition": None, "refit": refit}
        return {
            "policy": policy.name,
            "refit": refit,
            "partition": {
                "digest": partition.digest,
                "source": self.origin.source,
                "time": self.origin.time,
                "model": partition.model,
                "geometry": str(partition.geometry),
                "workers": list(partition.names),
                "metrics": partition.metrics,
            },
        }


def make_endpoint(
    config: RouterConfig, client: Client, role: Role, url: str, rank: int | None = None
) -> Endpoint:
    """A worker of this configuration.

    Raises:
        ConfigError: not a worker URL.
    """
    rules = Rules(
        failures=config.eject_failures,
        pause=config.eject_seconds,
        ramp=config.slow_start,
        check_failures=config.health_failures,
    )
    return Endpoint(role, worker_url(url), client, rank=rank, key=config.worker_key, rules=rules)
