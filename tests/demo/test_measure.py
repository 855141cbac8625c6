"""Figures of a run, from hand-made counters."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from eldr.demo.load import Timing
from eldr.demo.measure import (
    DecodeCounters,
    load_skew,
    policy_result,
    saving_at_equal_batch,
)
from eldr.demo.report import Saving, conclusion, saving, summary, table
from eldr.geometry import Geometry

_CHECKS = {"outputs_equal": True}


def _counters(steps: int, tokens: int, distinct: list[float]) -> DecodeCounters:
    use = np.full((len(distinct), 4), float(steps))
    by_batch = {4: (steps, int(sum(distinct)))}
    return DecodeCounters(steps, tokens, 0.01 * steps, np.array(distinct), use, by_batch)


def _timing(i: int, start: float, end: float, tpot: float | None = 0.004) -> Timing:
    return Timing(f"r-{i}", start, start, end, 10, tpot)


def _decisions(workers: list[str]) -> list[dict[str, object]]:
    return [
        {"request_id": f"r-{i}", "worker": w, "decision_us": 10.0 * (i + 1)}
        for i, w in enumerate(workers)
    ]


def test_means_are_over_all_steps_of_all_workers() -> None:
    workers = [_counters(10, 40, [30.0, 50.0]), _counters(30, 60, [60.0, 60.0])]
    timings = [_timing(0, 0, 2), _timing(1, 0, 2, None)]
    result = policy_result("p", workers, timings, _decisions(["a", "b"]))
    assert result.distinct_per_step == pytest.approx((40 + 60) / 40)
    assert result.distinct_per_token == pytest.approx((40 + 60) / 100)
    assert result.batch_per_step == pytest.approx(2.5)
    assert result.step_ms == pytest.approx(10.0)
    assert result.tpot_ms["p50"] == pytest.approx(4.0)
    assert result.decision_us["p50"] == pytest.approx(15.0)


def test_counters_subtract() -> None:
    delta = _counters(10, 40, [30.0]).since(_counters(4, 10, [12.0]))
    assert (delta.steps, delta.tokens) == (6, 30)
    assert delta.distinct.tolist() == [18.0]


def test_equal_batch_compares_only_batches_that_both_ran() -> None:
    # Same reads at batch 2, half at batch 4; batch 9 was run by one of them alone.
    ours = {2: (100, 200), 4: (10, 20)}
    peer = {2: (10, 20), 4: (10, 40), 9: (1000, 9000)}
    assert saving_at_equal_batch(ours, peer) == pytest.approx(100 * (1 - 40 / 60))
    assert saving_at_equal_batch(ours, {3: (1, 1)}) is None


def test_batches_subtract() -> None:
    late = dataclasses.replace(_counters(10, 40, [30.0]), by_batch={1: (5, 9), 2: (4, 8)})
    early = dataclasses.replace(_counters(10, 40, [30.0]), by_batch={1: (3, 5), 2: (4, 8)})
    assert late.since(early).by_batch == {1: (2, 4)}


def test_load_skew_counts_idle_workers() -> None:
    timings = [_timing(0, 0, 2), _timing(1, 0, 1), _timing(2, 1, 2)]
    assert load_skew(timings, _decisions(["a", "b", "b"]), 2) == pytest.approx(1.0)
    assert load_skew(timings, _decisions(["a", "a", "a"]), 3) == pytest.approx(3.0)


def test_a_request_without_decision_is_an_error() -> None:
    with pytest.raises(RuntimeError, match="no decision for r-1"):
        load_skew([_timing(0, 0, 1), _timing(1, 0, 1)], _decisions(["a"]), 1)


def test_no_step_is_an_error() -> None:
    with pytest.raises(RuntimeError, match="no decode step"):
        policy_result("p", [_counters(0, 0, [0.0])], [_timing(0, 0, 1)], _decisions(["a"]))


def _result(policy: str, distinct: float):
    steps = 10
    counters = _counters(steps, 40, [distinct * steps])
    return policy_result(policy, [counters], [_timing(0, 0, 1)], _decisions(["a"]))


def test_saving_is_against_the_better_load_balancer() -> None:
    results = [_result("round_robin", 40), _result("least_requests", 38), _result("x", 19)]
    assert saving(results, "x") == Saving("least_requests", 50.0, pytest.approx(50.0))
    assert saving(results, "round_robin") is None
    assert "50.0 % fewer" in conclusion(results, _CHECKS)
    assert "DIFFERENT" in conclusion(results, {"outputs_equal": False})
    assert "more" in conclusion([*results[:2], _result("x", 40)], _CHECKS)


def test_a_balancer_with_small_batches_does_not_pass_for_the_better_one() -> None:
    # Few experts per step on average, but only because its steps are small.
    uneven = dataclasses.replace(_result("round_robin", 10), by_batch={2: (90, 720), 8: (10, 400)})
    even = dataclasses.replace(_result("least_requests", 38), by_batch={8: (100, 3900)})
    ours = dataclasses.replace(_result("x", 30), by_batch={8: (100, 3000)})
    found = saving([uneven, even, ours], "x")
    assert found is not None
    assert found.balancer == "least_requests"
    assert found.equal_batch == pytest.approx(100 * (1 - 30 / 39))


def test_summary_and_table_hold_every_policy() -> None:
    results = [_result("round_robin", 40), _result("locality_band", 30)]
    found = summary(Geometry(1, 4, 2), "0.32.0", 240, results, _CHECKS)
    assert found["model"] == {"layers": 1, "experts": 4, "top_k": 2}
    assert set(found["policies"]) == {"round_robin", "locality_band"}
    needed = {"distinct_per_step", "tpot_ms", "decision_us", "max_over_mean_load"}
    assert needed <= set(found["policies"]["round_robin"])
    lines = table(results).splitlines()
    assert len({len(line) for line in lines}) == 1


def test_the_heat_map_groups_experts_by_the_most_specialised_policy(tmp_path, monkeypatch) -> None:
    from eldr.demo import plots

    seen = []
    original = plots._block_order
    monkeypatch.setattr(plots, "_block_order", lambda s: seen.append(s) or original(s))
    sharp = np.zeros((2, 1, 4))
    sharp[0, 0, [1, 3]] = sharp[1, 0, [0, 2]] = 1.0
    flat = np.full((2, 1, 4), 0.5)
    results = [
        dataclasses.replace(_result("round_robin", 30), use_share=flat),
        dataclasses.replace(_result("locality_band", 20), use_share=sharp),
        dataclasses.replace(_result("marginal_cost", 25), use_share=flat),
    ]
    plots.plot_heat_map(results, 0, tmp_path / "map.png")
    assert (seen[0] == sharp[:, 0]).all()
    assert sorted(original(sharp[:, 0])[:2]) == [1, 3]
    assert (tmp_path / "map.png").stat().st_size > 1000
