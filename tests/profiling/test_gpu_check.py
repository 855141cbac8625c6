"""The GPU check without a GPU: its words, its arithmetic, its pages on made-up measurements."""

from __future__ import annotations

import itertools
import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from eldr.kernels import accumulate_hits_ref, decide_ref
from profiling.gpu_check import __main__ as command
from profiling.gpu_check import audit, building, experts, inputs, parity, speed, stages
from profiling.gpu_check.clock import Budget, HostTimer, Prepared, Sample, interleave
from profiling.gpu_check.experts import ExpertCost
from profiling.gpu_check.parity import Verdict
from profiling.gpu_check.results import Results, file_name, markdown
from profiling.gpu_check.shapes import MODELS, Model
from profiling.gpu_check.speed import Timing

ROOT = Path(__file__).resolve().parents[2]
CPU = torch.device("cpu")
SMALL = Model("small", 2, 16, 2, 16, hidden=64, width=32)
without_gpu = pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a GPU")


@without_gpu
def test_without_a_gpu_it_says_so_and_exits_3(tmp_path: Path) -> None:
    line = [sys.executable, "-m", "profiling.gpu_check", "--json", "--output", str(tmp_path)]
    done = subprocess.run(line, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 3
    assert done.stdout == ""
    assert "nothing was checked" in done.stderr
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("bad", [["--seconds", "0"], ["--name", "../x"], ["--only", "all"], ["x"]])
def test_bad_arguments_are_a_usage_error(bad: list[str]) -> None:
    with pytest.raises(SystemExit) as stop:
        command.arguments(bad)
    assert stop.value.code == 2


def test_a_failed_build_is_a_finding_with_the_last_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delitem(sys.modules, "eldr.kernels")
    (tmp_path / "setup.py").write_text("raise SystemExit('no compiler here')")
    assert building.build("90", tmp_path) == "failed: no compiler here"
    (tmp_path / "setup.py").write_text("import os; assert os.environ['ELDR_CUDA_ARCHS'] == '90'")
    assert building.build("90", tmp_path) == "for 90"
    (tmp_path / "setup.py").write_text("import time; time.sleep(60)")
    assert building.build("90", tmp_path, seconds=0.2).startswith("gave up")


def test_a_build_after_eldr_was_loaded_is_refused() -> None:
    with pytest.raises(RuntimeError, match="is loaded"):
        building.build("90")


def test_interleaved_rounds_take_turns_and_give_medians() -> None:
    order: list[str] = []
    times = {"a": iter([5.0, 1.0, 3.0]), "b": iter([10.0, 30.0, 20.0])}

    def prepared(name: str) -> Prepared:
        def once() -> float:
            order.append(name)
            return next(times[name])

        return Prepared(once, "graph")

    samples = interleave({name: prepared(name) for name in times}, rounds=3)
    assert "".join(order) == "abbaab"
    assert samples["a"] == Sample(3.0, 1.0, 5.0, 3, "graph")
    assert samples["b"].median == 20.0


def test_what_does_not_fit_the_budget_is_listed() -> None:
    now = [0.0]
    budget = Budget(10.0, lambda: now[0])
    assert budget.allows("first", 8)
    now[0] = 5.0
    assert not budget.allows("second", 8)
    assert budget.allows("third", 5)
    assert budget.left_out == ["second"]


def test_the_reference_passes_parity_with_itself() -> None:
    verdicts = list(parity.check_accumulate("torch", accumulate_hits_ref, accumulate_hits_ref, CPU))
    verdicts += parity.check_decide("torch", decide_ref, decide_ref, CPU)
    assert len(verdicts) == len(parity.STEPS) + len(parity.QUESTIONS)
    assert [v for v in verdicts if v.wrong] == []


def test_parity_finds_one_wrong_count() -> None:
    def off_by_one(*arguments: object) -> None:
        accumulate_hits_ref(*arguments)  # type: ignore[arg-type]
        arguments[3].view(-1)[7] += 1  # type: ignore[attr-defined]

    verdict = next(iter(parity.check_accumulate("x", off_by_one, accumulate_hits_ref, CPU)))
    assert verdict.wrong.startswith("1 of")
    assert "first at (0, 0, 7)" in verdict.wrong


@pytest.mark.parametrize(
    ("position", "change", "said"),
    [(12, 0.01, "relative error"), (13, 1, "differ"), (14, 1, "load"), (16, 1, "chosen")],
)
def test_parity_finds_wrong_scores_counts_loads_and_choices(
    position: int, change: float, said: str
) -> None:
    def wrong(*arguments: object) -> None:
        decide_ref(*arguments)  # type: ignore[arg-type]
        arguments[position].view(-1)[0] += change  # type: ignore[attr-defined]

    assert said in next(iter(parity.check_decide("x", wrong, decide_ref, CPU))).wrong


def test_inputs_are_what_the_ops_accept() -> None:
    step = inputs.Step(100, 2, 16, 2, 16, outside=True)
    ids, slots, block_size, rows = inputs.accumulate_arguments(step, CPU, 0)
    assert ids.shape == (100, 2, 2)
    assert ids.max() == 16  # one id that must be ignored
    assert slots.max() < len(rows) * block_size
    assert slots[slots >= 0].unique().numel() == (slots >= 0).sum()


def test_ops_are_timed_side_by_side_at_a_models_shape(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(speed, "TOKENS", 64)
    monkeypatch.setattr(speed, "ROUNDS", 2)

    def refuses(*_: object) -> None:
        raise NotImplementedError("no kernel for this")

    ops = {"torch": accumulate_hits_ref, "cuda": refuses}
    timing = speed.time_accumulate(HostTimer(), SMALL, ops, CPU)
    assert timing.samples["torch"].median > 0
    assert timing.samples[speed.HOST_CAPTURE].median > 0
    assert timing.left_out == {"cuda": "no kernel for this"}
    assert timing.bytes == 64 * 2 * 2 * 4 + 8 * 64 + 4 * 32
    monkeypatch.setattr(speed, "BLOCKS_PER_REQUEST", 3)
    decided = speed.time_decide(HostTimer(), SMALL, 2, {"torch": decide_ref}, CPU)
    assert decided.case.startswith("R=2 ")
    assert decided.bytes == 2 * 3 * 32 + 4 * 16 * 32


def test_there_is_a_case_for_every_model_and_number_of_requests() -> None:
    names = [name for name, _ in speed.cases(MODELS)]
    assert len(names) == len(set(names)) == len(MODELS) * 4


@pytest.mark.parametrize("model", MODELS, ids=lambda m: m.name)
def test_ids_hit_exactly_so_many_experts_and_none_twice_in_a_row(model: Model) -> None:
    for distinct in experts.counts_of_experts(model):
        ids = experts.ids_with(model, distinct, experts.BATCH, 3).numpy()
        assert len(np.unique(ids)) == distinct
        assert all(len(set(row)) == model.top_k for row in ids)
        uses = np.bincount(ids.ravel())
        assert uses[uses > 0].max() - uses[uses > 0].min() <= 1


def test_impossible_numbers_of_experts_are_refused() -> None:
    for distinct in (1, 17):
        with pytest.raises(ValueError, match="impossible"):
            experts.ids_with(SMALL, distinct, 64, 0)


def test_the_grouped_layer_is_the_sum_of_its_experts() -> None:
    g = torch.Generator().manual_seed(0)
    w1 = torch.randn(16, 64, 64, generator=g, dtype=torch.bfloat16) / 8
    w2 = torch.randn(16, 64, 32, generator=g, dtype=torch.bfloat16) / 6
    x = torch.randn(5, 64, generator=g, dtype=torch.bfloat16)
    ids = experts.ids_with(SMALL, 7, 5, 1)
    weights = torch.rand(5, 2, generator=g)
    got = experts.grouped_layer(x, w1, w2, weights, ids).float()
    expected = torch.zeros(5, 64)
    for token, slot in np.ndindex(5, 2):
        expert = int(ids[token, slot])
        gate, up = (w1[expert].float() @ x[token].float()).chunk(2)
        inner = torch.nn.functional.silu(gate) * up
        expected[token] += weights[token, slot] * (w2[expert].float() @ inner)
    torch.testing.assert_close(got, expected, rtol=0.03, atol=0.03)


def test_the_cost_of_an_expert_is_the_slope() -> None:
    base, slope = experts.line([(8, 26.0), (16, 42.0), (32, 74.0)])
    assert base == pytest.approx(10.0)
    assert slope == pytest.approx(2.0)


def test_expert_cost_is_measured_on_any_timer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(experts, "ROUNDS", 2)
    cost = experts.measure(HostTimer(), SMALL, experts.grouped_layer, "grouped", CPU, batch=8)
    assert sorted(cost.samples) == experts.counts_of_experts(SMALL, 8)
    assert cost.as_dict()["expert_bytes"] == 3 * 64 * 32 * 2


def made_up() -> Results:
    results = Results("python -m x", {"device": "A Device", "cores": 4}, "2026-01-01")
    results.builds["eldr._C"] = "for 90"
    results.verdicts = [
        Verdict("decide", "triton", "R=1", ""),
        Verdict("decide", "triton", "R=2", "bad"),
    ]
    results.copy_bytes_per_s = 4.2e12
    fast, slow = Sample(7.5, 7.0, 9.0, 5, "graph"), Sample(900.0, 800.0, 950.0, 5, "eager")
    results.timings = [
        Timing("accumulate_hits", MODELS[0].name, "T=8192", 15_000_000,
               {"triton": fast, "torch": slow}, {}),
        Timing("decide", MODELS[0].name, "R=1 W=16", 800_000, {"triton": slow}, {"cuda": "none"}),
    ]  # fmt: skip
    results.experts = [ExpertCost("m", "layer", 64, {8: fast, 16: slow}, 3.0, 0.5, 9_000_000)]
    results.left_out = ["timing of y"]
    return results


def test_the_json_says_what_holds_and_which_goals_are_met() -> None:
    data = json.loads(json.dumps(made_up().as_dict()))
    assert data["holds"] is False
    goals = {goal["what"]: goal for goal in data["goals"]}
    assert goals["accumulate_hits"] == {
        "what": "accumulate_hits", "model": "Qwen3-30B-A3B", "goal_us": 10.0, "us": 7.5,
        "backend": "triton", "met": True,
    }  # fmt: skip
    assert goals["decide R=1"]["met"] is False
    assert goals["decide R=64"]["us"] is None
    assert data["timings"][0]["us"]["triton"]["gb_per_s"] == pytest.approx(2000.0)
    assert data["experts"][0]["expert_gb_per_s"] == pytest.approx(18000.0)


def test_a_peer_is_no_backend_that_could_meet_a_goal() -> None:
    results = made_up()
    results.timings[0].samples[speed.HOST_CAPTURE] = Sample(1.0, 1.0, 1.0, 5, "eager")
    goal = next(g for g in results.goals() if g["what"] == "accumulate_hits")
    assert (goal["backend"], goal["us"]) == ("triton", 7.5)
    assert f"| {speed.HOST_CAPTURE} |" in markdown(results)


def test_the_page_shows_everything_and_its_tables_are_well_formed() -> None:
    page = markdown(made_up())
    for text in (
        "A Device",
        "4.20 TB/s",
        "R=2: bad",
        "left out: timing of y",
        "900.0 e",
        "not measured",
    ):
        assert text in page
    rows = [line for line in page.splitlines() if line.startswith("|")]
    for first, second in itertools.pairwise(rows):
        if set(second) <= {"|", "-"}:
            assert first.count("|") == second.count("|")
    assert "| 7.5 (2000) | 900.0 e (17) |" in page


def test_files_are_named_after_the_device_and_complete(tmp_path: Path) -> None:
    assert file_name("NVIDIA H200 (SXM)") == "nvidia-h200-sxm"
    paths = command.write(made_up(), tmp_path / "gpu", "x")
    assert [p.name for p in paths] == ["x.json", "x.md"]
    assert json.loads(paths[0].read_text())["v"] == 1


@pytest.mark.parametrize(("wrong", "code"), [("", 0), ("bad", 1)])
def test_a_run_writes_its_files_even_when_a_check_fails(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    wrong: str,
    code: int,
) -> None:
    monkeypatch.setattr(command, "why_not", lambda: None)
    monkeypatch.setattr(command, "machine", lambda: {"device": "D", "capability": "9.0"})
    monkeypatch.setattr(building, "build", lambda architecture: f"for {architecture}")

    def fake(results: Results, chosen: object, budget: Budget) -> None:
        results.verdicts.append(Verdict("decide", "cuda", "c", wrong))
        budget.allows("the rest", 1e9)

    monkeypatch.setattr(command, "run", fake)
    assert command.main(["--json", "--output", str(tmp_path)]) == code
    printed = json.loads(capsys.readouterr().out)
    assert printed["builds"] == {"eldr._C": "for 90"}
    assert printed["left_out"] == ["the rest"]
    assert json.loads((tmp_path / "d.json").read_text())["holds"] is (code == 0)


def test_an_error_in_a_stage_does_not_lose_what_was_measured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(command, "why_not", lambda: None)
    monkeypatch.setattr(command, "machine", lambda: {"device": "D", "capability": "9.0"})

    def fails(results: Results, chosen: object, budget: Budget) -> None:
        results.copy_bytes_per_s = 1e12
        raise RuntimeError("the device fell off")

    monkeypatch.setattr(command, "run", fails)
    with pytest.raises(RuntimeError, match="fell off"):
        command.main(["--only", "times", "--output", str(tmp_path)])
    assert json.loads((tmp_path / "d.json").read_text())["copy_bytes_per_s"] == 1e12


class FakeCuda:
    """torch.cuda's synchronisation check, for ops that would synchronise."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.mode = "default"
        monkeypatch.setattr(torch.cuda, "set_sync_debug_mode", self.set)
        monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
        monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)
        monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (2**40, 2**40))
        monkeypatch.setattr(experts, "vllm_layer", lambda: None)

    def set(self, mode: str) -> None:
        self.mode = mode

    def synchronising(self, *arguments: object) -> None:
        if self.mode == "error":
            raise RuntimeError("called a synchronizing CUDA operation")


OPS = {"accumulate_hits": accumulate_hits_ref, "decide": decide_ref}


def test_the_audit_finds_an_op_that_synchronises(monkeypatch: pytest.MonkeyPatch) -> None:
    fake = FakeCuda(monkeypatch)
    ops = {"accumulate_hits": fake.synchronising, "decide": decide_ref}
    found = {v.op: v.wrong for v in audit.check_synchronisation("x", ops, CPU)}
    assert found == {"accumulate_hits": "called a synchronizing CUDA operation", "decide": ""}
    assert fake.mode == "default"


def test_the_audit_compares_replays_with_eager_calls(monkeypatch: pytest.MonkeyPatch) -> None:
    FakeCuda(monkeypatch)
    assert audit.check_capture("x", OPS, CPU, capture=lambda run: run).wrong == ""
    lazy = audit.check_capture("x", OPS, CPU, capture=lambda run: lambda: None).wrong
    assert "differ from eager calls" in lazy

    def refuses(run: object) -> object:
        raise RuntimeError("operation not permitted when stream is capturing\nmore")

    assert audit.check_capture("x", OPS, CPU, capture=refuses).wrong.endswith("capturing")


def test_all_stages_fill_the_results(monkeypatch: pytest.MonkeyPatch) -> None:
    FakeCuda(monkeypatch)
    for name, value in (
        ("TOKENS", 64),
        ("BLOCKS_PER_REQUEST", 2),
        ("ROUNDS", 1),
        ("REQUESTS", (1,)),
    ):
        monkeypatch.setattr(speed, name, value)
    monkeypatch.setattr(experts, "ROUNDS", 1)
    monkeypatch.setattr(parity, "STEPS", parity.STEPS[1:2])
    monkeypatch.setattr(parity, "QUESTIONS", parity.QUESTIONS[-1:])
    monkeypatch.setattr(stages, "DEVICE", CPU)
    monkeypatch.setattr(stages, "DeviceTimer", HostTimer)
    monkeypatch.setattr(stages, "copy_bandwidth", lambda: 1e12)
    monkeypatch.setattr(stages, "MODELS", (SMALL,))
    monkeypatch.setattr(stages, "implementations", lambda op: {"torch": OPS[op], "other": OPS[op]})
    monkeypatch.setattr(audit.check_capture, "__defaults__", (lambda run: run,))
    results = Results("c", {"device": "d"}, "2026-01-01")
    command.run(results, ("checks", "times", "experts"), Budget(1e6))
    assert results.failures == []
    audited = [v for v in results.verdicts if v.op == "pipeline"]
    assert [v.backend for v in audited] == ["other"]
    assert [(t.op, sorted(t.samples)) for t in results.timings] == [
        ("accumulate_hits", ["other", "torch", speed.HOST_CAPTURE]),
        ("decide", ["other", "torch"]),
    ]
    assert results.experts[0].model == "small"
    assert "small" in markdown(results)


def test_stages_without_time_left_are_listed(monkeypatch: pytest.MonkeyPatch) -> None:
    FakeCuda(monkeypatch)
    monkeypatch.setattr(stages, "copy_bandwidth", lambda: 1e12)
    monkeypatch.setattr(stages, "implementations", lambda op: {"triton": OPS[op]})
    budget, results = Budget(0.0), Results("c", {"device": "d"}, "2026-01-01")
    command.run(results, ("checks", "times", "experts"), budget)
    assert results.verdicts == results.timings == results.experts == []
    assert len(budget.left_out) == 2 + 1 + 4 * len(MODELS) + len(MODELS)


def test_weights_that_do_not_fit_are_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    FakeCuda(monkeypatch)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (2**30, 2**31))
    monkeypatch.setattr(stages, "MODELS", MODELS[-1:])
    results = Results("c", {"device": "d"}, "2026-01-01")
    stages.time_experts(results, Budget(1e6))
    assert results.left_out == ["expert cost of DeepSeek-V3: 21.0 GiB of weights do not fit"]
