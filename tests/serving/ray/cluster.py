"""A local Ray with the application on it, as a process of its own; everything it started ends."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from eldr.demo.ports import free_ports

START = 400.0  # seconds; two busy cores start four engines


class Cluster:
    """The running application.

    Attributes:
        url: of the ingress.
        metrics_url: Ray's own metrics page.
        folder: Ray's sessions, with the logs of every replica.
    """

    def __init__(self, folder: Path, config: dict[str, Any]) -> None:
        port, metrics = free_ports(2)
        self.url = f"http://127.0.0.1:{port}"
        self.metrics_url = f"http://127.0.0.1:{metrics}/metrics"
        self.folder = folder
        self._file = folder / "app.json"
        self._file.write_text(json.dumps(config))
        self._log = (folder / "runner.log").open("wb")
        options = ("--port", str(port), "--num-cpus", "1", "--object-store-mib", "100")
        options = (*options, "--metrics-port", str(metrics))
        command = [sys.executable, "-m", "eldr.serving.ray", str(self._file), *options]
        self.process = subprocess.Popen(
            [*command, "--temp-dir", str(folder / "r")],
            stdout=subprocess.PIPE,
            stderr=self._log,
            text=True,
            start_new_session=True,
        )
        self._told: list[dict[str, Any]] = []
        threading.Thread(target=self._read, daemon=True).start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            if line.startswith(('{"ready"', '{"failed"')):
                self._told.append(json.loads(line))

    def wait_ready(self, times: int = 1) -> None:
        """Until Serve was asked so many times to deploy and did it."""

        def told() -> bool:
            assert self.process.poll() is None, self.tail()
            return len(self._told) >= times

        until(told, START)
        assert "ready" in self._told[-1], self._told[-1]["failed"]

    def redeploy(self, config: dict[str, Any]) -> None:
        """Replaces the configuration and waits until Serve runs it."""
        times = len(self._told) + 1
        self._file.write_text(json.dumps(config))
        self.process.send_signal(signal.SIGHUP)
        self.wait_ready(times)

    def tail(self) -> str:
        """The end of the runner's log."""
        return (self.folder / "runner.log").read_text(errors="replace")[-3000:]

    def get(self, path: str) -> Any:
        """A GET, parsed."""
        with urllib.request.urlopen(self.url + path, timeout=120) as answer:
            return json.loads(answer.read())

    def post(self, path: str, body: dict[str, Any]) -> tuple[dict[str, str], bytes]:
        """A POST; headers and raw body. HTTP errors raise with the answer's text."""
        request = urllib.request.Request(
            self.url + path, json.dumps(body).encode(), {"Content-Type": "application/json"}
        )
        try:
            with urllib.request.urlopen(request, timeout=300) as answer:
                return {k.lower(): v for k, v in answer.headers.items()}, answer.read()
        except urllib.error.HTTPError as error:
            raise AssertionError(f"HTTP {error.code}: {error.read()[:500]!r}") from error

    def every(self, pool: str, path: str, *, post: bool = False) -> list[dict[str, Any]]:
        """The answers of all replicas of a pool, all of which must be 200."""
        url = f"{self.url}/eldr/every/{pool}{path}"
        request = urllib.request.Request(url, method="POST" if post else "GET")
        with urllib.request.urlopen(request, timeout=120) as answer:
            rows: list[dict[str, Any]] = json.loads(answer.read())
        assert all(row.get("status") == 200 for row in rows), rows
        return rows

    def close(self) -> None:
        """Ends the application, Ray and all replicas."""
        self.process.terminate()
        try:
            self.process.wait(120)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        self._log.close()


@contextlib.contextmanager
def cluster(config: dict[str, Any]) -> Iterator[Cluster]:
    """Starts the application; at the end nothing of it runs any more."""
    # Ray's socket paths may have 107 bytes: pytest's folders are too deep.
    folder = Path(tempfile.mkdtemp(prefix="eldr-ray-", dir="/tmp"))
    running = Cluster(folder, config)
    try:
        running.wait_ready()
        yield running
    finally:
        running.close()
        session = running.process.pid
        try:
            until(lambda: not left_over(session), 60.0)
        finally:
            for pid in left_over(session):
                os.kill(pid, signal.SIGKILL)
        shutil.rmtree(folder, ignore_errors=True)


def left_over(session: int) -> list[int]:
    """Processes that the runner or its descendants started and that still run."""
    return [pid for pid, state, _, of in processes() if of == session and state != "Z"]


def children(parent: int) -> list[int]:
    """Processes that a process started itself."""
    return [pid for pid, _, by, _ in processes() if by == parent]


def processes() -> Iterator[tuple[int, str, int, int]]:
    """Pid, state, parent and session of every process."""
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            with contextlib.suppress(OSError):
                fields = (entry / "stat").read_text().rsplit(")", 1)[1].split()
                yield int(entry.name), fields[0], int(fields[1]), int(fields[3])


def until(true: Callable[[], bool], seconds: float) -> None:
    """Waits for what other processes bring about."""
    end = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < end, f"not within {seconds:g} s"
        time.sleep(0.1)
