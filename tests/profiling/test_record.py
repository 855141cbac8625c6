"""record.sh, with stand-ins for nsys and vllm that are real processes with real signals."""

import os
import shlex
import signal
import socket
import stat
import subprocess
import sys
import time
from pathlib import Path

import pytest

from profiling.audit import main as audit

ROOT = Path(__file__).parents[2]
SCRIPT = ROOT / "profiling/record.sh"

NSYS = """
import os, signal, subprocess, sys
from pathlib import Path
words = sys.argv[1:]
out = words[words.index("-o") + 1]
if words[0] == "export":
    from profiling.fixture import Scenario, record_engine
    record_engine(Path(out), Scenario())
    sys.exit(0)
child = subprocess.Popen(words[words.index("vllm"):])
closing = []
def close(*_):
    closing.append(True)
    child.terminate()
signal.signal(signal.SIGINT, close)
code = child.wait()
if closing and not os.environ.get("FAKE_NO_REPORT"):
    Path(out + ".nsys-rep").write_text("capture")
sys.exit(0 if closing else code)
"""
VLLM = """
import json, os, sys, urllib.request
from http.server import BaseHTTPRequestHandler, HTTPServer
words = sys.argv[1:]
if words[0] == "bench":
    url = words[words.index("--base-url") + 1]
    if os.environ.get("FAKE_LOAD_FAILS"):
        sys.exit("no such model")
    urllib.request.urlopen(url + "/start_profile", data=b"").read()
    sys.exit(0)
if os.environ.get("FAKE_SERVER_DIES"):
    sys.exit("out of memory")
class Handler(BaseHTTPRequestHandler):
    def answer(self):
        self.send_response(200); self.end_headers()
        snapshot = {"v": 1, "steps": 1, "tokens": 1, "seconds": 1, "distinct": [1]}
        self.wfile.write(json.dumps(snapshot).encode())
    do_GET = do_POST = answer
print("ELDR_NVTX =", os.environ["ELDR_NVTX"], flush=True)
HTTPServer(("127.0.0.1", int(words[words.index("--port") + 1])), Handler).serve_forever()
"""


@pytest.fixture
def tools(tmp_path):
    """Environment with the stand-ins first on PATH."""
    folder = tmp_path / "bin"
    folder.mkdir()
    for name, code in (("nsys", NSYS), ("vllm", VLLM)):
        path = folder / name
        path.write_text(f"#!{sys.executable}\n{code}")
        path.chmod(path.stat().st_mode | stat.S_IXUSR)
    path = f"{folder}:{os.environ['PATH']}"
    return {**os.environ, "PATH": path, "PYTHONPATH": str(ROOT), "PYTHON": sys.executable}


def free_port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def record(environment, folder, *words):
    place = ["--out", str(folder), "--port", str(free_port())]
    command = ["bash", str(SCRIPT), words[0], *place, *words[1:]]
    return subprocess.run(
        command, env=environment, capture_output=True, text=True, check=False, timeout=240
    )


def test_dry_run_prints_the_commands_and_runs_nothing(tmp_path):
    done = record(os.environ, tmp_path / "x", "prefill", "--model", "a b", "--dry-run")
    server, load, export, last = done.stdout.splitlines()
    words = shlex.split(server)
    for flag in ("--cuda-graph-trace=node", "--trace-fork-before-exec=true", "ELDR_NVTX=1"):
        assert flag in words
    assert words[words.index("-c") + 1] == "cudaProfilerApi"
    assert words[words.index("--additional-config") + 1] == '{"eldr": {"role": "prefill"}}'
    assert words[words.index("serve") + 1] == "a b"
    assert '{"kv_transfer_params": {"eldr": {"counts": true}}}' in shlex.split(load)
    assert shlex.split(export)[-1] == f"{tmp_path}/x/prefill.nsys-rep"
    assert last == f"{tmp_path}/x/prefill.sqlite"
    assert not (tmp_path / "x").exists()


def test_baseline_differs_only_by_eldr(tmp_path):
    ours = record(os.environ, tmp_path, "decode", "--model", "m", "--dry-run").stdout
    base = record(os.environ, tmp_path, "decode", "--model", "m", "--dry-run", "--baseline").stdout
    ours_load, base_load = ours.splitlines()[1], base.splitlines()[1]
    assert shlex.split(ours_load)[:6] == shlex.split(base_load)[:6]
    assert "additional-config" not in base
    assert "ELDR_NVTX=0" in base
    from_start = record(
        *(os.environ, tmp_path, "decode", "--model", "m", "--dry-run", "--from-start"), "--", "--tp"
    ).stdout
    assert "cudaProfilerApi" not in from_start
    assert from_start.splitlines()[0].split()[-1] == "--tp"


@pytest.mark.parametrize(
    ("words", "says"),
    [
        ([], "usage"),
        (["both"], "expected prefill or decode"),
        (["decode"], "--model is missing"),
        (["decode", "--model"], "--model needs a value"),
        (["decode", "--model", "m", "--requests", "many"], "positive number"),
        (["decode", "--model", "m", "--fast"], "unknown option"),
    ],
)
def test_usage(words, says):
    command = ["bash", str(SCRIPT), *words]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert says in done.stderr


def test_missing_tools_cannot_tell(tmp_path):
    environment = {**os.environ, "PATH": "/usr/bin:/bin"}
    done = record(environment, tmp_path, "prefill", "--model", "m")
    assert done.returncode == 3
    assert "nsys is not on PATH" in done.stderr


def test_whole_run_ends_with_an_export_that_the_audit_reads(tools, tmp_path):
    done = record(tools, tmp_path / "out", "decode", "--model", "m", "--requests", "3")
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1] == f"{tmp_path}/out/decode.sqlite"
    assert "ELDR_NVTX = 1" in (tmp_path / "out/decode.log").read_text()
    assert (tmp_path / "out/decode.jsonl").exists()
    assert audit([str(tmp_path / "out/decode.sqlite")]) == 0


@pytest.mark.parametrize(
    ("fault", "says"),
    [
        ("FAKE_SERVER_DIES", "the worker ended"),
        ("FAKE_LOAD_FAILS", "the load failed"),
        ("FAKE_NO_REPORT", "nsys wrote no"),
    ],
)
def test_failures_are_told_and_leave_no_process(tools, tmp_path, fault, says):
    done = record({**tools, fault: "1"}, tmp_path / "out", "prefill", "--model", "m")
    assert done.returncode == 1
    assert says in done.stderr
    assert not running(tmp_path)


def test_interrupt_stops_the_worker(tools, tmp_path):
    environment = {**tools, "FAKE_SERVER_DIES": ""}
    vllm = tmp_path / "bin/vllm"
    vllm.write_text(f"#!{sys.executable}\nimport time; time.sleep(600)")
    command = ["bash", str(SCRIPT), "prefill", "--model", "m", "--out", str(tmp_path / "out")]
    process = subprocess.Popen(
        [*command, "--port", str(free_port())], env=environment, start_new_session=True
    )
    deadline = time.monotonic() + 60
    while not running(tmp_path, "vllm"):
        assert time.monotonic() < deadline
        time.sleep(0.05)
    process.send_signal(signal.SIGTERM)
    assert process.wait(60) == 130
    assert not running(tmp_path)


def running(folder, name=""):
    """Processes whose command line names the stand-ins' folder."""
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            line = path.read_bytes().replace(b"\0", b" ").decode(errors="replace")
        except OSError:
            continue
        if f"{folder}/bin/{name}" in line:
            found.append(line)
    return found
