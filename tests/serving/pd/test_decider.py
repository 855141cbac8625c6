"""Decisions among replicas: ranks and centroids, replicas that come and go, reservations."""

import json
import pickle
from pathlib import Path

import numpy as np
import pytest

from eldr.routing.partition import Partition
from eldr.serving.pd.decider import Decider, Replica, bind, measured
from eldr.serving.pd.options import RoutingOptions
from eldr.serving.pd.route import Route
from eldr.signature import Signature, encode
from tests.serving.ray.engine import GEOMETRY, TOPICS, counts


def partition(workers: int = TOPICS) -> Partition:
    rows = np.stack([counts(t % TOPICS, 16) for t in range(workers)]).astype(np.float32)
    rows /= np.linalg.norm(rows.reshape(workers, -1), axis=1)[:, None, None]
    ones = np.ones((GEOMETRY.layers, GEOMETRY.experts), np.float32)
    names = tuple(f"fitted-{i}" for i in range(workers))
    return Partition(GEOMETRY, names, rows, ones, np.ones(GEOMETRY.layers, np.bool_))


@pytest.fixture
def locality(tmp_path: Path) -> RoutingOptions:
    path = tmp_path / "partition.safetensors"
    partition().save(path)
    return RoutingOptions(policy="locality_band", partition=str(path), tau=0.1)


def route(topic: int, request_id: str = "r") -> Route:
    signature = Signature(counts(topic, 16), 16)
    return Route(request_id, signature=json.dumps(encode(signature, GEOMETRY)).encode())


def replicas(*names: str, **ranks: int) -> list[Replica]:
    found = {**{name: rank for rank, name in enumerate(names)}, **ranks}
    return [Replica(name, rank, GEOMETRY) for name, rank in found.items()]


def chosen(decider: Decider, topic: int) -> str | None:
    """Where a request of a topic goes, without leaving it there."""
    one = route(topic)
    try:
        return decider.reserve(one, decider.fleet.names)
    finally:
        one.close()


def test_centroids_follow_ranks() -> None:
    bound = bind(partition(), {"x": 2, "a": 0, "q": 1, "k": 3})
    assert bound.names == ("a", "q", "x", "k")
    for rank in range(TOPICS):
        assert (bound.centroids[rank] == partition().centroids[rank]).all()


def test_binding_depends_on_nothing_but_the_replicas() -> None:
    """Two proxies that met the replicas in another order agree."""
    ranks = {"a": 0, "b": 1, "c": 2, "d": 3, "e": 4, "f": 5}
    first = bind(partition(), ranks)
    second = bind(partition(), dict(reversed(ranks.items())))
    assert first.names == second.names
    assert (first.centroids == second.centroids).all()


def test_more_replicas_than_centroids_share_and_two_claims_of_one_rank_are_no_error() -> None:
    bound = bind(partition(2), {"a": 0, "b": 1, "c": 2, "d": 1})
    assert set(bound.names) == {"a", "b", "c", "d"}
    rows = {name: bound.centroids[i].tobytes() for i, name in enumerate(bound.names)}
    assert rows["a"] != rows["b"]
    assert set(rows.values()) == {rows["a"], rows["b"]}


def test_topics_go_to_the_replica_of_their_centroid(locality: RoutingOptions) -> None:
    decider = Decider(locality)
    decider.members(replicas("a", "b", "c", "d"))
    assert [chosen(decider, t) for t in range(TOPICS)] == ["a", "b", "c", "d"]


def test_a_replacement_takes_the_dead_ones_place(locality: RoutingOptions) -> None:
    decider = Decider(locality)
    decider.members(replicas("a", "b", "c", "d"))
    decider.members(replicas(a=0, c=2, d=3))
    assert chosen(decider, 1) in {"a", "c", "d"}
    decider.members(replicas(a=0, c=2, d=3, new=1))
    assert [chosen(decider, t) for t in range(TOPICS)] == ["a", "new", "c", "d"]


def test_scaling_up_and_down_keeps_everyone_served(locality: RoutingOptions) -> None:
    decider = Decider(locality)
    for count in (1, 3, 6, 2, 4):
        names = [f"n{i}" for i in range(count)]
        decider.members(replicas(*names))
        assert {chosen(decider, t) for t in range(TOPICS)} <= set(names)
        assert all(chosen(decider, t) for t in range(TOPICS))
    decider.members([])
    assert chosen(decider, 0) is None


def test_a_failed_replica_is_avoided_and_used_when_nothing_else_is_there(
    locality: RoutingOptions,
) -> None:
    decider = Decider(locality)
    decider.members(replicas("a", "b", "c", "d"))
    one = route(2)
    assert decider.reserve(one, decider.fleet.names) == "c"
    one.failed.add("c")
    assert decider.reserve(one, decider.fleet.names) != "c"
    one.failed.update("abd")
    assert decider.reserve(one, decider.fleet.names) in set("abcd")
    assert decider.fleet.running == 1  # every new choice gave the one before it back
    one.close()
    assert decider.fleet.running == 0


def test_a_replica_serve_cannot_send_to_is_not_offered_twice(locality: RoutingOptions) -> None:
    decider = Decider(locality)
    decider.members(replicas("a", "b", "c"))
    one = route(0)
    offers = [decider.reserve(one, decider.fleet.names) for _ in range(3)]
    assert sorted(offers) == ["a", "b", "c"]
    assert decider.reserve(one, ["b"]) == "b"
    one.close()
    decider.fleet.check_integrity()


def test_a_route_closed_while_the_router_decides_keeps_nothing(locality: RoutingOptions) -> None:
    decider = Decider(locality)
    decider.members(replicas("a", "b"))
    one = route(0)
    one.close()
    assert decider.reserve(one, decider.fleet.names) == "a"
    assert decider.fleet.running == 0


def test_what_a_replica_gets_of_a_route_is_its_id() -> None:
    assert pickle.loads(pickle.dumps(route(1, "req-7"))) == "req-7"


def test_bad_signatures_are_counted_by_reason_and_routed_by_load(locality: RoutingOptions) -> None:
    records = []
    decider = Decider(locality, records.append)
    decider.members(replicas("a", "b"))
    for raw, reason in ((b"{", "malformed"), (b'{"v":99}', "version"), (None, "no_signature")):
        one = Route("r", signature=raw)
        assert decider.reserve(one, decider.fleet.names) in {"a", "b"}
        one.close()
        assert str(records[-1].decision.reason) == reason


def sample(topic: int, number: int = 1) -> dict:
    """What a replica measured that decoded two requests of a topic at a time."""
    use = np.where(counts(topic, 16) > 0, 4, 0).tolist()
    sums = {"steps": 4, "seconds": 0.04, "tokens": 8, "kv_tokens": 64}
    return measured(number, {**sums, "distinct": [32, 32], "use": use}, {})


def test_measured_use_shows_the_requests_of_another_proxy() -> None:
    """Another proxy sent topic 1 to `a` and topic 0 to `b`; this one never sent anything."""
    decider = Decider(RoutingOptions(policy="marginal_cost", trust=1.0))
    told = [Replica("a", 0, GEOMETRY, sample(1)), Replica("b", 1, GEOMETRY, sample(0))]
    decider.members(told)
    assert [chosen(decider, topic) for topic in (0, 1)] == ["b", "a"]
    before = decider.fleet.status()
    decider.members(told)
    assert decider.fleet.status() == before  # an interval counts once
    swapped = [Replica("a", 0, GEOMETRY, sample(0, 2)), Replica("b", 1, GEOMETRY, sample(1, 2))]
    decider.members(swapped)
    assert [chosen(decider, topic) for topic in (0, 1)] == ["a", "b"]


def test_measured_is_the_difference_of_two_readings() -> None:
    early = {
        "steps": 10, "seconds": 1.0, "tokens": 20, "kv_tokens": 100,
        "distinct": [30, 20], "use": [[10, 0], [5, 5]],
    }  # fmt: skip
    late = {
        "steps": 14, "seconds": 1.5, "tokens": 32, "kv_tokens": 180,
        "distinct": [40, 30], "use": [[14, 2], [5, 9]],
    }  # fmt: skip
    found = measured(3, late, early)
    assert found.pop("use") == bytes([255, 128, 0, 255])
    assert found == {
        "number": 3, "steps": 4, "seconds": 0.5, "tokens": 12, "kv_tokens": 80, "distinct": 20.0,
    }  # fmt: skip
    assert "use" not in measured(4, late, late)
