"""The step-cost model against figures worked out by hand, and its calibration."""

from __future__ import annotations

import json

import numpy as np
import pytest

from eldr.geometry import Geometry
from eldr.routing.cost import StepCost
from eldr.routing.step_fit import StepSample
from eldr.simulation.calibration import (
    fit,
    from_counters,
    from_gpu_check,
    is_gpu_check,
    load_cost,
)
from eldr.simulation.cost import Deployment, deployment, study_cost
from eldr.simulation.models import HARDWARE, MODELS
from eldr.workload.tiny import GEOMETRY

# Expert megabytes and totals in billions of parameters, from the models' own cards.
CARDS = {
    "qwen3-30b-a3b": (9.4, 30.5, 3.3),
    "gpt-oss-120b": (13.2, 117, 5.1),
    "gemma-4-26b-a4b": (11.9, 26, 4.0),
    "qwen3-235b-a22b": (18.9, 235, 22),
    "deepseek-v3": (44.0, 671, 37),
}


@pytest.mark.parametrize("name", CARDS)
def test_models_have_the_sizes_of_their_cards(name):
    spec = MODELS[name]
    expert_mb, total, active = CARDS[name]
    assert spec.expert_bytes / 1e6 == pytest.approx(expert_mb, rel=0.01)
    per_parameter = {"gpt-oss-120b": 17 / 32, "qwen3-235b-a22b": 1, "deepseek-v3": 1}.get(name, 2)
    experts = spec.layers * spec.experts * spec.expert_bytes / per_parameter / 1e9
    assert experts == pytest.approx(total, rel=0.13)
    assert spec.active / 1e9 == pytest.approx(active, rel=0.12)
    assert spec.source


def test_a_step_is_the_sum_of_its_reads():
    made = deployment("qwen3-30b-a3b", "h200")
    own = Geometry(48, 128, 8)
    cost = made.step_cost(own)
    rate = 4.8e12 * 0.75
    assert cost.expert == pytest.approx(3 * 2048 * 768 * 2 / rate)
    assert cost.kv == pytest.approx(48 * 2 * 4 * 128 * 2 / rate)
    fixed = 0.5e-3 + 48 * 40e-6
    assert cost.base == pytest.approx(fixed + made.model.dense_bytes / rate)
    # Two thirds of a step of 32 requests over 75 distinct experts are expert reads.
    step = cost.seconds(75 * 48, 32_000, 32)
    assert cost.expert * 75 * 48 / step == pytest.approx(0.70, abs=0.03)


def test_a_trace_of_another_geometry_keeps_the_share_of_experts():
    made = deployment("qwen3-30b-a3b", "h200")
    tiny = made.step_cost(GEOMETRY)
    own = made.step_cost(Geometry(48, 128, 8))
    assert tiny.expert * GEOMETRY.cells == pytest.approx(own.expert * 48 * 128)


def test_expert_parallel_reads_with_one_gpu_and_tensor_parallel_with_all():
    sliced = deployment("qwen3-235b-a22b", "h200", 4).step_cost(GEOMETRY)
    ranked = deployment("qwen3-235b-a22b", "h200", 4, 4).step_cost(GEOMETRY)
    assert ranked.expert == pytest.approx(4 * sliced.expert)
    assert ranked.base == pytest.approx(sliced.base)
    assert Deployment(MODELS["deepseek-v3"], HARDWARE["h200"], 8).kv_copies == 8


def test_memory_holds_the_weights_first():
    assert deployment("qwen3-30b-a3b", "h200").kv_tokens == pytest.approx(676_000, rel=0.01)
    with pytest.raises(ValueError, match="do not fit"):
        _ = deployment("deepseek-v3", "h200").kv_tokens


def test_every_assumption_is_marked():
    for hard in HARDWARE.values():
        for field in hard.__dataclass_fields__:
            assert getattr(hard, field).source


def test_unknown_names_and_impossible_parallelism():
    with pytest.raises(ValueError, match="qwen3-30b-a3b"):
        deployment("gpt-2", "h200")
    with pytest.raises(ValueError, match="mi300x"):
        deployment("tiny", "abacus")
    with pytest.raises(ValueError, match="expert"):
        deployment("tiny", "h200", 4, 2)


def test_calibration_finds_the_cost_behind_samples():
    true = StepCost(base=4e-3, expert=3e-5, kv=2e-8, request=1e-5)
    rng = np.random.default_rng(0)
    samples = []
    for _ in range(40):
        n, d, kv = rng.integers(1, 60), rng.integers(50, 200), rng.integers(1000, 60_000)
        steps = int(rng.integers(1, 50))
        seconds = steps * true.seconds(d, kv, n) * rng.normal(1, 1e-4)
        samples.append(StepSample(steps, seconds, steps * n, steps * d, steps * kv))
    found = fit(samples)
    assert found.r2 > 0.999
    for name in ("base", "expert", "kv", "request"):
        assert getattr(found.cost, name) == pytest.approx(getattr(true, name), rel=0.05)
    flat = [StepSample(1, s.seconds / s.steps, 8, s.distinct / s.steps) for s in samples]
    assert fit(flat).cost.request == 0.0  # never varied: it belongs to the base
    with pytest.raises(ValueError, match="two"):
        fit(samples[:1])
    with pytest.raises(ValueError, match="coefficients"):
        fit(samples[:3])


def test_samples_between_counters():
    before = {"geometry": "g", "steps": 10, "tokens": 80, "seconds": 1.0, "distinct": [5, 6]}
    after = {"geometry": "g", "steps": 14, "tokens": 120, "seconds": 1.2, "distinct": [25, 46]}
    sample = from_counters(before, after)
    assert (sample.steps, sample.requests, sample.distinct) == (4, 40.0, 60.0)
    with pytest.raises(ValueError, match="restart"):
        from_counters(after, before)
    with pytest.raises(ValueError, match="geometries"):
        from_counters(before, {**after, "geometry": "h"})


def test_gpu_check_results_replace_what_was_assumed(tmp_path):
    path = tmp_path / "nvidia-h200.json"
    layer = {"model": "Qwen3-30B-A3B", "base_us": 55.0, "expert_gb_per_s": 3000.0}
    other = {"model": "DeepSeek-V3", "base_us": 30.0, "expert_gb_per_s": 3600.0}
    path.write_text(json.dumps({"copy_bytes_per_s": 4e12, "experts": [layer, other]}))
    assert is_gpu_check(path)
    found = from_gpu_check(path, HARDWARE["h200"], "qwen3-30b-a3b")
    assert found.bandwidth.value * found.efficiency.value == pytest.approx(3e12)
    assert found.layer_fixed.value == pytest.approx(55e-6)
    assert "gpu-check" in found.efficiency.source
    mean = from_gpu_check(path, HARDWARE["h200"], "gpt-oss-120b")
    assert mean.bandwidth.value * mean.efficiency.value == pytest.approx(3.3e12)
    for content in ({"copy_bytes_per_s": 4e12, "experts": []}, {"copy_bytes_per_s": None}, []):
        path.write_text(json.dumps(content))
        with pytest.raises(ValueError, match="gpu-check"):
            from_gpu_check(path, HARDWARE["h200"], "tiny")


def test_a_run_of_the_gpu_check_is_read_as_it_writes_it(tmp_path):
    """Layers of one model at two batch sizes count with their mean."""
    pytest.importorskip("torch")
    from profiling.gpu_check.experts import ExpertCost
    from profiling.gpu_check.results import Results

    costs = [
        ExpertCost("Qwen3-30B-A3B", "fused", batch, {}, base, 3.0, 9_437_184)
        for batch, base in ((16, 45.0), (64, 65.0))
    ]
    run = Results("gpu-check", {}, "2026-01-01", copy_bytes_per_s=4e12, experts=costs)
    own = tmp_path / "own.json"
    own.write_text(json.dumps(run.as_dict()))
    measured = from_gpu_check(own, HARDWARE["h200"], "qwen3-30b-a3b")
    assert measured.layer_fixed.value == pytest.approx(55e-6)
    assert measured.bandwidth.value * measured.efficiency.value == pytest.approx(9_437_184 / 3e-6)


def test_cost_files(tmp_path):
    path = tmp_path / "cost.json"
    path.write_text(json.dumps({"base": 0.003, "expert": 1e-5}))
    assert load_cost(path) == StepCost(0.003, 1e-5)
    for text in ("{", "[]", '{"base": 1}', '{"base": 1, "expert": -1}', '{"base": 1, "x": 2}'):
        path.write_text(text)
        with pytest.raises(ValueError, match=r"cost\.json"):
            load_cost(path)
    lines = tmp_path / "decode.jsonl"
    rows = [
        {"geometry": "g", "steps": i, "tokens": 8 * i * i, "seconds": 0.001 * i + 1e-4 * i * i,
         "distinct": [10 * i * i]}
        for i in range(1, 6)
    ]  # fmt: skip
    lines.write_text("\n".join(json.dumps(r) for r in rows))
    assert load_cost(lines).base == pytest.approx(0.001, rel=0.01)
    lines.write_text(json.dumps(rows[1]) + "\n" + json.dumps(rows[0]))
    with pytest.raises(ValueError, match="line 2"):
        load_cost(lines)
    assert study_cost(GEOMETRY).expert == pytest.approx(0.15e-3 / 4)
