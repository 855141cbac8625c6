"""One run: traffic meets a fleet; every decision is made by `eldr.routing`, as when serving."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from eldr.routing.fleet import NoWorkerError
from eldr.routing.policies.base import Policy
from eldr.routing.request import RouteRequest
from eldr.routing.worker import Worker
from eldr.signature import Signature
from eldr.simulation.events import FleetEvent, Kind, check_events
from eldr.simulation.pool import PoolConfig, Totals, make_pool
from eldr.simulation.prefill import PrefillConfig, first_tokens
from eldr.simulation.replay import Replay
from eldr.simulation.routers import Routers
from eldr.simulation.telemetry import Telemetry
from eldr.simulation.traffic import Traffic
from eldr.workload.traces import ExpertTrace

Seconds = npt.NDArray[np.float64]
PolicyFactory = Callable[[Sequence[str]], Policy]

# How a request can end. PENDING after a run is a bug, and `check` says so.
PENDING, DONE, FAILED, REJECTED = 0, 1, 2, 3


class ConservationError(AssertionError):
    """A run lost or doubled a request, or left load behind: a bug of the simulator."""


@dataclass(frozen=True, slots=True)
class RunConfig:
    """The fleet of a run.

    Attributes:
        workers: decode workers at the start, named w0, w1, ...
        pool: how they decode.
        prefill: what happens before.
        routers: routers in front of the fleet; requests go to them in turn.
        shared: every router uses all workers and knows only its own requests; otherwise each router
            owns a share of the workers.
        know_length: tell the policy how many tokens will be decoded.
        seed: of the policies' draws.
        events: workers that join, leave or fail during the run.
        telemetry: seconds between readings of the workers' counters by the routers, 0 = never.
        trust: how far routers believe them against their own predictions, see `Fleet`.
    """

    workers: int
    pool: PoolConfig
    prefill: PrefillConfig = field(default_factory=PrefillConfig)
    routers: int = 1
    shared: bool = False
    know_length: bool = False
    seed: int = 0
    events: tuple[FleetEvent, ...] = ()
    telemetry: float = 0.0
    trust: float = 0.0

    def __post_init__(self) -> None:
        if not 1 <= self.routers <= self.workers:
            raise ValueError(
                f"run: needs 1 <= routers <= workers, got {self.routers} and {self.workers}"
            )
        if not (math.isfinite(self.telemetry) and self.telemetry >= 0):
            raise ValueError(f"run: telemetry must be finite and >= 0, got {self.telemetry}")
        check_events(self.events, self.workers)


@dataclass(frozen=True, eq=False)
class Outcome:
    """What happened to each of N requests, and what each worker did.

    Attributes:
        traffic: the requests.
        first_token: seconds [N], end of prefill.
        end: seconds [N], last token; nan for requests that did not finish.
        worker: decode worker [N], -1 = none.
        status: PENDING, DONE, FAILED or REJECTED [N].
        totals: per worker.
        fallbacks: decisions made on load alone, by reason.
    """

    traffic: Traffic
    first_token: Seconds
    end: Seconds
    worker: npt.NDArray[np.int64]
    status: npt.NDArray[np.int8]
    totals: list[Totals]
    fallbacks: dict[str, int]

    @property
    def tpot(self) -> Seconds:
        """Seconds per output token after the first, [N]; nan where there was no second one."""
        tokens = (self.traffic.arrivals.output_tokens - 1).astype(np.float64)
        tokens[tokens < 1] = np.nan
        return np.asarray((self.end - self.first_token) / tokens)

    @property
    def ttft(self) -> Seconds:
        """Seconds from arrival to the first token, [N]."""
        return self.first_token - self.traffic.arrivals.times


class Run:
    """One simulated run; `execute` may be called once."""

    def __init__(
        self,
        trace: ExpertTrace,
        replay: Replay,
        signatures: Sequence[Signature],
        traffic: Traffic,
        config: RunConfig,
        policy: PolicyFactory,
        progress: Callable[[int], None] | None = None,
    ) -> None:
        self._config, self._traffic = config, traffic
        self._signatures, self._domains = signatures, trace.domains
        self._pool = make_pool(replay, config.pool)
        self._routers = Routers(config, trace.geometry, policy)
        for i in range(config.workers):
            self._join(f"w{i}", 0.0)
        count = len(traffic)
        self._first = first_tokens(traffic.arrivals, config.prefill)
        self._end = np.full(count, np.nan)
        self._worker = np.full(count, -1, np.int64)
        self._status = np.zeros(count, np.int8)
        self._fallbacks: dict[str, int] = {}
        self._telemetry, self._ticks = Telemetry(), 0
        self._progress, self._clock = progress, 0.0
        self._transfer = config.prefill.transfer(traffic.arrivals.input_tokens).tolist()

    def execute(self) -> Outcome:
        """Runs until every request has ended, then checks that nothing was lost.

        Raises:
            ConservationError: the run broke one of the simulator's own laws.
        """
        events = sorted(self._config.events, key=lambda e: e.time)
        at = 0
        for count, i in enumerate(np.argsort(self._first, kind="stable").tolist()):
            now = float(self._first[i])
            while at < len(events) and events[at].time <= now:
                self._happen(events[at])
                at += 1
            self._until(now)
            self._dispatch(i, now)
            if self._progress is not None and count % 1024 == 0:
                self._progress(count)
        for event in events[at:]:
            self._happen(event)
        self._until(math.inf)
        outcome = Outcome(
            self._traffic,
            self._first,
            self._end,
            self._worker,
            self._status,
            [self._pool.totals(w) for w in range(self._routers.created)],
            self._fallbacks,
        )
        self._check(outcome)
        return outcome

    def _until(self, now: float) -> None:
        tick = self._config.telemetry
        if tick and math.isfinite(now):
            while (self._ticks + 1) * tick <= now:
                self._ticks += 1
                self._collect(self._ticks * tick)
                self._telemetry(self._pool, self._routers)
        self._collect(now)

    def _collect(self, now: float) -> None:
        last = self._clock
        for time, worker, i in self._pool.advance(now):
            if self._status[i] != PENDING or worker != self._worker[i]:
                raise ConservationError(f"request {i} ended twice, or on another worker")
            if not last <= time <= now:
                raise ConservationError(f"request {i} ended at {time}, between {last} and {now}")
            last = time
            self._end[i] = time
            self._status[i] = DONE
            self._routers.release(i)
        self._clock = now

    def _dispatch(self, i: int, now: float) -> None:
        """Picks a worker and hands the request over; prefill has made its first token."""
        arrivals, row = self._traffic.arrivals, int(self._traffic.rows[i])
        steps = int(arrivals.output_tokens[i]) - 1
        if steps == 0:  # prefill made the only token
            self._status[i], self._end[i] = DONE, now
            return
        context = int(arrivals.input_tokens[i])
        if context + steps > self._config.pool.kv_tokens:
            self._status[i] = REJECTED
            return
        request = RouteRequest(
            id=str(i),
            signature=self._signatures[row],
            prompt_tokens=context,
            new_tokens=steps if self._config.know_length else None,
            domain=self._domains[int(self._traffic.domain[i])],
        )
        try:
            worker, reason = self._routers.reserve(i, request)
        except NoWorkerError:
            self._status[i] = REJECTED
            return
        if reason is not None:
            self._fallbacks[reason] = self._fallbacks.get(reason, 0) + 1
        self._worker[i] = worker
        self._pool.submit(worker, i, row, steps, context, now + self._transfer[i])

    def _join(self, name: str, now: float) -> None:
        self._routers.join(Worker(name), self._pool.add_worker(now))

    def _happen(self, event: FleetEvent) -> None:
        self._until(event.time)
        if event.kind is Kind.JOIN:
            self._join(event.worker, event.time)
        elif event.kind is Kind.LEAVE:
            self._routers.drain(event.worker)
        else:
            running, waiting = self._pool.fail(self._routers.leave(event.worker))
            self._status[running] = FAILED
            for i in waiting:  # nothing was streamed yet: the KV is fetched again, from prefill
                self._worker[i] = -1
                self._dispatch(i, event.time)

    def _check(self, outcome: Outcome) -> None:
        """Each request ended once, at a time that makes sense, and no load is left.

        Raises:
            ConservationError: otherwise.
        """
        if (outcome.status == PENDING).any():
            raise ConservationError(
                f"{int((outcome.status == PENDING).sum())} requests never ended"
            )
        done = outcome.status == DONE
        if (outcome.end[done] < outcome.first_token[done]).any():
            raise ConservationError("a request ended before its first token")
        if (outcome.first_token < self._traffic.arrivals.times).any():
            raise ConservationError("a request's first token came before the request")
        left = sum(t.running + t.waiting + t.reserved for t in outcome.totals)
        if left or self._routers.running:
            raise ConservationError(
                f"{left} in the pool, {self._routers.running} reserved at the end"
            )
        made = sum(t.tokens for t in outcome.totals)
        due = int((self._traffic.arrivals.output_tokens[done] - 1).sum())
        failed = bool((outcome.status == FAILED).any())
        if made < due or (made > due and not failed):
            raise ConservationError(f"{made} tokens made, {due} due")
        self._routers.check_integrity()
