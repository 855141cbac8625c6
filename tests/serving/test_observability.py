"""What an operator sees: metrics, decision log, shadow policies, experiments."""

from __future__ import annotations

import asyncio
import json
import random
from pathlib import Path

import pytest
from prometheus_client.parser import text_string_to_metric_families

from eldr.geometry import Geometry
from eldr.serving import metrics
from eldr.serving.decision_log import DecisionLog, read_decisions
from eldr.serving.experiment import Experiment, Mean, difference, half_width
from eldr.serving.metrics import ENDPOINTS, OUTCOMES
from eldr.serving.state import Router
from eldr.signature import decode
from tests.serving.mocks.worker import MockWorker, Plan
from tests.serving.rig import Rig, events, rig, until

GEOMETRY = Geometry(2, 8, 2)


async def _scrape(r: Rig) -> dict[str, list[tuple[dict[str, str], float]]]:
    async with r.client.get(r.url + "/metrics") as response:
        text = await response.text()
    out: dict[str, list[tuple[dict[str, str], float]]] = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            out.setdefault(sample.name, []).append((sample.labels, sample.value))
    return out


async def test_metrics_have_closed_names_and_count_what_happened() -> None:
    prefill = MockWorker("prefill", geometry=GEOMETRY)
    async with rig([prefill], 2, policy="marginal_cost", shadow=("least_requests",)) as r:
        await r.stream()
        await r.complete()
        async with r.client.post(r.url + "/v1/completions", data=b"{") as response:
            assert response.status == 400
        got = await _scrape(r)
        assert all(name.startswith("eldr_router_") for name in got)
        outcomes = {
            lab["outcome"]: value
            for lab, value in got["eldr_router_requests_total"]
            if lab["endpoint"] == "/v1/completions"
        }
        assert outcomes == {**dict.fromkeys(OUTCOMES, 0.0), "ok": 2.0, "client_error": 1.0}
        assert got["eldr_router_decision_seconds_count"] == [({}, 2.0)]
        assert got["eldr_router_first_byte_seconds_count"] == [({}, 1.0)]
        assert got["eldr_router_time_per_output_event_seconds_count"] == [({}, 1.0)]
        assert got["eldr_router_locality_hits_total"] == [({}, 2.0)]
        assert got["eldr_router_signature_missing_total"] == [({}, 0.0)]
        for role in ("prefill", "decode"):
            assert got[f"eldr_router_{role}_requests_total"] == [({}, 2.0)]
            assert got[f"eldr_router_active_{role}_requests"] == [({}, 0.0)]
        assert got["eldr_router_pending_decode_requests"] == [({}, 0.0)]
        assert got["eldr_router_decode_pending_seconds_count"] == [({}, 2.0)]
        assert got["eldr_router_band_size_count"] == [({}, 0.0)]
        assert sum(v for _, v in got["eldr_router_active_requests"]) == 0
        up = [v for lab, v in got["eldr_router_workers"] if lab["state"] == "up"]
        assert up == [1.0, 2.0]
        assert sum(v for _, v in got["eldr_router_shadow_decisions_total"]) == 2.0


async def test_label_sets_are_closed() -> None:
    """Every series but those of policies and workers is there before the first request."""
    async with rig(1, 2, attempts=2, eject_failures=1, several_choices="whole") as r:
        before = await _scrape(r)
        for plan in (Plan(), Plan(status=500), Plan(status=404), Plan(reset="answer"), Plan(fin=1)):
            r.decode[0].plan = r.decode[1].plan = plan
            await r.complete()
            await r.stream()
        r.decode[0].plan = r.decode[1].plan = Plan()
        await r.complete(n=2)
        for path in ("/v1/completions?x=1", "/v1/other", "/v1/chat/completions"):
            async with r.client.post(r.url + path, data=b"{", headers={"X-User-ID": "u"}):
                pass
        after = await _scrape(r)
    new = {
        name: [lab for lab, _ in after[name] if lab not in [old for old, _ in before.get(name, [])]]
        for name in after
        if not name.startswith("eldr_router_request_duration_seconds")
    }
    assert {name for name, added in new.items() if added} == {"eldr_router_decisions_total"}
    assert after["eldr_router_decisions_total"][0][0] == {
        "policy": "least_requests",
        "branch": "least_requests",
    }
    durations = after["eldr_router_request_duration_seconds_count"]
    assert {lab["endpoint"] for lab, _ in durations} <= set(ENDPOINTS)


async def test_workers_beyond_some_share_a_label(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(metrics, "_MOST_WORKERS", 2)
    async with rig(1, 5) as r:
        gate = asyncio.Event()
        for worker in r.decode:
            worker.plan = Plan(gate=gate)
        calls = [asyncio.create_task(r.complete()) for _ in range(5)]
        await until(lambda: all(w.active == 1 for w in r.decode))
        got = [
            (lab["worker"], value)
            for lab, value in (await _scrape(r))["eldr_router_active_requests"]
            if lab["role"] == "decode"
        ]
        gate.set()
        await asyncio.gather(*calls)
    assert got == [(r.decode[0].url, 1.0), (r.decode[1].url, 1.0), ("other", 3.0)]


async def test_names_of_the_conventions_are_there() -> None:
    """vllm-router's names for a P/D fleet, under our prefix, and our own."""
    async with rig(1, 1) as r:
        got = await _scrape(r)
    for name in (
        *("requests_total", "prefill_requests_total", "decode_requests_total"),
        *("active_prefill_requests", "active_decode_requests", "pending_decode_requests"),
        *("decode_pending_seconds_bucket", "decision_seconds_bucket", "band_size_bucket"),
        *("locality_hits_total", "signature_missing_total", "fallback_total", "build_info"),
    ):
        assert f"eldr_router_{name}" in got


async def test_prompt_tokens_are_counted_by_what_prefill_had_cached() -> None:
    async with rig(1, 1) as r:
        usage = {"prompt_tokens": 40, "prompt_tokens_details": {"cached_tokens": 32}}
        r.prefill[0].plan = Plan(body=json.dumps({"id": "x", "usage": usage}).encode())
        await r.complete()
        await r.complete()
        counts = r.router.metrics.prompt_tokens.counts
        assert counts == {("cached",): 64, ("computed",): 16}


async def test_expected_distinct_experts_of_live_and_shadow() -> None:
    """Two running requests of the same experts: together they need 4 per layer at most, apart 8."""
    prefill = MockWorker("prefill", geometry=GEOMETRY)
    async with rig([prefill], 2, policy="marginal_cost", shadow=("round_robin",)) as r:
        fleet, (shadow,) = r.router.decode.fleet, r.router.decode.shadows
        for worker in r.decode:
            worker.plan.stall = 1
        bodies = [{"prompt": "x" * 200, "stream": True} for _ in range(2)]
        async with (
            r.client.post(r.url + "/v1/completions", json=bodies[0]),
            r.client.post(r.url + "/v1/completions", json=bodies[1]),
        ):
            await until(lambda: fleet.running == 2)
            assert shadow.fleet.running == 2
            gauges = {
                lab["kind"]: value
                for lab, value in (await _scrape(r))["eldr_router_expected_distinct_experts"]
            }
            assert set(gauges) == {"live", "shadow"}
            assert all(0 < value <= GEOMETRY.cells for value in gauges.values())
        await until(lambda: shadow.fleet.running == 0)
        shadow.fleet.check_integrity()


async def test_shadow_follows_the_membership() -> None:
    async with rig(1, 2, shadow=("round_robin",)) as r:
        await r.complete()
        r.router.decode.leave(r.decode[0].url)
        await r.complete()
        assert r.router.decode.shadows[0].fleet.names == (r.decode[1].url,)


async def test_decision_log_has_decisions_outcomes_and_signatures(tmp_path: Path) -> None:
    path = tmp_path / "decisions.jsonl"
    prefill = MockWorker("prefill", geometry=GEOMETRY)
    options = {"policy": "marginal_cost", "decision_log": str(path), "shadow": ("round_robin",)}
    async with rig([prefill], 2, **options, decision_log_signatures=True) as r:
        await r.stream()
        await r.complete()
    rows = list(read_decisions(str(path)))
    assert [row["outcome"] for row in rows] == ["ok", "ok"]
    assert rows[0]["ttft_s"] > 0
    assert rows[0]["tpot_s"] > 0
    assert (rows[0]["events"], rows[1]["events"]) == (4, 0)
    assert rows[1]["tpot_s"] is None
    for row in rows:
        assert row["policy"] == "marginal_cost"
        assert set(row["candidates"]) == set(row["scores"])
        assert row["shadows"]["round_robin"] in row["candidates"]
        assert decode(row["signature"], GEOMETRY).tokens == row["prompt_tokens"]


async def test_every_decided_request_is_logged_however_it_ended(tmp_path: Path) -> None:
    path = tmp_path / "decisions.jsonl"
    async with rig(1, 1, attempts=1, decision_log=str(path)) as r:
        r.decode[0].plan = Plan(reset="answer")
        assert (await r.complete())[0] == 502
        r.decode[0].plan = Plan(stall=1)
        body = {"prompt": "x", "stream": True}
        async with r.client.post(r.url + "/v1/completions", json=body) as response:
            await response.content.readany()
        await until(lambda: r.router.decode.fleet.running == 0)  # the client has gone
        r.decode[0].plan = Plan(status=400)
        assert (await r.complete())[0] == 400
    outcomes = [row["outcome"] for row in read_decisions(str(path))]
    assert outcomes == ["worker_error", "cancelled", "client_error"]


async def test_request_that_cannot_be_noted_is_answered_all_the_same(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(*_: object) -> None:
        raise ValueError("no room")

    monkeypatch.setattr(Router, "observe", fail)
    async with rig(1, 1) as r:
        assert (await r.complete())[0] == 200
        status, raw = await r.stream()
        assert (status, events(raw)[-1]) == (200, b"[DONE]")
    assert caplog.text.count("not noted") == 2


def test_decision_log_rotates_and_survives_a_disk_that_fails(tmp_path: Path) -> None:
    path = tmp_path / "d.jsonl"
    log = DecisionLog(str(path), sample=1.0, size=100, files=3, signatures=False)
    for number in range(6):
        log.add({"number": number, "pad": "x" * 100})
        log.flush()
    files = sorted(p.name for p in tmp_path.iterdir())
    assert files == ["d.jsonl", "d.jsonl.1", "d.jsonl.2"]
    assert [next(read_decisions(str(tmp_path / f)))["number"] for f in files] == [5, 4, 3]
    nowhere = str(tmp_path / "missing" / "d.jsonl")
    broken = DecisionLog(nowhere, sample=1.0, size=100, files=3, signatures=False)
    broken.add({"number": 1})
    broken.flush()
    assert broken.dropped == 1


def test_decision_log_samples(tmp_path: Path) -> None:
    log = DecisionLog(str(tmp_path / "d"), sample=0.25, size=1, files=1, signatures=False, seed=3)
    assert 150 < sum(log.wanted() for _ in range(1000)) < 350


@pytest.mark.parametrize("line", ["{", "[]", "{}", '{"v": 99}'])
def test_wrong_line_of_a_log_names_file_and_line(tmp_path: Path, line: str) -> None:
    path = tmp_path / "d.jsonl"
    path.write_text('{"v": 1}\n' + line + "\n")
    with pytest.raises(ValueError, match=r"d\.jsonl:2"):
        list(read_decisions(str(path)))


async def test_experiment_by_request_reports_both_arms() -> None:
    async with rig(1, 2, ab=("round_robin", "least_requests"), ab_design="request") as r:
        for _ in range(24):
            await r.stream()
        async with r.client.get(r.url + "/eldr/experiment") as response:
            got = await response.json()
        counts = {name: arm["tpot_s"]["requests"] for name, arm in got["arms"].items()}
        assert sum(counts.values()) == 24
        assert all(n > 3 for n in counts.values())
        assert got["differences"]["least_requests"]["against"] == "round_robin"
        by_policy = {row.decision.policy for row in r.router.decisions.newest(100)}
        assert by_policy == set(counts)


def test_switchback_gives_the_fleet_to_one_arm_per_period_and_leaves_out_the_borders() -> None:
    trial = Experiment(["a", "b"], "switchback", period=10.0, seed=1)
    seen = {}
    for period in range(40):
        start = period * 10.0
        early, late = trial.assign(start), trial.assign(start + 5.0)
        assert early.arm is late.arm
        seen[late.period] = late.arm.name
        slow = 2.0 if late.arm.name == "b" else 1.0
        trial.observe(early, start + 1.0, slow * 9, slow * 9)  # before the fleet had settled
        trial.observe(late, start + 5.0, slow, slow)
        last = late
    assert set(seen.values()) == {"a", "b"}
    trial.assign(400.0)
    trial.observe(last, 395.0, 99.0, 99.0)  # ended in another period
    got = trial.describe()
    assert got["arms"]["a"]["tpot_s"]["mean"] == 1.0
    assert got["arms"]["b"]["tpot_s"]["mean"] == 2.0
    assert got["differences"]["b"]["tpot_s"]["verdict"] == "slower"
    left_out = {name: arm["left_out"] for name, arm in got["arms"].items()}
    assert left_out[last.arm.name]["straddled"] == 1
    assert sum(arm["straddled"] for arm in left_out.values()) == 1
    assert sum(arm["unsettled"] for arm in left_out.values()) == 40
    json.dumps(got)


def test_interval_covers_the_truth_about_as_often_as_it_says() -> None:
    rng = random.Random(5)
    covered = 0
    for _ in range(1000):
        a, b = Mean(), Mean()
        for _ in range(8):
            a.add(rng.gauss(1.0, 0.2))
            b.add(rng.gauss(1.3, 0.5))
        low, high = difference(a, b)["ci95"]
        covered += low <= 0.3 <= high
    assert 930 <= covered <= 975


def test_mean_and_its_interval_by_hand() -> None:
    mean = Mean()
    for value in (1.0, 2.0, 3.0, 4.0):
        mean.add(value)
    assert mean.mean == 2.5
    assert mean.error == pytest.approx(0.6454972)
    assert half_width(mean.error, 3) == pytest.approx(3.18 * 0.6454972)


@pytest.mark.parametrize("arms", [["a"], ["a", "a"], []])
def test_experiment_needs_two_policies(arms: list[str]) -> None:
    with pytest.raises(ValueError, match="two or more"):
        Experiment(arms, "request", 1.0)
