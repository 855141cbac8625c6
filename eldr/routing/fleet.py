"""The fleet: the one owner of running requests, on which worker each runs and what that costs."""

from __future__ import annotations

import logging
import threading
from collections.abc import Collection, Iterable

import numpy as np
import numpy.typing as npt

from eldr.geometry import Geometry
from eldr.routing import integrity
from eldr.routing.activation import ActivationModel, Shrinkage
from eldr.routing.decision import Choice, Context, Decision, Slots
from eldr.routing.expert_load import ExpertLoad
from eldr.routing.fixed import I16, U16
from eldr.routing.integrity import Running
from eldr.routing.policies.base import Policy, least_requests
from eldr.routing.request import Reason, RouteRequest
from eldr.routing.step_fit import StepSample
from eldr.routing.worker import Worker, WorkerTable

_MASK = (1 << 64) - 1
_log = logging.getLogger(__name__)


class NoWorkerError(RuntimeError):
    """No decode worker can take the request: none joined, all draining, or all excluded."""


class Fleet:
    """Workers, running requests and a policy; `reserve` chooses and commits in one step.

    Thread-safe. Without a geometry, or for requests without a usable signature, every policy
    decides on load alone and the decision says why.

    Args:
        policy: may be replaced at any time by assignment.
        workers: join at once.
        geometry: of the signatures; may be learnt later with `set_geometry`.
        shrinkage: of the activation probabilities.
        min_coverage: signatures that cover less of the prompt are not used.
        trust: how far measurements (`observe`) correct predictions; with several routers in front
            of one fleet they are how a router sees the requests of the others.
        seed: of the policies' draws.
    """

    def __init__(
        self,
        policy: Policy,
        workers: Iterable[Worker] = (),
        *,
        geometry: Geometry | None = None,
        shrinkage: Shrinkage | None = None,
        min_coverage: float = 0.5,
        trust: float = 0.0,
        seed: int = 0,
    ) -> None:
        if not 0.0 <= min_coverage <= 1.0:
            raise ValueError(f"fleet: min_coverage must be in [0, 1], got {min_coverage}")
        if not 0.0 <= trust <= 1.0:
            raise ValueError(f"fleet: trust must be in [0, 1], got {trust}")
        self.policy = policy
        self.trust = trust
        self.min_coverage = min_coverage
        self.activations: ActivationModel | None = None
        self._geometry: Geometry | None = None
        self._table = WorkerTable(None)
        self._slots: dict[str, int] = {}
        self._running: dict[str, Running] = {}
        self._candidates: Slots = np.zeros(0, np.intp)
        self._seed, self._sequence = seed, 0
        self._lock = threading.RLock()
        if geometry is not None:
            self.set_geometry(geometry, shrinkage)
        for worker in workers:
            self.join(worker)

    # Membership

    @property
    def geometry(self) -> Geometry | None:
        """The geometry that signatures must have, None = not known yet."""
        return self._geometry

    def set_geometry(self, geometry: Geometry, shrinkage: Shrinkage | None = None) -> None:
        """Starts tracking expert load; needs a fleet whose running requests carry none.

        Raises:
            ValueError: the fleet already has another geometry.
        """
        with self._lock:
            if self._geometry == geometry:
                return
            if self._geometry is not None:
                raise ValueError(f"fleet: geometry is {self._geometry}, not {geometry}")
            self._geometry = geometry
            self.activations = ActivationModel(geometry, shrinkage)
            self._table.experts = ExpertLoad(geometry.cells)
            self._table.experts.resize(len(self._table.workers))

    def join(self, worker: Worker) -> None:
        """Adds a worker, which takes requests at once.

        Raises:
            ValueError: the name is in the fleet already.
        """
        with self._lock:
            if worker.name in self._slots:
                raise ValueError(f"fleet: worker {worker.name!r} is in the fleet already")
            self._slots[worker.name] = self._table.put(worker)
            self._changed()

    def drain(self, name: str, draining: bool = True) -> None:
        """Stops (or with draining=False resumes) giving a worker new requests.

        Raises:
            KeyError: no such worker.
        """
        with self._lock:
            self._table.open[self._slot(name)] = not draining
            self._changed()

    def leave(self, name: str) -> tuple[str, ...]:
        """Removes a worker at once and returns the ids of the requests that ran on it.

        Those reservations end here; releasing them later answers False.

        Raises:
            KeyError: no such worker.
        """
        with self._lock:
            slot = self._slot(name)
            lost = tuple(i for i, running in self._running.items() if running.slot == slot)
            for request_id in lost:
                self.release(request_id)
            del self._slots[name]
            self._table.drop(slot)
            self._changed()
            return lost

    def _slot(self, name: str) -> int:
        if name not in self._slots:
            raise KeyError(f"fleet: no worker {name!r}; there are {sorted(self._slots)}")
        return self._slots[name]

    def _changed(self) -> None:
        self._candidates = np.flatnonzero(self._table.open)

    # Reservations

    def reserve(self, request: RouteRequest, exclude: Collection[str] = ()) -> Decision:
        """Chooses a worker with the policy and commits the choice, atomically.

        Args:
            request: the request; its id must not be running.
            exclude: names of workers not to use, e.g. those that just failed this request.

        Raises:
            NoWorkerError: no worker is open and not excluded.
            ValueError: the id is running already.
        """
        with self._lock:
            if request.id in self._running:
                raise ValueError(f"fleet: request {request.id!r} is reserved already")
            candidates = self._allowed(exclude)
            choice, step = self._choose(request, candidates)
            table = self._table
            load = table.requests.take(candidates)
            self._commit(request, choice, step)
            worker = table.workers[choice.slot]
            assert worker is not None  # candidates hold workers only
            return Decision(
                request.id, worker, self.policy.name, choice, candidates, table.names, load
            )

    def release(self, request_id: str) -> bool:
        """Ends a reservation; True exactly once per reservation, False when there is none."""
        with self._lock:
            running = self._running.pop(request_id, None)
            if running is None:
                return False
            table = self._table
            table.requests[running.slot] -= 1
            table.kv_tokens[running.slot] -= running.kv_tokens
            if running.step is not None and table.experts is not None:
                table.experts.remove(running.slot, running.step)
            return True

    def observe(
        self,
        name: str,
        sample: StepSample,
        use: npt.NDArray[np.float64] | None = None,
    ) -> None:
        """Takes what a worker measured in the last interval.

        The policy learns its step cost from `sample`. With `trust` > 0, `use` corrects the expert
        load predicted for the worker, and the batch sizes reveal requests of other routers.

        Args:
            name: the worker's; unknown names are ignored, it may just have left.
            sample: sums over the interval's decode steps.
            use: float64 [L, E] or [L*E], share of those steps in which each expert was read.

        Raises:
            ValueError: `use` of another geometry, or not in [0, 1].
        """
        with self._lock:
            slot = self._slots.get(name)
            if slot is None:
                return
            self.policy.observe(sample)
            if self.trust == 0.0:
                return
            table = self._table
            if sample.steps == 0:  # idle: nobody else runs there, and predictions stand
                table.others[slot] = 0.0
                if table.experts is not None:
                    table.experts.measured(slot, np.zeros(table.experts.cells), 0.0)
            if not sample.usable:
                return
            mean = sample.requests / sample.steps
            table.others[slot] = self.trust * max(0.0, mean - float(table.requests[slot]))
            if use is not None and table.experts is not None:
                flat = np.asarray(use, np.float64).reshape(-1)
                if len(flat) != table.experts.cells or not ((flat >= 0) & (flat <= 1)).all():
                    raise ValueError(
                        f"fleet: use of {name}: expected {table.experts.cells} shares in [0, 1], "
                        f"got {len(flat)} from {flat.min()} to {flat.max()}"
                    )
                table.experts.measured(slot, flat, self.trust)

    def report_others(self, name: str, requests: float) -> None:
        """Sets how many requests of others a worker was seen to run; they weigh like our own.

        Unknown names are ignored, the worker may just have left.
        """
        with self._lock:
            slot = self._slots.get(name)
            if slot is not None:
                self._table.others[slot] = max(0.0, requests)

    def _allowed(self, exclude: Collection[str]) -> Slots:
        candidates = self._candidates
        if exclude:
            names = self._table.names
            candidates = candidates[[names[slot] not in exclude for slot in candidates]]
        if len(candidates) == 0:
            raise NoWorkerError(
                f"no decode worker for a request: {len(self._slots)} in the fleet, "
                f"{len(self._candidates)} open, {len(exclude)} excluded"
            )
        return candidates

    def _choose(self, request: RouteRequest, candidates: Slots) -> tuple[Choice, U16 | None]:
        """The choice, and what it adds to the chosen worker's expert load."""
        draw = self._draw()
        try:
            found, reason = self._admit(request)
            activation, step = found or (None, None)
            context = Context(request, self._table, candidates, activation, reason, draw)
            return self.policy.choose(context), step
        except Exception:
            # A fault of ours must not cost a request: load alone decides, and the reason counts it.
            _log.exception("policy %s failed on request %s", self.policy.name, request.id)
            reason = Reason.POLICY_ERROR
            context = Context(request, self._table, candidates, None, reason, draw)
            return least_requests(context, reason), None

    def _admit(self, request: RouteRequest) -> tuple[tuple[I16, U16] | None, Reason | None]:
        """The request's activation and its costs, or why there are none."""
        signature = request.signature
        if signature is None:
            return None, request.problem or Reason.NO_SIGNATURE
        geometry, model = self._geometry, self.activations
        if geometry is None or model is None:
            return None, Reason.GEOMETRY
        if signature.counts.shape != (geometry.layers, geometry.experts):
            return None, Reason.GEOMETRY
        if signature.coverage < self.min_coverage:
            return None, Reason.LOW_COVERAGE
        if signature.tokens < 1 or signature.coverage <= 0:
            return None, Reason.EMPTY
        found = model.admit(signature)
        return found, None if found is not None else Reason.EMPTY

    def _commit(self, request: RouteRequest, choice: Choice, step: U16 | None) -> None:
        table, slot, kv_tokens = self._table, choice.slot, request.kv_tokens
        table.requests[slot] += 1
        table.kv_tokens[slot] += kv_tokens
        table.take_turn(slot)
        table.lengths.add(request.new_tokens)
        if step is not None and table.experts is not None:
            table.experts.add(slot, step)
        self._running[request.id] = Running(slot, kv_tokens, step)

    def _draw(self) -> int:
        """64 pseudo-random bits per decision (splitmix64 of seed and sequence number)."""
        self._sequence += 1
        z = (self._seed * 0xD1342543DE82EF95 + self._sequence * 0x9E3779B97F4A7C15) & _MASK
        z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
        z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & _MASK
        return z ^ (z >> 31)

    # Reading

    def __len__(self) -> int:
        """Workers in the fleet, draining ones included."""
        return len(self._slots)

    @property
    def names(self) -> tuple[str, ...]:
        """Names of the workers, in slot order."""
        return tuple(name for name in self._table.names if name)

    @property
    def running(self) -> int:
        """Reservations that were not released."""
        return len(self._running)

    def status(self) -> list[dict[str, object]]:
        """One row per worker: name, url, rank, weight, draining, requests, kv_tokens, experts.

        `experts` is the expected number of distinct experts per step, summed over layers; None
        when expert load is not tracked.
        """
        with self._lock:
            table = self._table
            distinct = None if table.experts is None else table.experts.distinct()
            return [
                {
                    "name": worker.name,
                    "url": worker.url,
                    "rank": worker.rank,
                    "weight": worker.weight,
                    "draining": not bool(table.open[slot]),
                    "requests": int(table.requests[slot]),
                    "kv_tokens": int(table.kv_tokens[slot]),
                    "experts": None if distinct is None else float(distinct[slot]),
                }
                for slot, worker in enumerate(table.workers)
                if worker is not None
            ]

    def check_integrity(self) -> None:
        """Recomputes every counter from the running requests.

        Raises:
            AssertionError: a counter or a survival row differs; the message names it.
        """
        with self._lock:
            integrity.check(self._table, self._running.values(), self._slots)
