"""Reserves a decode worker for each prefilled request and records why it was that one."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import count
from types import MappingProxyType

from eldr import tracing
from eldr.routing.decision import Decision
from eldr.routing.fleet import Fleet, NoWorkerError
from eldr.routing.policies.base import Policy
from eldr.routing.request import RouteRequest
from eldr.routing.step_fit import StepSample
from eldr.routing.worker import Worker
from eldr.serving.answers import Prefilled
from eldr.serving.call import Call
from eldr.serving.decision_headers import decision_headers
from eldr.serving.decisions import DecisionBuffer, Record
from eldr.serving.endpoints import Endpoint
from eldr.serving.experiment import Experiment, Slot
from eldr.serving.metrics import Metrics
from eldr.serving.pool import Names, Pool
from eldr.serving.shadow import Shadow
from eldr.serving.signatures import read_signature
from eldr.signature import Signature


class Ticket:
    """One reservation; `release` ends it, once, however often it is called.

    Attributes:
        record: what was decided and why.
        slot: arm of the experiment, if one runs.
        shadows: choice of each shadow policy.
        headers: for the client, if it may see them.
        decided: `time.perf_counter()` when it was made.
    """

    __slots__ = (
        "_pool",
        "decided",
        "endpoint",
        "headers",
        "record",
        "shadows",
        "signature",
        "slot",
    )

    def __init__(
        self, pool: DecodePool, endpoint: Endpoint, record: Record, slot: Slot | None
    ) -> None:
        self._pool = pool
        self.endpoint = endpoint
        self.record = record
        self.slot = slot
        self.shadows: dict[str, str | None] = {}
        self.signature: bytes | None = None
        self.headers: list[tuple[bytes, bytes]] = []
        self.decided = time.perf_counter()

    @property
    def band(self) -> frozenset[str]:
        """Workers that were as good a choice as this one; empty if the policy knows no band."""
        decision = self.record.decision
        if decision.choice.band is None:
            return frozenset()
        return frozenset(decision.names[slot] for slot in decision.choice.band)

    def release(self) -> None:
        """Gives the worker's place back."""
        self._pool.release(self)


class DecodePool(Pool):
    """The decode workers; the fleet decides among those that may get a request.

    Attributes:
        on_signature: called with the signature of every request, not again when it is retried.
    """

    def __init__(
        self,
        endpoints: Iterable[Endpoint],
        fleet: Fleet,
        metrics: Metrics,
        decisions: DecisionBuffer,
        *,
        worker_headers: bool = False,
        shadows: Sequence[Shadow] = (),
        experiment: Experiment | None = None,
        arms: Mapping[str, Policy] = MappingProxyType({}),
    ) -> None:
        self.fleet = fleet
        self.shadows = shadows
        self.experiment = experiment
        self.arms = arms
        self._metrics = metrics
        self._decisions = decisions
        self._worker_headers = worker_headers
        self._ids = count()
        self._routing: dict[str, Worker] = {}
        self.on_signature: Callable[[Signature], None] | None = None
        super().__init__("decode", endpoints)

    def join(self, endpoint: Endpoint) -> None:
        """Adds a member, to the fleet as well."""
        super().join(endpoint)
        worker = Worker(endpoint.name, str(endpoint.base), endpoint.rank)
        self._routing[endpoint.name] = worker
        self.fleet.join(worker)

    def drain(self, name: str, draining: bool = True) -> None:
        """Stops, or resumes, giving a member new requests."""
        super().drain(name, draining)
        self.fleet.drain(name, draining)

    def settle(self, endpoint: Endpoint) -> bool:
        """Lets a leaving member go once it is idle; True if it went now."""
        gone = super().settle(endpoint)
        if gone:
            self.fleet.leave(endpoint.name)
            del self._routing[endpoint.name]
        return gone

    def weigh(self, endpoint: Endpoint, others: float) -> None:
        """A member was seen to run so many requests of others; the fleet weighs them."""
        super().weigh(endpoint, others)
        self.fleet.report_others(endpoint.name, others)

    def restarted(self, endpoint: Endpoint, since: float) -> None:
        """A member's process is another one; nobody else's requests are on it."""
        super().restarted(endpoint, since)
        self.fleet.report_others(endpoint.name, 0.0)

    def observe(self, endpoint: Endpoint, sample: StepSample) -> None:
        """Every policy, live, arm or shadow, learns from a member's measured steps."""
        self.fleet.observe(endpoint.name, sample)
        for policy in self.arms.values():
            if policy is not self.fleet.policy:
                policy.observe(sample)
        for shadow in self.shadows:
            shadow.fleet.observe(endpoint.name, sample)

    def reserve(
        self,
        call: Call,
        prefilled: Prefilled,
        failed: Names = frozenset(),
        band: Names = frozenset(),
    ) -> Ticket | None:
        """Picks a worker and reserves it in the same step; None if there is no candidate.

        Args:
            call: the request.
            prefilled: what its prefill left behind.
            failed: workers that failed this request.
            band: workers that were as good a choice as the failed one; they are tried first.
        """
        start = time.perf_counter()
        slot = self._assign()
        request = self._request(call, prefilled)
        if tracing.ON:
            tracing.push(tracing.ROUTE, len(self._members))
        decision = self._decide(request, failed, band)
        if tracing.ON:
            tracing.pop()
        if decision is None:
            return None
        elapsed = time.perf_counter() - start
        if self.on_signature is not None and request.signature is not None and not failed:
            self.on_signature(request.signature)
        endpoint = self._members[decision.worker.name]
        endpoint.running += 1
        ticket = Ticket(self, endpoint, self._record(call, decision, request, elapsed), slot)
        ticket.signature = prefilled.signature
        for shadow in self.shadows:
            ticket.shadows[shadow.name] = shadow.decide(request, endpoint.name, self._workers())
        if self._worker_headers:
            told = decision_headers(call.prefill_worker, decision)
            ticket.headers = [(name.encode(), value.encode()) for name, value in told.items()]
        return ticket

    def _assign(self) -> Slot | None:
        """The arm that decides this request; its policy takes the fleet's helm."""
        if self.experiment is None:
            return None
        slot = self.experiment.assign(self._now())
        self.fleet.policy = self.arms[slot.arm.name]
        return slot

    def _request(self, call: Call, prefilled: Prefilled) -> RouteRequest:
        signature, problem = read_signature(prefilled.signature, self.fleet.geometry)
        return RouteRequest(
            # Clients may repeat their own ids; the fleet's must be unique.
            id=f"{call.request_id}#{next(self._ids)}",
            signature=signature,
            problem=problem,
            prompt_tokens=prefilled.prompt_tokens,
            session=call.session,
        )

    def _workers(self) -> list[Worker]:
        """For shadow policies: all that have answered once."""
        members = self._members
        return [w for name, w in self._routing.items() if not members[name].awaited]

    def release(self, ticket: Ticket) -> None:
        """Ends a reservation; later calls for the same ticket do nothing."""
        request_id = ticket.record.decision.request_id
        if self.fleet.release(request_id):
            ticket.endpoint.running -= 1
            for shadow in self.shadows:
                shadow.release(request_id)
            if ticket.endpoint.leaving:
                self.settle(ticket.endpoint)

    def _decide(self, request: RouteRequest, failed: Names, band: Names) -> Decision | None:
        if band and failed:
            # Other workers of the failed one's band are as good a choice as it was.
            failed_or_outside = failed | (self._members.keys() - band)
            out = next(iter(self.exclusions(failed_or_outside)))
            decision = self._try(request, out)
            if decision is not None:
                return decision
        for out in self.exclusions(failed):
            decision = self._try(request, out)
            if decision is not None:
                return decision
        return None

    def _try(self, request: RouteRequest, out: Names) -> Decision | None:
        try:
            return self.fleet.reserve(request, out)
        except NoWorkerError:
            return None

    def _record(
        self, call: Call, decision: Decision, request: RouteRequest, elapsed: float
    ) -> Record:
        signature = request.signature
        record = Record(
            time=time.time(),
            request_id=call.request_id,
            prefill_worker=call.prefill_worker,
            decision=decision,
            decision_us=elapsed * 1e6,
            prompt_tokens=request.kv_tokens,
            coverage=None if signature is None else signature.coverage,
        )
        self._decisions.add(record)
        self._metrics.decided(decision.policy, decision.branch, elapsed)
        self._metrics.explained(decision)
        return record
