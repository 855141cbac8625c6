"""What workers say about themselves: it adds to our own accounting and never replaces it.

At an interval every engine is asked for `/metrics` (vLLM's): requests that it runs beyond ours are
other routers' and weigh like our own; a worker whose KV cache is full is spared; a new start time
is a restart. Decode engines are also asked for `/eldr/decode`, from which `marginal_cost` learns
what a step costs. Whatever is missing, stale or nonsense leaves our own account as it is.
"""

from __future__ import annotations

import asyncio
import logging
import math
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import aiohttp
import orjson
from yarl import URL

from eldr.routing.step_fit import StepSample
from eldr.serving.decode_pool import DecodePool
from eldr.serving.endpoints import Endpoint
from eldr.serving.pool import Pool

log = logging.getLogger(__name__)

_LARGEST = 2**24
_SECONDS = 5.0
# A look that failed for so many intervals is stale.
_STALE = 3
_LINE = re.compile(
    rb"^(vllm:num_requests_running|vllm:num_requests_waiting|vllm:kv_cache_usage_perc"
    rb"|process_start_time_seconds)(\{[^\n}]*\})? ([^\s]+)",
    re.MULTILINE,
)
_RANK = re.compile(rb'engine="(\d+)"')
_COUNTERS = ("steps", "seconds", "tokens", "kv_tokens")


@dataclass(slots=True)
class Said:
    """What one answer of /metrics says; ranks of an engine are keys, None is all of them.

    Attributes:
        requests: running and waiting.
        kv_usage: share of the KV cache in use.
        started: when the process started, seconds since the epoch; 0 if it does not say.
    """

    requests: dict[int | None, float] = field(default_factory=dict)
    kv_usage: dict[int | None, float] = field(default_factory=dict)
    started: float = 0.0


def read_metrics(text: bytes) -> Said:
    """Reads vLLM's /metrics; what is not there stays empty, what is no sane number is left out."""
    said = Said()
    for name, labels, number in _LINE.findall(text):
        value = _number(number)
        if value is None:
            continue
        rank = _RANK.search(labels)
        ranks = {None, int(rank[1])} if rank else {None}
        for key in ranks:
            if name.startswith(b"vllm:num"):
                said.requests[key] = said.requests.get(key, 0.0) + value
            elif name.startswith(b"vllm:kv"):
                said.kv_usage[key] = max(said.kv_usage.get(key, 0.0), value)
            else:
                said.started = value
    return said


def _number(text: bytes) -> float | None:
    try:
        value = float(text)
    except ValueError:
        return None
    return value if math.isfinite(value) and value >= 0 else None


@dataclass(slots=True)
class _Engine:
    """What is known of the engine at one URL."""

    started: float = 0.0
    heard: float = -math.inf
    asked: float = 0.0
    excess: dict[str, float] = field(default_factory=dict)
    counters: dict[str, float] | None = None
    has_counters: bool = True
    silent: bool = False


class Telemetry:
    """Asks all members of both pools at an interval."""

    def __init__(
        self,
        session: aiohttp.ClientSession,
        pools: Sequence[Pool],
        decode: DecodePool,
        *,
        interval: float,
        kv_high: float,
    ) -> None:
        """What is asked, and what for.

        Args:
            session: for the requests.
            pools: all pools, `decode` among them.
            decode: learns from decode counters.
            interval: seconds between two looks.
            kv_high: share of a KV cache above which its worker is spared.
        """
        self._session, self._pools, self._decode = session, pools, decode
        self._interval, self._kv_high = interval, kv_high
        self._engines: dict[str, _Engine] = {}
        self._now = asyncio.get_running_loop().time

    async def run(self) -> None:
        """Looks until cancelled."""
        while True:
            await asyncio.sleep(self._interval)
            await self.look()

    async def look(self) -> None:
        """One look at every engine."""
        members: dict[str, list[tuple[Pool, Endpoint]]] = {}
        for pool in self._pools:
            for endpoint in pool.endpoints:
                members.setdefault(str(endpoint.base), []).append((pool, endpoint))
        for gone in self._engines.keys() - members.keys():
            del self._engines[gone]
        await asyncio.gather(*(self._look_at(base, here) for base, here in members.items()))

    async def _look_at(self, base: str, members: list[tuple[Pool, Endpoint]]) -> None:
        engine = self._engines.setdefault(base, _Engine())
        ours = {e.rank: _running(members, e.rank) for _, e in members}
        before, engine.asked = engine.asked, self._now()
        first = members[0][1]
        raw = await self._get(first.route("/metrics"))
        said = Said() if raw is None else read_metrics(raw)
        if said.requests:
            engine.heard, engine.silent = self._now(), False
        elif raw is not None and not engine.silent:
            engine.silent = True  # said once, not at every look
            log.info("%s has no vLLM metrics: its load is our own count alone", base)
        if said.started and engine.started and abs(said.started - engine.started) > 1.0:
            self._restarted(engine, members, before)
        engine.started = said.started or engine.started
        stale = self._now() - engine.heard > _STALE * self._interval
        for pool, endpoint in members:
            if said.requests or stale:
                most = max(ours[endpoint.rank], _running(members, endpoint.rank))
                self._weigh(engine, pool, endpoint, said, most)
        if members[0][0] is self._decode and engine.has_counters:
            await self._learn(engine, first)

    def _weigh(
        self, engine: _Engine, pool: Pool, endpoint: Endpoint, said: Said, ours: int
    ) -> None:
        """Takes over what is beyond our own account, and nothing else.

        Requests begin and end while the worker answers: of our count before and after the larger
        one is taken off, and of two looks the smaller excess counts.
        """
        requests = said.requests.get(endpoint.rank, 0.0)
        excess = max(0.0, requests - ours)
        last = engine.excess.get(endpoint.name, 0.0)
        engine.excess[endpoint.name] = excess
        pool.weigh(endpoint, min(excess, last))
        usage = said.kv_usage.get(endpoint.rank, said.kv_usage.get(None))
        endpoint.kv_usage = usage
        if usage is not None and usage >= self._kv_high:
            pool.full(endpoint, 2 * self._interval)

    def _restarted(
        self, engine: _Engine, members: list[tuple[Pool, Endpoint]], since: float
    ) -> None:
        engine.counters, engine.has_counters = None, True
        engine.excess.clear()
        for pool, endpoint in members:
            if endpoint.restarted_at < since:  # nobody has noticed it yet
                pool.restarted(endpoint, since)

    async def _learn(self, engine: _Engine, endpoint: Endpoint) -> None:
        """Passes the decode steps since the last look on to the policies."""
        raw = await self._get(endpoint.route("/eldr/decode"))
        if raw is None:
            return
        counters = read_counters(raw)
        if counters is None:
            engine.has_counters = False  # no decode engine of ours; asked again after a restart
            return
        last, engine.counters = engine.counters, counters
        if last is None:
            return
        change = {name: counters[name] - last[name] for name in counters}
        if any(value < 0 for value in change.values()):
            return  # another process counts; /metrics tells about its restart
        sample = StepSample(
            int(change["steps"]),
            change["seconds"],
            change["tokens"],
            change["distinct"],
            change["kv_tokens"],
        )
        if sample.usable:
            self._decode.observe(endpoint, sample)

    async def _get(self, url: URL) -> bytes | None:
        """A 200 answer's body; b"" for any other answer, None for none at all."""
        try:
            async with (
                asyncio.timeout(_SECONDS),
                self._session.get(url, allow_redirects=False) as response,
            ):
                if response.status != 200:
                    return b""
                raw = await response.content.read(_LARGEST)
                while len(raw) < _LARGEST and (more := await response.content.read(2**16)):
                    raw += more
                return raw
        except (aiohttp.ClientError, OSError):  # TimeoutError is an OSError
            return None


def _running(members: list[tuple[Pool, Endpoint]], rank: int | None) -> int:
    """Our requests on one rank of an engine, whatever it is used for."""
    return sum(endpoint.running for _, endpoint in members if endpoint.rank == rank)


def read_counters(raw: bytes) -> dict[str, float] | None:
    """The sums of an answer of /eldr/decode, None if it is not one."""
    try:
        answer: Any = orjson.loads(raw)
        out = {name: float(answer[name]) for name in _COUNTERS}
        out["distinct"] = float(sum(answer["distinct"]))
    except (ValueError, TypeError, KeyError):
        return None
    return out if answer["v"] == 1 and all(map(math.isfinite, out.values())) else None
