"""The decision among decode workers that are only names with facts: one fleet per process."""

from __future__ import annotations

import logging
import time
import weakref
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import count
from typing import Any

import numpy as np

from eldr.geometry import Geometry
from eldr.routing.fleet import Fleet, NoWorkerError
from eldr.routing.partition import Partition, load_partition
from eldr.routing.policies import make_policy
from eldr.routing.policies.locality import LocalityBand
from eldr.routing.refit import remap
from eldr.routing.request import RouteRequest
from eldr.routing.step_fit import StepSample
from eldr.routing.worker import Worker
from eldr.serving.decisions import DecisionBuffer, Record
from eldr.serving.pd.options import RoutingOptions
from eldr.serving.pd.route import Route
from eldr.serving.signatures import read_signature

log = logging.getLogger(__name__)

_SHARE = 255.0  # measured shares travel as bytes


@dataclass(frozen=True, slots=True)
class Replica:
    """What is known of a decode worker.

    Attributes:
        name: unique, and never used again.
        rank: which centroid is its own: dense, and passed on to whoever replaces a dead one.
        geometry: of its model, None if its engine is not patched.
        sample: what it measured last (`measured` makes it), empty before that.
    """

    name: str
    rank: int
    geometry: Geometry | None = None
    sample: Mapping[str, Any] | None = None


class Decider:
    """Chooses decode replicas with a policy and keeps account of what runs where. Thread-safe.

    Attributes:
        fleet: the account; workers are replicas.
        decisions: the last ones.
    """

    def __init__(
        self,
        options: RoutingOptions,
        on_decision: Callable[[Record], None] = lambda record: None,
    ) -> None:
        arguments: dict[str, Any] = (
            {"tau": options.tau} if options.policy == "locality_band" else {}
        )
        policy = make_policy(options.policy, **arguments)
        self._partition = load_partition(options.partition) if options.partition else None
        self.fleet = Fleet(
            policy, min_coverage=options.min_coverage, trust=options.trust, seed=options.seed
        )
        self.decisions = DecisionBuffer(options.decisions)
        self._on_decision = on_decision
        self._ranks: dict[str, int] = {}
        self._heard: dict[str, int] = {}
        self._ids = count()

    # Membership

    def members(self, replicas: Collection[Replica]) -> None:
        """Takes over the set of replicas that may get requests, and what they measured."""
        ranks = {replica.name: replica.rank for replica in replicas}
        for name in self._ranks.keys() - ranks.keys():
            self.fleet.leave(name)
            self._heard.pop(name, None)
        for name in sorted(ranks.keys() - self._ranks.keys(), key=lambda n: (ranks[n], n)):
            self.fleet.join(Worker(name))
        changed, self._ranks = ranks != self._ranks, ranks
        self._learn_geometry(replicas)
        if changed:
            self._bind()
        for replica in replicas:
            self._observe(replica)

    def _learn_geometry(self, replicas: Collection[Replica]) -> None:
        found = {replica.geometry for replica in replicas if replica.geometry is not None}
        if not found or self.fleet.geometry in found:
            return
        if self.fleet.geometry is None:
            self.fleet.set_geometry(found.pop())
        else:
            log.error("replicas serve %s, this application %s", found, self.fleet.geometry)

    def _bind(self) -> None:
        policy = self.fleet.policy
        if isinstance(policy, LocalityBand) and self._partition is not None and self._ranks:
            policy.use(bind(self._partition, self._ranks))

    def _observe(self, replica: Replica) -> None:
        sample = replica.sample
        if not sample or sample["number"] <= self._heard.get(replica.name, 0):
            return
        self._heard[replica.name] = sample["number"]
        geometry, use = self.fleet.geometry, sample.get("use")
        shares = None if use is None else np.frombuffer(use, np.uint8) / _SHARE
        if shares is not None and (geometry is None or len(shares) != geometry.cells):
            shares = None
        numbers = (sample[k] for k in ("steps", "seconds", "tokens", "distinct", "kv_tokens"))
        self.fleet.observe(replica.name, StepSample(*numbers), shares)

    # Decisions

    def reserve(self, route: Route, among: Collection[str]) -> str | None:
        """Chooses a replica, reserves it for the route, and names it; None if there is none.

        A reservation that the route still holds was for a replica to which Serve could not send:
        it ends here, and the choice goes elsewhere if it can.
        """
        started = time.perf_counter()
        if route.decision is not None:
            route.release()
            route.skipped.add(route.worker)
        signature, problem = read_signature(route.signature, self.fleet.geometry)
        request = RouteRequest(
            id=f"{route.request_id}#{next(self._ids)}",  # clients may repeat their ids
            signature=signature,
            problem=problem,
            prompt_tokens=route.prompt_tokens,
            session=route.session,
        )
        outside = frozenset(self.fleet.names) - frozenset(among)
        for out in self._exclusions(route):
            try:
                decision = self.fleet.reserve(request, out | outside)
            except NoWorkerError:
                continue
            route.hold(decision, lambda: self._release(request.id))
            record = Record(
                time=time.time(),
                request_id=route.request_id,
                prefill_worker=route.prefill,
                decision=decision,
                decision_us=(time.perf_counter() - started) * 1e6,
                prompt_tokens=request.kv_tokens,
                coverage=None if signature is None else signature.coverage,
            )
            self.decisions.add(record)
            self._on_decision(record)
            return decision.worker.name
        return None

    def _exclusions(self, route: Route) -> Iterator[frozenset[str]]:
        """What to leave out, from the most careful choice to the last resort."""
        failed = frozenset(route.failed)
        bad = failed | route.skipped
        if bad and route.band - bad:
            yield frozenset(self.fleet.names) - (route.band - bad)
        yield bad
        yield failed
        yield frozenset()

    def _release(self, request_id: str) -> None:
        self.fleet.release(request_id)


# Deciders of this process by deployment: a proxy shows its own to the operator.
_LIVE: weakref.WeakValueDictionary[str, Decider] = weakref.WeakValueDictionary()


def register(deployment: str, decider: Decider) -> None:
    """Makes a decider known to the rest of its process."""
    _LIVE[deployment] = decider


def registered(deployment: str) -> Decider | None:
    """The decider of a deployment in this process, None before its replicas are known."""
    return _LIVE.get(deployment)


def bind(partition: Partition, ranks: Mapping[str, int]) -> Partition:
    """Centroid r for the replica of rank r; a function of its arguments only.

    So proxies that know the same replicas agree, whatever each has seen before. A replica that
    replaces a dead one gets its rank, and with it its centroid. Ranks beyond the fitted number
    share the centroids of others. During a change two replicas may claim one rank: the second
    shares, too.
    """
    order = sorted(ranks, key=lambda name: (ranks[name], name))
    keys: list[str] = []
    for name in order:
        key = str(ranks[name])
        keys.append(key if key not in keys else f"{key} {name}")
    fitted = replace(partition, names=tuple(str(rank) for rank in range(partition.workers)))
    return replace(remap(fitted, keys), names=tuple(order))


def measured(number: int, now: Mapping[str, Any], before: Mapping[str, Any]) -> dict[str, Any]:
    """What a decode worker did between two answers of `GET /eldr/decode`, as small values.

    Returns:
        `number` (of the interval), `steps`, `seconds`, `tokens`, `distinct` and `kv_tokens` (sums),
        `use`: share of the steps in which each expert was read, one byte per cell.
    """
    steps = now["steps"] - before.get("steps", 0)
    sample = {
        "number": number,
        "steps": steps,
        "distinct": float(sum(now["distinct"]) - sum(before.get("distinct", ()))),
        **{k: now[k] - before.get(k, 0) for k in ("seconds", "tokens", "kv_tokens")},
    }
    if steps > 0:
        use = np.asarray(now["use"], np.float64)
        if "use" in before:
            use = use - np.asarray(before["use"], np.float64)
        sample["use"] = np.rint(np.clip(use / steps, 0, 1) * _SHARE).astype(np.uint8).tobytes()
    return sample
