"""The application on a real local Ray, with mock engines: routing, failures, scaling, operators."""

import json
import os
import re
import signal
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import pytest

from eldr.demo import commands
from eldr.routing.partition import load_partition
from tests.serving.pd.test_decider import partition
from tests.serving.ray.cluster import cluster, until
from tests.serving.ray.engine import TOPICS, text_of

pytest.importorskip("ray", reason="Ray is not installed (extra eldr[ray])")
pytestmark = [pytest.mark.servers, pytest.mark.timeout(900)]

NO_CPU = {"num_cpus": 0}


AUTOSCALING = {
    "min_replicas": 1,
    "max_replicas": 3,
    "target_ongoing_requests": 1,
    "metrics_interval_s": 0.5,
    "look_back_period_s": 1.0,
    "upscale_delay_s": 0.5,
    "downscale_delay_s": 1.0,
}


def config(path: Path, **decode) -> dict:
    return {
        "application": "tests.serving.ray.engine:open_application",
        "engine": {"pause": 0.02},
        "prefill": {"actor": NO_CPU},
        "decode": {"replicas": TOPICS, "actor": NO_CPU, **decode},
        "proxy": {"actor": NO_CPU, "replicas": 2},
        "routing": {"policy": "locality_band", "partition": str(path), "tau": 0.1},
        "measure_interval": 0.2,
        "requests": {"worker_headers": True},
        "operator": True,
    }


@pytest.fixture(scope="module")
def file(tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("partition") / "p.safetensors"
    partition().save(path)
    return path


@pytest.fixture(scope="module")
def app(file):
    with cluster(config(file)) as running:
        yield running


def eldr(*arguments) -> None:
    commands.eldr(*map(str, arguments))


def ranks(app) -> dict[str, int]:
    """Rank of every decode replica that answers; one that is leaving may not."""
    rows = app.get("/eldr/every/decode/health")
    return {row["replica"]: row["rank"] for row in rows if "replica" in row}


def complete(app, topic: int, word: str, *, stream: bool = False) -> str:
    """Serves one request and checks its answer; the decode replica's name."""
    prompt = f"topic {topic} {word}"
    body = {"model": "m", "prompt": prompt, "max_tokens": 6, "stream": stream}
    headers, raw = app.post("/v1/completions", body)
    if stream:
        events = [e.removeprefix(b"data: ") for e in raw.split(b"\n\n")[:-1]]
        assert events.pop() == b"[DONE]"
        words = [json.loads(e)["choices"][0]["text"] for e in events]
    else:
        words = json.loads(raw)["choices"][0]["text"].split()
    assert words == text_of(prompt)
    return headers["x-eldr-decode-worker"]


def test_every_proxy_sends_a_topic_to_the_replica_of_its_rank(app) -> None:
    by_rank = ranks(app)
    assert sorted(by_rank.values()) == list(range(TOPICS))
    with ThreadPoolExecutor(8) as pool:
        jobs = [
            (t, pool.submit(complete, app, t, f"w{i}", stream=i % 2 == 0))
            for i in range(10)
            for t in range(TOPICS)
        ]
        assert all(by_rank[job.result()] == topic for topic, job in jobs)


def test_headers_tell_the_decision_as_eldr_serve_does(app) -> None:
    body = {"model": "m", "prompt": "topic 3 told", "max_tokens": 6}
    headers, _ = app.post("/v1/completions", body)
    told = {k.removeprefix("x-eldr-"): v for k, v in headers.items() if k.startswith("x-eldr-")}
    by_rank = {rank: name for name, rank in ranks(app).items()}
    assert told["decode-worker"] == by_rank[3]
    assert told["prefill-worker"] in {r["replica"] for r in app.every("prefill", "/health")}
    assert (told["policy"], told["branch"], told["band"]) == ("locality_band", "nearest", "1")
    assert told["candidates"] == str(TOPICS)
    assert 0 < float(told["score"]) <= 1


def test_another_routing_restarts_no_engine(app, file) -> None:
    before = {row["pid"] for pool in ("prefill", "decode") for row in app.every(pool, "/health")}
    changed = config(file)
    changed["routing"] = {"policy": "marginal_cost"}
    app.redeploy(changed)
    until(lambda: decided_by(app, "another") == "marginal_cost", 60)
    app.redeploy(config(file))
    until(lambda: decided_by(app, "and back") == "locality_band", 60)
    after = {row["pid"] for pool in ("prefill", "decode") for row in app.every(pool, "/health")}
    assert after == before


def test_a_configuration_that_serve_refuses_leaves_the_old_one(app, file) -> None:
    changed = config(file)
    changed["routing"] = {"policy": "no such"}
    with pytest.raises(AssertionError, match="no policy 'no such'"):
        app.redeploy(changed)
    assert decided_by(app, "still") == "locality_band"


def decided_by(app, word: str) -> str:
    """The policy that decided a request."""
    headers, _ = app.post("/v1/completions", {"model": "m", "prompt": f"topic 0 {word}"})
    return headers["x-eldr-policy"]


def test_operators_see_decisions_replicas_and_the_prefill_pool(app) -> None:
    complete(app, 0, "x")
    until(lambda: app.get("/eldr/decisions")["total"] > 0, 30)  # one of two proxies answers
    row = app.get("/eldr/decisions")["decisions"][0]
    assert row["policy"] == "locality_band"
    assert row["prefill_worker"] in {r["replica"] for r in app.every("prefill", "/health")}
    assert len(app.get("/eldr/workers")["decode"]) == TOPICS
    assert app.get("/eldr/prefill/eldr/info")["role"] == "prefill"
    assert app.get("/v1/models")["data"][0]["id"] == "m"
    steps = [json.loads(r["body"])["steps"] for r in app.every("decode", "/eldr/decode")]
    assert all(steps)


def test_signatures_are_recorded_and_fitted_through_the_proxy(app, tmp_path) -> None:
    prompts, recorded, fitted = (tmp_path / name for name in ("p.jsonl", "r.npz", "f.safetensors"))
    lines = [json.dumps({"prompt": f"topic {i % TOPICS} {i}"}) for i in range(4 * TOPICS)]
    prompts.write_text("\n".join(lines) + "\n")
    eldr("record", "--prefill", f"{app.url}/eldr/prefill", "--prompts", prompts, "-o", recorded)
    eldr("fit", recorded, "--workers", str(TOPICS), "-o", fitted)
    found = load_partition(fitted)
    want = {row.tobytes() for row in partition().centroids > 0}
    assert {row.tobytes() for row in found.centroids > 0} == want  # one centroid per topic


def test_rays_metrics_page_carries_eldrs(app) -> None:
    complete(app, 1, "metrics")

    def exported() -> set[str]:
        with urllib.request.urlopen(app.metrics_url, timeout=180) as answer:
            text = answer.read().decode()
        return set(re.findall(r"^ray_(eldr_serve_\w+)\{", text, re.M))

    wanted = {
        *("eldr_serve_decisions_total", "eldr_serve_requests_total"),
        *("eldr_serve_decision_seconds_bucket", "eldr_serve_decode_steps_total"),
        *("eldr_serve_decode_tokens_total", "eldr_serve_decode_distinct_experts_total"),
    }
    until(lambda: wanted <= exported(), 90)  # Ray reports every ten seconds


def test_errors_are_told_in_openais_words(app) -> None:
    with pytest.raises(AssertionError, match=r"HTTP 404: .*no such model"):
        app.post("/v1/completions", {"model": "other", "prompt": "topic 0 x"})
    with pytest.raises(AssertionError, match=r"HTTP 400: .*`prompt` is missing"):
        app.post("/v1/completions", {"model": "m"})
    with pytest.raises(AssertionError, match=r"HTTP 404: .*no route"):
        app.post("/v2", {})


def test_a_killed_replica_costs_no_request_and_its_successor_takes_its_place(app) -> None:
    victim = next(row for row in app.every("decode", "/health") if row["rank"] == 1)
    with ThreadPoolExecutor(8) as pool:
        first = [pool.submit(complete, app, 1, f"a{i}") for i in range(16)]
        first[0].result()
        os.kill(victim["pid"], signal.SIGKILL)
        second = [pool.submit(complete, app, 1, f"b{i}") for i in range(16)]
        served = [job.result() for job in first + second]
    assert len(served) == 32

    def replaced() -> bool:
        now = ranks(app)
        return len(now) == TOPICS and victim["replica"] not in now

    until(replaced, 120)
    heir = next(name for name, rank in ranks(app).items() if rank == 1)
    until(lambda: complete(app, 1, "again") == heir, 60)


@contextmanager
def under_load(app) -> Iterator[None]:
    """Four clients send requests of all topics; each answer is checked."""
    running = True

    def client(number: int) -> int:
        done = 0
        while running:
            complete(app, (number + done) % TOPICS, f"c{number}-{done}", stream=done % 2 == 0)
            done += 1
        return done

    with ThreadPoolExecutor(4) as pool:
        clients = [pool.submit(client, n) for n in range(4)]
        try:
            yield
        finally:
            running = False
        assert all(job.result() > 0 for job in clients)


def test_scaling_and_a_rolling_update_under_load_fail_nothing(app, file) -> None:
    """Two replicas fewer, then engines with new options, while requests keep coming."""
    changes = [
        config(file, replicas=2),
        config(file, replicas=3, engine={"pause": 0.01}),
        config(file),
    ]
    with under_load(app):
        for change in changes:
            app.redeploy(change)
    until(lambda: sorted(ranks(app).values()) == list(range(TOPICS)), 120)
    by_rank = {rank: name for name, rank in ranks(app).items()}
    for topic in range(TOPICS):
        until(lambda t=topic: complete(app, t, "after") == by_rank[t], 60)


def test_the_autoscaler_adds_and_removes_replicas_under_load(app, file) -> None:
    app.redeploy(config(file, autoscaling=AUTOSCALING))
    until(lambda: len(ranks(app)) == 1, 120)
    with under_load(app):
        until(lambda: len(ranks(app)) == 3, 120)
    until(lambda: len(ranks(app)) == 1, 120)
    assert {complete(app, topic, "alone") for topic in range(TOPICS)} == set(ranks(app))
