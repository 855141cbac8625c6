"""Keeps a router's partition fitted to its workers and, if asked to, to the traffic that it sees.

Signatures that decisions decoded anyway are kept by reference. Now and then a process of the lowest
priority (`eldr.routing.refit_job`) compares them with the partition and fits again if they drifted;
whatever happens to it, requests are decided with the partition that is there, or on load.
"""

from __future__ import annotations

import asyncio
import logging
import random
import time
from collections import deque
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from typing import Any

from eldr.routing import refit_job
from eldr.routing.partition import Partition
from eldr.routing.policies.locality import LocalityBand
from eldr.routing.refit import Drift, Window, remap
from eldr.serving.decode_pool import DecodePool
from eldr.serving.endpoints import Endpoint
from eldr.serving.policy import seated
from eldr.serving.refit_process import COMMAND, in_a_process
from eldr.signature import Signature

log = logging.getLogger(__name__)

REMAPPED, FAILED, LATE, SUPERSEDED = "remapped", "failed", "timed_out", "superseded"
OUTCOMES = (
    *(refit_job.ADOPTED, refit_job.UNCHANGED, refit_job.REJECTED),
    *(FAILED, LATE, SUPERSEDED, REMAPPED),
)
# Signatures for a fit: this many a worker and in all, or a full window.
_PER_WORKER, _LEAST = 16, 64
# Newest signatures that say whose centroid a joining worker shares.
REMAP_WINDOW = 256
# The gain in an idle fleet says nothing of the times that matter.
_LEAST_BATCH = 2.0
_LOAD_WEIGHT = 0.01


@dataclass(slots=True)
class Origin:
    """Where the partition in use comes from, and since when (seconds since the epoch)."""

    source: str = "file"
    time: float = field(default_factory=time.time)

    def now(self, source: str) -> None:
        """There is another one from now on: of operator, refit, first_fit or remap."""
        self.source, self.time = source, time.time()


@dataclass(frozen=True, slots=True, kw_only=True)
class RefitRules:
    """When and on what to fit.

    Attributes:
        every: seconds from one attempt to the next; 0 = only remaps, when workers join or leave.
        window: signatures kept; each is 4 bytes a layer and expert.
        sample: share of the requests whose signature is kept.
        limit: seconds that an attempt may take.
    """

    every: float
    window: int = 1024
    sample: float = 1.0
    limit: float = 120.0
    seed: int = 0
    command: Sequence[str] = COMMAND


def with_partition(pool: DecodePool) -> list[LocalityBand]:
    """Policies, of arms and of shadows, that decide by a partition."""
    found = [*pool.arms.values(), *(shadow.fleet.policy for shadow in pool.shadows)]
    return [policy for policy in found if isinstance(policy, LocalityBand)]


class Refits:
    """The window, the refits, and the remaps when decode workers join or leave.

    Attributes:
        outcomes: attempts by outcome.
        drift: last measured, None before.
    """

    def __init__(
        self,
        pool: DecodePool,
        policies: Sequence[LocalityBand],
        origin: Origin,
        rules: RefitRules,
    ) -> None:
        geometry = pool.fleet.geometry
        if geometry is None:
            raise ValueError("refit: the fleet has no geometry, so there are no signatures")
        self._pool, self._policies, self._origin, self._rules = pool, policies, origin, rules
        self._geometry = geometry
        self._held: deque[Signature] = deque(maxlen=rules.window)
        self._random = random.Random(rules.seed)
        self._load = 0.0
        self._enough, self._changed = asyncio.Event(), asyncio.Event()
        self._first = self.partition is None
        self._forced = _shared(self.partition)
        self._generation = 0
        self._adopting = asyncio.Lock()
        # Centroids that no worker has had yet; the next workers without one take them.
        self._vacant = self._without_worker()
        self.outcomes = dict.fromkeys(OUTCOMES, 0)
        self.drift: Drift | None = None
        self._last: dict[str, Any] | None = None

    @property
    def partition(self) -> Partition | None:
        """In use by every policy that wants one."""
        return self._policies[0].partition

    @property
    def paused(self) -> bool:
        """Whether load decides for now, since the partition's estimated gain is negative."""
        return self._policies[0].paused

    @property
    def rows(self) -> int:
        """Signatures in the window."""
        return len(self._held)

    @property
    def bytes(self) -> int:
        """What the window holds of memory."""
        return 4 * self._geometry.cells * len(self._held)

    # From the event loop, at every request or change

    def add(self, signature: Signature) -> None:
        """Keeps a decided request's signature, if it is of the sample and covers enough."""
        fleet = self._pool.fleet
        if signature.coverage < fleet.min_coverage:
            return
        if self._rules.sample < 1.0 and self._random.random() >= self._rules.sample:
            return
        self._held.append(signature)
        self._load += _LOAD_WEIGHT * (fleet.running / len(fleet) - self._load)
        if self._first and len(self._held) >= self._needed():
            self._first = False
            self._enough.set()

    def member_event(self, endpoint: Endpoint, event: str) -> None:
        """A decode worker joined or left: the partition is remapped soon."""
        if event == "left" and endpoint.awaited:
            self._vacant.append(endpoint.name)  # it never came: another one may in its place
        if event in ("joined", "left"):
            self._changed.set()

    def replace(self, partition: Partition) -> None:
        """An operator's partition: used at once, whatever is being fitted."""
        self._generation += 1
        for policy in self._policies:
            policy.use(partition)
            policy.paused = False
        self.drift, self._first = None, False
        self._vacant = self._without_worker()
        self._origin.now("operator")
        self._changed.set()

    def describe(self) -> dict[str, Any]:
        """JSON values for GET /eldr/partition."""
        return {
            "every_s": self._rules.every,
            "window": {
                "rows": self.rows,
                "size": self._rules.window,
                "needed": self._needed(),
                "bytes": self.bytes,
            },
            "paused": self.paused,
            "outcomes": self.outcomes,
            "drift": None if self.drift is None else asdict(self.drift),
            "last": self._last,
        }

    # In the background

    async def run(self) -> None:
        """Remaps, and fits if it is to, until cancelled."""
        megabytes = 4e-6 * self._geometry.cells * self._rules.window
        rows, every = self._rules.window, self._rules.every
        log.info("partition: the last %d signatures are kept, at most %.1f MB", rows, megabytes)
        async with asyncio.TaskGroup() as group:
            group.create_task(self._remapping(), name="remap")
            if every:
                log.info("partition: refit every %g s", every)
                group.create_task(self._fitting(), name="refit")

    async def _fitting(self) -> None:
        while True:
            with suppress(TimeoutError):
                async with asyncio.timeout(self._rules.every):
                    await self._enough.wait()
            self._enough.clear()
            if len(self._held) < self._needed():
                continue
            started = time.perf_counter()
            try:
                outcome = await self._attempt()
            except TimeoutError:
                outcome = LATE
                log.warning("refit took longer than %g s and was ended", self._rules.limit)
            except Exception as error:  # whatever it is: the next attempt may do better
                outcome = FAILED
                log.warning("refit failed, decisions go on as before: %s", error, exc_info=True)
            self._count(outcome, time.perf_counter() - started)

    async def _remapping(self) -> None:
        while True:
            await self._changed.wait()
            self._changed.clear()
            try:
                if await self._adopt(None, "remap", self._generation):
                    self._forced = True  # a worker that joined shares a centroid until then
                    self._count(REMAPPED)
            except Exception:
                self._count(FAILED)
                log.exception("the partition could not be remapped to %s", self._names())

    def _needed(self) -> int:
        return min(self._rules.window, max(_LEAST, _PER_WORKER * len(self._pool.endpoints)))

    def _members(self) -> list[str]:
        return [endpoint.name for endpoint in self._pool.endpoints]

    def _names(self) -> list[str]:
        """Who has a centroid: the members, and whoever may come in a vacant place."""
        return list(dict.fromkeys((*self._members(), *self._vacant)))

    def _without_worker(self) -> list[str]:
        here, partition = self._members(), self.partition
        return [] if partition is None else [n for n in partition.names if n not in here]

    def _seat(self, partition: Partition) -> Partition:
        """Gives vacant centroids to members that have none."""
        here = self._members()
        vacant = [n for n in self._vacant if n in partition.names and n not in here]
        partition, self._vacant = seated(partition, here, vacant)
        return partition

    def _count(self, outcome: str, seconds: float | None = None) -> None:
        self.outcomes[outcome] += 1
        if seconds is not None:
            self._last = {"outcome": outcome, "time": time.time(), "seconds": seconds}
        log.info("partition: %s", outcome)

    async def _attempt(self) -> str:
        generation, old, forced = self._generation, self.partition, self._forced
        job = refit_job.Job(
            self._geometry,
            list(self._held),
            tuple(self._names()),
            old,
            max(_LEAST_BATCH, self._load),
            forced,
            self._rules.seed,
        )
        async with asyncio.timeout(self._rules.limit):
            proposal = await in_a_process(job, self._rules.command)
        if generation != self._generation:
            return SUPERSEDED
        if proposal.partition is not None:
            source = "first_fit" if old is None else "refit"
            # A worker that joined during the fit needs another one.
            self._forced = set(self._names()) != set(proposal.partition.names)
            if not await self._adopt(proposal.partition, source, generation):
                return SUPERSEDED
        self.drift = proposal.drift
        for policy in self._policies:
            policy.paused = proposal.pause
        if proposal.verdict == refit_job.REJECTED:
            log.warning("the estimated gain of a new partition is negative: it is not used")
        return proposal.verdict

    async def _adopt(self, new: Partition | None, source: str, generation: int) -> bool:
        """Uses a partition, or the one in use, with centroids for exactly the workers there are.

        All that takes time happens in a thread; then every policy changes in the same step.

        Returns:
            False if there is nothing to do, or an operator's partition came first.
        """
        async with self._adopting:
            before, partition = self.partition, new or self.partition
            if not self._members() or partition is None:
                return False
            partition = self._seat(partition)
            names = self._names()
            if new is None and before is not None and set(names) == set(before.names):
                return False
            latest = list(self._held)[-REMAP_WINDOW:]
            fitted, prepared = await asyncio.to_thread(
                _prepare, partition, names, latest, len(self._policies)
            )
            if generation != self._generation:
                return False
            for policy, ready in zip(self._policies, prepared, strict=True):
                policy.use(fitted, ready)
            self._origin.now(source)
            if set(names) != set(self._names()):
                self._changed.set()
            return True


def _prepare(
    partition: Partition, names: Sequence[str], latest: Sequence[Signature], policies: int
) -> tuple[Partition, list[Any]]:
    if set(names) != set(partition.names):
        window = Window(partition.geometry, max(2, len(latest)))
        for signature in latest:
            window.add(signature)
        partition = remap(partition, names, window)
    return partition, [LocalityBand.prepare(partition) for _ in range(policies)]


def _shared(partition: Partition | None) -> bool:
    """Whether workers share a centroid: the next refit tells them apart."""
    if partition is None:
        return False
    return len({c.tobytes() for c in partition.centroids}) < partition.workers
