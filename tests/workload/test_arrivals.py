"""Arrival processes: statistics of the synthetic ones, and strict readers of the public files."""

from __future__ import annotations

import json
import os
from pathlib import Path

import numpy as np
import pytest

from eldr.workload.arrivals import Arrivals, ArrivalsError, load, poisson

CSV = """TIMESTAMP,ContextTokens,GeneratedTokens
2023-11-16 18:15:46.6805900,374,44
2023-11-16 18:15:50.9951690,396,109
2023-11-16 18:15:51.2224670,879,0
2023-11-16 18:15:48.0000000,91,16
"""
JSONL = [
    {"timestamp": 0, "input_length": 6758, "output_length": 500, "hash_ids": [0, 1]},
    {"timestamp": 3000, "input_length": 7322, "output_length": 490, "hash_ids": [0]},
]


def test_poisson_has_the_rate_the_gaps_and_the_lengths():
    made = poisson(5.0, 40_000, seed=1)
    gaps = np.diff(made.times)
    assert made.rate == pytest.approx(5.0, rel=0.02)
    assert gaps.std() / gaps.mean() == pytest.approx(1.0, abs=0.03)
    assert np.median(made.output_tokens) == pytest.approx(129, rel=0.05)
    assert np.percentile(made.input_tokens, 90) == pytest.approx(2734, rel=0.05)
    again = poisson(5.0, 40_000, seed=1)
    np.testing.assert_array_equal(made.times, again.times)
    assert (poisson(5.0, 100, seed=2).times != made.times[:100]).any()
    assert set(poisson(1.0, 10, 0, output_tokens=512).output_tokens) == {512}


def test_rate_stretches_time_and_keeps_the_burstiness():
    made = poisson(5.0, 1000, seed=1).at_rate(20.0)
    assert made.rate == pytest.approx(20.0)
    assert made.clip(16, 400).output_tokens.max() <= 400
    window = made.take(2500, seed=3)
    assert len(window) == 2500
    assert window.times[0] == 0.0
    assert window.rate == pytest.approx(20.0, rel=0.05)


def test_azure_csv(tmp_path):
    path = tmp_path / "azure.csv"
    path.write_text(CSV)
    made = load(path)
    assert made.input_tokens.tolist() == [374, 91, 396]  # in order of time, empty output dropped
    assert made.times[2] == pytest.approx(4.314579, abs=1e-5)


def test_azure_csv_of_2024_has_a_zone_and_maybe_no_fraction(tmp_path):
    path = tmp_path / "azure.csv"
    path.write_text(
        "TIMESTAMP,ContextTokens,GeneratedTokens\n"
        "2024-05-10 00:00:00.009930+00:00,2162,5\n2024-05-10 00:00:01+00:00,2399,6\n"
    )
    assert load(path).times.tolist() == pytest.approx([0.0, 0.99007])


PUBLIC = {  # rows, requests/s, median input tokens, median output tokens
    "azure_conv": (19_366, 5.5, 1020, 129),
    "azure_code": (8_819, 2.5, 1469, 13),
    "mooncake_conversation": (12_031, 3.4, 6909, 350),
    "mooncake_synthetic": (3_993, 4.0, 11_587, 69),
}


@pytest.mark.parametrize("name", PUBLIC)
def test_the_public_traces_load_as_they_were_published(name):
    folder = os.environ.get("ELDR_SHARED_DATA", str(Path(__file__).parents[3] / "shared/data"))
    path = Path(folder) / "arrivals.npz"
    if not path.exists():
        pytest.skip(f"no {path}: set ELDR_SHARED_DATA")
    made, (rows, rate, inputs, outputs) = load(path, name), PUBLIC[name]
    assert len(made) == rows
    assert made.rate == pytest.approx(rate, rel=0.05)
    assert np.median(made.input_tokens) == pytest.approx(inputs, rel=0.05)
    assert np.median(made.output_tokens) == pytest.approx(outputs, rel=0.05)


def test_mooncake_jsonl_and_npz(tmp_path):
    path = tmp_path / "mooncake.jsonl"
    path.write_text("\n".join(json.dumps(r) for r in JSONL) + "\n\n")
    made = load(path)
    assert made.times.tolist() == [0.0, 3.0]
    assert made.output_tokens.tolist() == [500, 490]
    np.savez(tmp_path / "a.npz", conv=np.array([[0, 5, 6], [1500, 7, 8]], np.uint32))
    assert load(tmp_path / "a.npz", "conv").times.tolist() == [0.0, 1.5]


def test_decision_log_of_a_router(tmp_path):
    path = tmp_path / "decisions.jsonl"
    row = {"v": 1, "decision_us": 9.0, "outcome": "ok"}
    rows = [
        {**row, "time": 1e9, "prompt_tokens": 100, "events": 20},
        {"v": 2, "kind": "counters", "time": 1e9},
        {**row, "time": 1e9 + 1, "prompt_tokens": 100, "events": 0},  # not streamed
        {**row, "time": 1e9 + 2.5, "prompt_tokens": 50, "events": 7},
    ]
    path.write_text("\n".join(json.dumps(r) for r in rows))
    made = load(path)
    assert made.times.tolist() == [0.0, 2.5]
    assert (made.input_tokens.tolist(), made.output_tokens.tolist()) == ([100, 50], [20, 7])
    older = path.rename(tmp_path / "decisions.jsonl.1")
    assert load(older).times.tolist() == made.times.tolist()


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("a.csv", "TIME,ContextTokens\n1,2\n", "expected columns"),
        ("a.csv", "TIMESTAMP,ContextTokens,GeneratedTokens\nnoon,1,2\n", "line 2.*noon"),
        ("a.csv", "TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:15:46,1\n", "line 2"),
        ("a.csv", "TIMESTAMP,ContextTokens,GeneratedTokens\n", "no request"),
        ("a.jsonl", '{"timestamp": 1}\n', "line 1.*input_length"),
        ("a.jsonl", '{"timestamp": 1, "input_length": 3, "output_length": 4}\n[', "line 2"),
        ("a.jsonl", "[1]\n", "line 1"),
        ("a.txt", "", "expected a name"),
        ("a.npz", "not a zip", "a.npz"),
    ],
)
def test_bad_files(tmp_path, name, text, message):
    path = tmp_path / name
    path.write_text(text)
    with pytest.raises(ArrivalsError, match=message):
        load(path, "conv")


def test_bad_arrays(tmp_path):
    np.savez(tmp_path / "a.npz", conv=np.zeros((3, 2), np.uint32), other=np.zeros((1, 3)))
    with pytest.raises(ArrivalsError, match="there is conv, other"):
        load(tmp_path / "a.npz", "azure")
    with pytest.raises(ArrivalsError, match=r"\[3, 2\]"):
        load(tmp_path / "a.npz", "conv")
    with pytest.raises(ArrivalsError, match="float64"):
        load(tmp_path / "a.npz", "other")
    with pytest.raises(FileNotFoundError):
        load(tmp_path / "none.csv")


def test_bad_parameters():
    ones = np.ones(2, np.int64)
    with pytest.raises(ArrivalsError, match="decrease"):
        Arrivals(np.array([1.0, 0.0]), ones, ones)
    with pytest.raises(ArrivalsError, match="token"):
        Arrivals(np.array([0.0, 1.0]), ones, ones * 0)
    with pytest.raises(ArrivalsError, match="differ"):
        Arrivals(np.array([0.0]), ones, ones)
    with pytest.raises(ArrivalsError, match="no request"):
        Arrivals(np.zeros(0), ones[:0], ones[:0])
    for rate in (0.0, -1.0, float("nan"), float("inf")):
        with pytest.raises(ArrivalsError, match="rate"):
            poisson(rate, 10, 0)
    with pytest.raises(ArrivalsError, match="at once"):
        Arrivals(np.zeros(2), ones, ones).at_rate(1.0)
