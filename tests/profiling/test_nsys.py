"""Running a program under nsys: the command, its failures, and how gpu-check reports the audit."""

import stat
import sys
from pathlib import Path

import pytest

from profiling import nsys
from profiling.verdict import CANNOT_TELL, FAIL, PASS, Check

ROOT = Path(__file__).parents[2]
NSYS = """
import os, sys
from pathlib import Path
words = sys.argv[1:]
out = words[words.index("-o") + 1]
if os.environ.get("FAKE_FAILS") == words[0]:
    sys.exit("one line\\nlicence expired")
if words[0] == "export":
    from profiling.faults import FAULTS
    from profiling.fixture import Scenario, record_engine
    fault = os.environ.get("FAKE_FAULT")
    if fault:
        next(f for f in FAULTS if f.name == fault).write(Path(out))
    else:
        record_engine(Path(out), Scenario())
else:
    Path(out + ".nsys-rep").write_text(os.environ["ELDR_NVTX"] + " ".join(words))
"""


@pytest.fixture
def fake(tmp_path, monkeypatch):
    path = tmp_path / "bin/nsys"
    path.parent.mkdir()
    path.write_text(f"#!{sys.executable}\n{NSYS}")
    path.chmod(path.stat().st_mode | stat.S_IXUSR)
    monkeypatch.setenv("PATH", str(path.parent), prepend=":")
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    return tmp_path / "out"


def by_name(checks):
    return {check.name: check.verdict for check in checks}


def test_clean_capture(fake):
    checks = by_name(nsys.audited("some.module", ["triton"], fake, 60))
    assert set(checks.values()) == {PASS}
    assert "kernel-share" not in checks
    command = (fake / "some.module-triton.nsys-rep").read_text()
    assert command.startswith("1profile")
    assert "--cuda-graph-trace=node" in command
    assert command.endswith("-m some.module triton")


def test_fault_and_doubt_come_through(fake, monkeypatch):
    monkeypatch.setenv("FAKE_FAULT", "hidden .item()")
    assert by_name(nsys.audited("m", [], fake, 60))["copies-and-waits"] == FAIL
    monkeypatch.setenv("FAKE_FAULT", "graph mode")
    assert by_name(nsys.audited("m", [], fake, 60))["graphs"] == CANNOT_TELL


@pytest.mark.parametrize("step", ["profile", "export"])
def test_failures_end_with_the_last_words(fake, monkeypatch, step):
    monkeypatch.setenv("FAKE_FAILS", step)
    with pytest.raises(nsys.NsysError, match=f"nsys {step}: exit code 1: licence expired"):
        nsys.audited("m", [], fake, 60)


def test_gpu_check_reports_verdicts_and_doubts(monkeypatch):
    stages = pytest.importorskip("profiling.gpu_check.stages")
    from profiling.gpu_check.clock import Budget
    from profiling.gpu_check.results import Results

    checks = [
        Check("canary", PASS, ("ok",)),
        Check("copies-and-waits", FAIL, ("a wait",)),
        Check("graphs", CANNOT_TELL, ("no nodes",)),
    ]
    monkeypatch.setattr(stages, "implementations", lambda op: {"torch": None, "triton": None})
    monkeypatch.setattr(stages.nsys, "installed", lambda: True)
    monkeypatch.setattr(stages.nsys, "audited", lambda *_: checks)
    results = Results("c", {}, "2026-01-01")
    stages.audit_captures(results, Budget(400))
    assert [(v.case, v.wrong) for v in results.verdicts] == [
        ("nsys canary", ""),
        ("nsys copies-and-waits", "a wait"),
    ]
    assert results.left_out == ["capture of triton, graphs: cannot tell: no nodes"]
    monkeypatch.setattr(stages.nsys, "installed", lambda: False)
    stages.audit_captures(results, Budget(400))
    assert results.left_out[-1] == "audit of a capture: nsys is not on PATH"
