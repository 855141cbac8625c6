"""Studies, their figures, and the command line on top."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from eldr import cli
from eldr.simulation import plots, report
from eldr.simulation.cells import ArrivalSpec, Case, Cell
from eldr.simulation.cost import study_cost
from eldr.simulation.placement import PLACEMENTS
from eldr.simulation.policies import parse
from eldr.simulation.study import study
from eldr.simulation.traffic import Mix, split
from eldr.simulation.variants import SIGNATURES, signatures
from eldr.workload.tiny import GEOMETRY, TRACE_PATH
from eldr.workload.traces import load
from tests.simulation.helpers import random_trace

POLICIES = ("random", "least_requests", "marginal_cost")


def cell(**changes):
    settings = {"batch": 20.0, "arrivals": ArrivalSpec(clip=(16, 120)), **changes}
    return Cell(str(TRACE_PATH), Mix.SAME, 4, study_cost(GEOMETRY), 800, **settings)


def test_the_rate_gives_the_wanted_batch():
    outcome = Case(cell(), 0).run("least_requests")
    figures = report.summarise(outcome, GEOMETRY.layers)
    # The fleet fills and drains, so the mean over the whole run is a little lower.
    assert 15 < figures["batch"] < 21


def test_load_is_a_share_of_capacity_and_more_is_saturated():
    half = Case(cell(batch=None, load=0.5, max_batch=16), 0)
    whole = Case(cell(batch=None, load=1.0, max_batch=16), 0)
    assert whole.rate == pytest.approx(2 * half.rate)
    (result,) = study([cell(batch=None, load=3.0, max_batch=8)], ["random"], [0], processes=1)
    assert result.saturated
    assert result.figures["random"]["requests"]["done"] == 800
    assert result.rows()[0]["saturated"]


def test_policies_of_a_case_see_the_same_traffic_and_serve_what_did_not_calibrate():
    case = Case(cell(), 7)
    a, b = case.run("random"), case.run("least_requests")
    np.testing.assert_array_equal(a.traffic.rows, b.traffic.rows)
    assert set(a.traffic.rows) <= set(split(case.trace, 7).serving.tolist())


def test_gains_are_against_the_best_load_balancer_of_each_quantile():
    def figures(p50, p99):
        return {"tpot_ms": {"p50": p50, "p99": p99, "mean": 0.0}}

    cells = {"random": figures(10.0, 30.0), "round_robin": figures(12.0, 20.0),
             "marginal_cost": figures(9.0, 22.0)}  # fmt: skip
    best = report.best_load_balancer(cells)
    assert best == {"p50": "random", "p99": "round_robin"}
    found = report.gains(cells, best)["marginal_cost"]
    assert found["p50"] == pytest.approx(10.0)
    assert found["p99"] == pytest.approx(-10.0)
    with pytest.raises(ValueError, match="least_requests"):
        report.best_load_balancer({"marginal_cost": cells["marginal_cost"]})


def test_a_study_averages_seeds_and_is_the_same_in_any_number_of_processes():
    cells = [cell(), cell(expected=True)]
    one = study(cells, POLICIES, [0, 1], processes=1)
    two = study(cells, POLICIES, [0, 1], processes=2)
    assert [r.rows() for r in one] == [r.rows() for r in two]
    seeds = [
        report.summarise(Case(cell(), s).run("random"), GEOMETRY.layers)["tpot_ms"]["p50"]
        for s in (0, 1)
    ]
    assert one[0].figures["random"]["tpot_ms"]["p50"] == pytest.approx(np.mean(seeds))
    assert one[0].gains["marginal_cost"]["p50"] > 5.0
    assert one[0].figures["random"]["requests"]["done"] == 1600


def test_levelled_ranks_make_steps_shorter_and_clusters_more_so():
    def median(policy, placement):
        made = cell(batch=16.0, expert_ranks=8, placement=placement, expected=True)
        return float(np.nanmedian(Case(made, 0).run(policy).tpot))

    band = "locality_band:tau=0.1"
    linear, spread, clusters = (median(band, p) for p in ("linear", "spread", "clusters"))
    assert clusters < spread < linear
    # Without centroids a worker has no cluster of its own.
    assert median("least_requests", "clusters") == median("least_requests", "spread")
    assert median("least_requests", "round_robin") != median("least_requests", "linear")
    with pytest.raises(ValueError, match="placement is one of"):
        cell(placement="random")


def test_policies_are_told_what_an_expert_costs_a_step_of_several_ranks():
    whole = Case(cell(), 0)
    ranked = Case(cell(expert_ranks=4), 0)

    def told(case):
        return case._builder._knowledge.cost.expert

    assert told(whole) == study_cost(GEOMETRY).expert
    # Four level ranks would read a quarter each; the slowest reads more than that.
    assert 0.25 < told(ranked) / told(whole) < 0.5


def test_domain_shares_hold_in_both_halves():
    shares = (("legal", 3.0), ("math", 1.0))
    case = Case(cell(shares=shares), 0)
    names = [case.trace.domains[d] for d in case.traffic.domain]
    assert set(names) == {"legal", "math"}
    assert names.count("legal") / len(names) == pytest.approx(0.75, abs=0.05)
    with pytest.raises(ValueError, match="'poetry'"):
        Case(cell(shares=(("poetry", 1.0),)), 0)


@pytest.mark.parametrize(
    "text",
    [
        "locality_band:tau=0.2,balanced=false",
        "locality_band:signature=last32,idf=false",
        "nearest_two",
        "domain",
    ],
)
def test_every_kind_of_policy_runs(text):
    outcome = Case(cell(), 0).run(text)
    assert np.isfinite(outcome.tpot).all()
    assert outcome.fallbacks == {}


def test_signature_variants_are_what_they_say():
    trace = random_trace()
    for name in SIGNATURES:
        known = signatures(trace, name)
        assert len(known) == len(trace)
        for s in known:
            assert s.counts.max() <= s.tokens
            assert s.counts.sum(axis=1).max() <= s.tokens * trace.geometry.top_k
    short = signatures(trace, "last32")
    prompt = trace.cuts - trace.offsets[:-1]
    assert [s.counts[0].sum() for s in short] == (np.minimum(prompt, 32) * 4).tolist()


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("fastest", "unknown policy"),
        ("random:x=1", "unknown option"),
        ("locality_band:tau", "expected name:option=value"),
        ("locality_band:partition=x", "unknown option"),
        ("locality_band:signature=gates", "signature is one of"),
        ("locality_band:idf=1", "true or false"),
    ],
)
def test_bad_policies(text, message):
    with pytest.raises(ValueError, match=message):
        parse(text)


def test_bad_cells():
    for changes in ({"batch": None}, {"rate": 3.0}, {"batch": -1.0}, {"batch": float("inf")}):
        with pytest.raises(ValueError, match="exactly one"):
            cell(**changes)
    with pytest.raises(ValueError, match="at least one"):
        study([], ["random"], [0])


def test_command_line_contract(capsys):
    code = cli.main(
        ["simulate", "--json", "--workers", "4", "--requests", "400", "--output-tokens", "40",
         "--mix", "same", "--mix", "drift", "--processes", "1"]
    )  # fmt: skip
    out = capsys.readouterr().out
    assert code == cli.DONE
    found = json.loads(out)
    assert len(found["cells"]) == 2 * 6
    first = found["cells"][0]
    assert {"trace", "mix", "workers", "policy", "tpot_ms", "ttft_ms", "distinct_per_layer",
            "max_over_mean_load", "goodput"} <= set(first)  # fmt: skip
    assert set(first["tpot_ms"]) == set(first["ttft_ms"]) == {"p50", "p99", "mean"}
    assert {"cells", "best_load_balancer", "gain_pct"} <= set(found)
    assert set(found["best_load_balancer"]["bundled/same/4"]) == {"p50", "p99"}
    assert set(found["gain_pct"]["marginal_cost"]) == {"p50", "p99"}
    assert set(found["best_load_balancer"]) == {"bundled/same/4", "bundled/drift/4"}


def test_pictures_of_every_cell(capsys, tmp_path):
    code = cli.main(
        ["simulate", "--json", "--workers", "2", "--requests", "200", "--output-tokens", "20",
         "--policy", "random", "--policy", "marginal_cost", "--plot", str(tmp_path)]
    )  # fmt: skip
    assert code == cli.DONE
    written = [Path(p) for p in json.loads(capsys.readouterr().out)["plots"]]
    stem = "bundled-same-2"
    kinds = {f"{stem}-{kind}.{end}" for kind in ("cdf", "time", "pareto") for end in ("png", "svg")}
    assert {p.name for p in written} == kinds
    for path in written:
        assert path.stat().st_size > 1000
        if path.suffix == ".svg":
            # A policy has the same colour in all pictures.
            assert plots.colours(["marginal_cost"])["marginal_cost"] in path.read_text()


def test_command_line_takes_prefill_events_and_load(capsys, tmp_path):
    events = tmp_path / "e.jsonl"
    events.write_text('{"time": 0.5, "event": "fail", "worker": "w1"}\n')
    code = cli.main(
        ["simulate", "--workers", "4", "--requests", "300", "--load", "0.2", "--prefill-workers",
         "2", "--cached", "0.5", "--events", str(events), "--policy", "least_requests",
         "--output-tokens", "30", "--model", "gpt-oss-120b", "--hardware", "mi300x"]
    )  # fmt: skip
    assert code == cli.DONE
    assert "least_requests" in capsys.readouterr().out


def test_the_command_line_knows_every_placement(capsys):
    code = cli.main(
        ["simulate", "--workers", "2", "--requests", "100", "--model", "qwen3-235b-a22b",
         "--tensor-parallel", "4", "--expert-parallel", "--placement", "clusters", "--expected",
         "--policy", "random", "--policy", "locality_band", "--output-tokens", "30"]
    )  # fmt: skip
    assert code == cli.DONE
    assert "locality_band" in capsys.readouterr().out
    with pytest.raises(SystemExit):
        cli.main(["simulate", "--placement", "none"])
    message = capsys.readouterr().err
    assert all(name in message for name in PLACEMENTS)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--trace", "none.npz"], "none.npz"),
        (["--policy", "fastest"], "unknown policy"),
        (["--model", "gpt-2"], "unknown model"),
        (["--hardware", "abacus"], "unknown hardware"),
        (["--rate", "0"], "positive rate"),
        (["--workers", "0"], "needs a worker"),
        (["--seeds", "0"], "--seeds"),
        (["--arrivals", "x.npz"], "name the array"),
        (["--output-tokens", "1"], "nothing to decode"),
        (["--routers", "9"], "routers"),
        (["--model", "deepseek-v3"], "do not fit"),
    ],
)
def test_bad_arguments_are_usage_errors(capsys, arguments, message):
    assert cli.main(["simulate", "--requests", "100", *arguments]) == cli.USAGE
    captured = capsys.readouterr()
    assert message in captured.err
    assert captured.out == ""


def test_malformed_and_truncated_files_are_usage_errors(capsys, tmp_path):
    cut = tmp_path / "cut.npz"
    cut.write_bytes(TRACE_PATH.read_bytes()[:50_000])
    text = tmp_path / "trace.npz"
    text.write_text("not a trace")
    lines = tmp_path / "arrivals.jsonl"
    lines.write_text('{"timestamp": 1}')
    events = tmp_path / "events.jsonl"
    events.write_text('{"time": 1, "event": "leave", "worker": "w99"}')
    for arguments, message in (
        (["--trace", str(cut)], "cut.npz"),
        (["--trace", str(text)], "trace.npz"),
        (["--arrivals", str(lines)], "line 1"),
        (["--arrivals", str(tmp_path / "none.csv")], "none.csv"),
        (["--events", str(events)], "w99"),
        (["--calibration", str(lines)], "arrivals.jsonl"),
    ):
        assert cli.main(["simulate", "--requests", "100", *arguments]) == cli.USAGE
        captured = capsys.readouterr()
        assert message in captured.err
        assert captured.out == ""


def test_public_arrival_files_drive_a_run(capsys, tmp_path):
    azure = tmp_path / "azure.csv"
    rows = [f"2023-11-16 18:15:{s:02d}.{s}805900,{300 + s},{20 + s % 7}" for s in range(60)]
    azure.write_text("TIMESTAMP,ContextTokens,GeneratedTokens\n" + "\n".join(rows))
    mooncake = tmp_path / "mooncake.jsonl"
    lines = [
        json.dumps({"timestamp": 500 * i, "input_length": 700, "output_length": 30, "hash_ids": []})
        for i in range(60)
    ]
    mooncake.write_text("\n".join(lines))
    array = tmp_path / "arrivals.npz"
    np.savez(array, conv=np.array([[400 * i, 500, 25] for i in range(60)], np.uint32))
    names = []
    for file in (azure, mooncake, f"{array}:conv"):
        code = cli.main(
            ["simulate", "--json", "--requests", "200", "--workers", "2", "--rate", "40",
             "--policy", "random", "--arrivals", str(file)]
        )  # fmt: skip
        assert code == cli.DONE
        (row,) = json.loads(capsys.readouterr().out)["cells"]
        assert row["requests"]["done"] == 200
        assert row["rate"] == pytest.approx(40)
        names.append(row["arrivals"])
    assert names == ["azure", "mooncake", "conv"]


def test_a_rate_beyond_capacity_is_reported_not_hung(capsys):
    code = cli.main(
        ["simulate", "--requests", "300", "--workers", "2", "--rate", "1e6", "--max-batch", "4",
         "--policy", "random", "--output-tokens", "20"]
    )  # fmt: skip
    assert code == cli.DONE
    assert "queues grow" in capsys.readouterr().err


def test_the_bundled_trace_has_enough_of_every_domain():
    assert np.bincount(load(TRACE_PATH).domain).min() >= 2


def test_sensitivity_varies_every_assumed_constant_of_a_step(capsys):
    code = cli.main(
        ["simulate", "--json", "--requests", "2000", "--workers", "4", "--policy", "random",
         "--policy", "marginal_cost", "--output-tokens", "60", "--sensitivity",
         "--processes", "1"]
    )  # fmt: skip
    assert code == cli.DONE
    rows = json.loads(capsys.readouterr().out)["sensitivity"]
    assert [r["constant"] for r in rows] == [
        "none", *(2 * ["efficiency"]), *(2 * ["step_fixed"]), *(2 * ["layer_fixed"])
    ]  # fmt: skip
    gain = {(r["constant"], r["factor"]): r["gain_pct"]["marginal_cost"]["p50"] for r in rows}
    assert gain["layer_fixed", 2.0] < gain["layer_fixed", 0.5]
    assert cli.main(["simulate", "--sensitivity", "--calibration", "x"]) == cli.USAGE


def test_sensitivity_of_other_hardware_and_with_a_prefill_pool(capsys):
    code = cli.main(
        ["simulate", "--json", "--requests", "100", "--workers", "2", "--policy", "random",
         "--output-tokens", "30", "--model", "tiny", "--hardware", "cpu", "--prefill-workers", "2",
         "--sensitivity", "--processes", "1"]
    )  # fmt: skip
    assert code == cli.DONE
    rows = json.loads(capsys.readouterr().out)["sensitivity"]
    assert {r["constant"] for r in rows} == {
        "none", "bandwidth", "efficiency", "flops", "flops_efficiency", "link", "step_fixed",
        "layer_fixed",
    }  # fmt: skip
