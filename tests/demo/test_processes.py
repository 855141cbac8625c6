"""The supervisor stops what it started, and says what went wrong."""

from __future__ import annotations

import io
import os
import signal
import sys
from pathlib import Path

import psutil
import pytest

from eldr.demo.console import Console
from eldr.demo.ports import free_ports
from eldr.demo.processes import Child, ProcessFailed, Supervisor

_SERVER = """
import http.server, subprocess, sys
child = subprocess.Popen([sys.executable, "-c", "import signal; signal.pause()"])
print("child", child.pid, flush=True)
class Health(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200); self.end_headers()
http.server.HTTPServer(("127.0.0.1", int(sys.argv[1])), Health).serve_forever()
"""


@pytest.fixture
def supervisor(tmp_path: Path) -> Supervisor:
    return Supervisor(tmp_path / "logs", Console(io.StringIO()))


def _server(supervisor: Supervisor) -> Child:
    (port,) = free_ports(1)
    command = [sys.executable, "-c", _SERVER, str(port)]
    return supervisor.start("server", command, f"http://127.0.0.1:{port}")


def _descendant(child: Child) -> psutil.Process:
    return psutil.Process(int(child.log.read_text().split()[1]))


def test_stops_descendants_when_the_block_fails(supervisor: Supervisor) -> None:
    with pytest.raises(KeyboardInterrupt), supervisor:  # noqa: PT012 - the block is the test
        child = _server(supervisor)
        supervisor.wait_healthy([child], timeout=240)
        descendant = _descendant(child)
        assert descendant.is_running()
        raise KeyboardInterrupt
    assert child.process.poll() is not None
    psutil.wait_procs([descendant], timeout=120)
    assert not descendant.is_running() or descendant.status() == psutil.STATUS_ZOMBIE


def test_stopping_a_dead_child_is_fine(supervisor: Supervisor) -> None:
    with supervisor:
        child = _server(supervisor)
        supervisor.wait_healthy([child], timeout=240)
        os.killpg(child.process.pid, signal.SIGKILL)
        child.process.wait()


def test_a_child_that_dies_is_named_with_its_last_error(supervisor: Supervisor) -> None:
    script = "print('ValueError: no such model'); print('bye'); raise SystemExit(7)"
    with supervisor:
        child = supervisor.start("decode-0", [sys.executable, "-c", script], "http://127.0.0.1:9")
        child.process.wait()
        with pytest.raises(ProcessFailed) as failure:
            supervisor.wait_healthy([child], timeout=240)
    text = str(failure.value)
    assert "decode-0" in text
    assert "exit code 7" in text
    assert "ValueError: no such model" in text
    assert str(child.log) in text


def test_a_child_that_never_answers_is_named_with_the_limit(supervisor: Supervisor) -> None:
    (port,) = free_ports(1)
    url = f"http://127.0.0.1:{port}"
    with supervisor:
        command = [sys.executable, "-c", "import signal; signal.pause()"]
        child = supervisor.start("prefill", command, url)
        with pytest.raises(ProcessFailed, match=r"prefill did not answer .* within 0 s"):
            supervisor.wait_healthy([child], timeout=0)
        assert child.last_error() == "(the log is empty)"


def test_free_ports_are_distinct() -> None:
    ports = free_ports(16)
    assert len(set(ports)) == 16
