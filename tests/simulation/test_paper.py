"""`benchmarks.paper`: traces drawn from hit counts, and what the real counts say of the others."""

from __future__ import annotations

import json

import numpy as np
import pytest

from benchmarks import paper, paper_published
from benchmarks.paper_counts import draw_topk, inclusion, trace_of_counts
from benchmarks.policies import shared_data
from eldr.workload.tiny import TRACE_PATH
from eldr.workload.traces import load


def test_inclusion_keeps_shares_and_never_exceeds_certainty():
    counts = np.array([[10, 30, 20, 40], [97, 1, 1, 1]])
    chance = inclusion(counts, 2)
    assert chance[0] == pytest.approx([0.2, 0.6, 0.4, 0.8])
    assert chance[1] == pytest.approx([1.0, 1 / 3, 1 / 3, 1 / 3])


def test_tokens_pick_distinct_experts_with_exactly_these_chances():
    rng = np.random.default_rng(0)
    chance = inclusion(rng.gamma(0.4, size=(2, 12)), 4)
    topk = draw_topk(chance, 4, 40_000, rng)
    assert topk.shape == (40_000, 2, 4)
    assert (np.diff(np.sort(topk, axis=2), axis=2) > 0).all()
    for layer in range(2):
        share = np.bincount(topk[:, layer].ravel(), minlength=12) / 40_000
        assert share == pytest.approx(chance[layer], abs=0.01)
    pairs = (topk == 0).any(axis=2)[:, 0] & (topk == 1).any(axis=2)[:, 0]
    assert 0.0 < pairs.mean() < 1.0  # the order is random: no pair is tied together


def test_a_trace_of_counts_holds_every_domain():
    counts = np.random.default_rng(1).integers(1, 90, (3, 2, 16))
    trace = trace_of_counts(counts, ("a", "b", "c"), 2, requests=5, prompt=7, output=3)
    assert len(trace) == 15
    assert np.bincount(trace.domain).tolist() == [5, 5, 5]
    assert set(trace.cuts - trace.offsets[:-1]) == {7}


def same_domain_saving(counts, top_k, batch):
    """Distinct experts of a batch, all domains mixed, and the share that one domain saves."""
    chance = inclusion(counts, top_k)
    mixed = (1 - (1 - chance.mean(axis=0)) ** batch).sum(axis=-1).mean()
    same = (1 - (1 - chance) ** batch).sum(axis=-1).mean()
    return mixed, 1 - same / mixed


def test_what_a_real_model_says_of_the_traces_that_studies_replay():
    """Figures of docs/simulation.md: languages of Qwen3-30B-A3B against those of the tiny MoE."""
    real, tiny = shared_data() / "qwen3_30b_a3b_mgsm_counts.npz", shared_data() / "tiny_traces.npz"
    if not (real.exists() and tiny.exists()):
        pytest.skip(f"no {real} or {tiny}: set ELDR_SHARED_DATA")
    with np.load(real, allow_pickle=False) as file:
        counts = file["counts"]
    distinct, saving = same_domain_saving(counts, 8, 32)
    assert distinct == pytest.approx(74.4, abs=0.1)
    assert saving == pytest.approx(0.108, abs=0.001)
    uniform = 128 * (1 - (1 - 8 / 128) ** 32)
    assert distinct / uniform == pytest.approx(0.67, abs=0.01)  # why experts are counted
    trace = load(tiny)
    languages = [i for i, d in enumerate(trace.domains) if d.startswith("lang_")]
    summed = np.stack([trace.prompt_counts[trace.domain == i].sum(axis=0) for i in languages])
    _, assumed = same_domain_saving(summed, 4, 32)
    assert assumed == pytest.approx(0.182, abs=0.002)
    assert 1.5 < assumed / saving < 1.9  # the tiny model's languages promise this much more


def test_every_part_says_what_is_published_and_why_ours_differs():
    assert set(paper.PARTS) == set(paper_published.TEXT) == set(paper_published.WHY)


def test_one_part_in_small(capsys, monkeypatch):
    shares = (("legal", 2.0), ("math", 1.0))
    monkeypatch.setitem(paper.WORKLOADS, "task", shares)
    monkeypatch.setitem(paper.WORKLOADS, "language", shares)
    arguments = ["paper", "--trace", str(TRACE_PATH), "--seeds", "1", "--scale", "0.03", "--part",
                 "pool", "--part", "prefix", "--processes", "1"]  # fmt: skip
    monkeypatch.setattr("sys.argv", [*arguments, "--json"])
    assert paper.main() == 0
    found = json.loads(capsys.readouterr().out)
    assert [row["pool"] for row in found["pool"]] == ["8P8D", "8P16D", "8P24D"]
    assert [row["cached"] for row in found["prefix"]] == [0.0, 0.5]
    fresh, cached = found["prefix"]
    assert cached["ttft_p50_ms"] < fresh["ttft_p50_ms"]
    assert found["simulated"] is True
    text = paper.markdown(found)
    assert "published +8.0 / +2.5" in text
    assert paper_published.WHY["prefix"] in text
