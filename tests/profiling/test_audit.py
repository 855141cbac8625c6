"""The audit: every planted fault is found where it is, and clean captures pass."""

import json
import os
import sqlite3
from dataclasses import replace
from pathlib import Path

import pytest

from eldr import tracing
from profiling import schema
from profiling.audit import Options, audit, main
from profiling.export import Export
from profiling.faults import FAULTS, Fault
from profiling.fixture import CLONE, Engine, Scenario, record_engine
from profiling.recorder import COMPUTE, US, Recorder
from profiling.verdict import CANNOT_TELL, FAIL, PASS

SHARED = Path(os.environ.get("ELDR_SHARED_DATA", Path(__file__).parents[3] / "shared/data"))
REAL = SHARED / "nsys/mock.sqlite"


def judged(path, baseline=None, options=None):
    export = Export(path)
    base = Export(baseline) if baseline else None
    verdict, facts = audit(export, base, options or Options())
    export.close()
    return verdict, facts


def reasons(verdict, name):
    (check,) = [check for check in verdict.checks if check.name == name]
    return check.verdict, "\n".join(check.reasons)


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.name)
def test_planted_fault_is_found(fault: Fault, tmp_path):
    path = fault.write(tmp_path / "fault.sqlite")
    base = fault.baseline and record_engine(tmp_path / "base.sqlite", fault.baseline)
    verdict, _ = judged(path, base)
    found, text = reasons(verdict, fault.check)
    assert found == fault.verdict, text
    assert fault.says in text
    assert verdict.overall == fault.verdict


@pytest.mark.parametrize(
    "scenario",
    [
        Scenario(),
        Scenario(prefill=False),
        Scenario(graphs=False),
        Scenario(200, graphs=False, prefill=False),
    ],
    ids=lambda s: f"prefill={s.prefill},graphs={s.graphs}",
)
def test_clean_captures_pass(scenario, tmp_path):
    path = record_engine(tmp_path / "clean.sqlite", scenario)
    base = record_engine(tmp_path / "base.sqlite", replace(scenario, eldr=False))
    verdict, facts = judged(path, base)
    assert verdict.overall == PASS, [c for c in verdict.checks if c.verdict != PASS]
    assert facts.total_copies > scenario.steps  # the engine's own and the other process's


class CopiesInItsGraph(Engine):
    """The engine's own graph copies to the host: none of ELDR's business."""

    def forward(self):
        super().forward()
        self.r.copy(256, stream=COMPUTE, correlation=self.r.correlation, node=1 + CLONE)


class BusyThread(Engine):
    """Another thread of the process waits all the time, also during ELDR's ranges."""

    def accumulate(self, number):
        super().accumulate(number)
        thread, self.r.thread = self.r.thread, 9
        self.r.wait()
        self.r.item()
        self.r.thread = thread


class NestedRanges(Engine):
    """A range of another library inside one of ours, and the same name in another domain."""

    def accumulate(self, number):
        with self.r.range("accumulate", domain=77), self.r.range("aten::add"):
            super().accumulate(number)

    def output(self, number):
        with self.r.range(tracing.DECIDE, domain=77):
            super().output(number)


@pytest.mark.parametrize("engine", [CopiesInItsGraph, BusyThread, NestedRanges])
def test_what_others_do_raises_no_alarm(engine, tmp_path):
    path = record_engine(tmp_path / "clean.sqlite", Scenario(), engine)
    verdict, _ = judged(path)
    assert verdict.overall == PASS, [c for c in verdict.checks if c.verdict != PASS]


def test_ranges_written_by_torch_without_a_domain(tmp_path):
    recorder = Recorder(domain=None)
    Engine(recorder, Scenario()).run()
    verdict, facts = judged(recorder.write(tmp_path / "torch.sqlite"))
    assert verdict.overall == PASS
    assert facts.ranges.counts()[tracing.ACCUMULATE] == 64


def test_nsights_everyday_warnings_are_no_doubt(tmp_path):
    recorder = Recorder()
    Engine(recorder, Scenario()).run()
    recorder.diagnose("CUDA device 0: Unified Memory cannot be traced.", 2)
    recorder.diagnose("Number of dropped events: 0.", 1)
    assert judged(recorder.write(tmp_path / "a.sqlite"))[0].overall == PASS


def test_each_copy_is_found_once_with_its_size(tmp_path):
    class Twice(Engine):
        def accumulate(self, number):
            super().accumulate(number)
            if number in (3, 5):
                self.r.item()

    _, facts = judged(record_engine(tmp_path / "a.sqlite", Scenario(), Twice))
    hits = [hit for hit in facts.hits if hit.range == tracing.ACCUMULATE]
    assert [(hit.kind, hit.bytes) for hit in hits] == [("copy", 4), ("wait", 0)] * 2


def test_runtime_and_driver_record_of_one_call_count_once(tmp_path):
    class Both(Engine):
        def accumulate(self, number):
            super().accumulate(number)
            if number == 3:
                r = self.r
                call = r.api("cudaMemcpyAsync_v3020")
                r.api("cuMemcpyDtoHAsync_v2", correlation=call)
                r.copy(4, stream=COMPUTE, correlation=call)
                r.wait()
                r.api("cuStreamSynchronize", correlation=r.correlation)

    _, facts = judged(record_engine(tmp_path / "a.sqlite", Scenario(), Both))
    hits = [hit.kind for hit in facts.hits if hit.range == tracing.ACCUMULATE]
    assert hits == ["copy", "wait"]


def test_range_ends_before_a_call_that_follows_at_once(tmp_path):
    recorder = Recorder()
    recorder.create_domain()
    with recorder.eldr(tracing.ACCUMULATE):
        recorder.launch("eldr_accumulate", US)
    recorder.item()
    with recorder.eldr(tracing.ACCUMULATE):
        recorder.launch("eldr_accumulate", US)
    _, facts = judged(recorder.write(tmp_path / "a.sqlite"))
    assert facts.hits == []


def test_chosen_ranges_of_any_domain(tmp_path):
    recorder = Recorder()
    with recorder.range("aten::item"):
        recorder.item()
    with recorder.range("aten::mul"):
        recorder.launch("mul", US)
    path = recorder.write(tmp_path / "a.sqlite")
    verdict, facts = judged(path, options=Options(ranges="aten::item*"))
    assert (verdict.overall, len(facts.hits)) == (FAIL, 2)
    assert judged(path, options=Options(ranges="aten::mul*"))[0].overall == PASS
    assert judged(path, options=Options(ranges="aten::nothing*"))[0].overall == CANNOT_TELL


@pytest.mark.skipif(not REAL.is_file(), reason=f"the real export is not here: {REAL}")
def test_real_export_has_exactly_one_copy_and_one_wait():
    verdict, facts = judged(REAL, options=Options(whole=True))
    assert verdict.overall == FAIL
    copy, wait = facts.hits
    assert (copy.kind, copy.bytes, copy.pinned, copy.blocking) == ("copy", 4, True, False)
    assert (wait.kind, wait.api) == ("wait", "cudaStreamSynchronize_v3020")
    verdict, facts = judged(REAL)
    assert verdict.overall == CANNOT_TELL
    assert (facts.total_copies, facts.total_waits) == (1, 1)


@pytest.mark.skipif(not REAL.is_file(), reason=f"the real export is not here: {REAL}")
def test_fixture_tables_are_those_of_real_exports():
    """Our columns are the real ones, in order; a newer schema may only have more at the end."""
    with sqlite3.connect(f"file:{REAL}?mode=ro&immutable=1", uri=True) as db:
        for table in schema.tables():
            real = [row[1] for row in db.execute(f'PRAGMA table_info("{table}")')]
            if real:
                ours = [part.split()[0] for part in schema.parts(table)]
                assert ours[: len(real)] == real, table


def test_command_line(tmp_path, capsys):
    clean = record_engine(tmp_path / "clean.sqlite", Scenario())
    assert main([str(clean), "--json"]) == 0
    data = json.loads(capsys.readouterr().out)
    assert (data["verdict"], data["findings"]) == (PASS, data["findings"])
    assert {finding["range"] for finding in data["findings"]} == {tracing.COPY}
    fault = next(f for f in FAULTS if f.name == "hidden .item()").write(tmp_path / "f.sqlite")
    assert main([str(fault)]) == 1
    assert "host waits 40.0 us in cudaStreamSynchronize_v3020 in range `accumulate`" in (
        capsys.readouterr().out
    )
    assert main([str(clean), "--expect", "accumulate,route"]) == 3
    with pytest.raises(SystemExit) as usage:
        main([str(clean), "--whole", "--ranges", "x"])
    assert usage.value.code == 2


def test_what_is_no_export_cannot_be_judged(tmp_path, capsys):
    assert main([str(tmp_path / "nowhere.sqlite"), "--json"]) == 3
    assert json.loads(capsys.readouterr().out)["verdict"] == CANNOT_TELL
    text = tmp_path / "text.sqlite"
    text.write_text("not a database at all, but long enough to look at")
    assert main([str(text)]) == 3
    cut = record_engine(tmp_path / "cut.sqlite", Scenario())
    cut.write_bytes(cut.read_bytes()[: cut.stat().st_size // 2])
    assert main([str(cut)]) == 3
    sqlite3.connect(tmp_path / "empty.sqlite").execute("CREATE TABLE x (y)").connection.close()
    assert main([str(tmp_path / "empty.sqlite")]) == 3
