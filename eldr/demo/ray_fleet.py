"""The demo's engines and routers as one application of Ray Serve."""

from __future__ import annotations

import contextlib
import json
import shutil
import signal
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from eldr.demo.config import DemoConfig
from eldr.demo.console import Console
from eldr.demo.fleet import SOURCES
from eldr.demo.http import get_json, post_json, samples
from eldr.demo.measure import DecodeCounters
from eldr.demo.ports import free_ports
from eldr.demo.processes import Child, ProcessFailed, Supervisor, uninterrupted
from eldr.demo.ray_workers import application, serve_command

_STOP = 120.0  # seconds; Serve lets engines drain
_TOLD = (b'{"ready"', b'{"failed"')


class RayFleet:
    """One Ray with a proxy, a prefill pool and a decode pool; decode replicas in order of rank.

    Another policy is another configuration of the application: Serve replaces the proxy and leaves
    the engines running.
    """

    def __init__(self, config: DemoConfig, supervisor: Supervisor, console: Console) -> None:
        self._config, self._supervisor = config, supervisor
        count = 1 + config.decode_workers
        console.say(f"starting Ray with {count} vLLM replicas on this machine's CPU; "
                    f"log in {config.out}/logs")  # fmt: skip
        self._file = config.out / "ray-app.json"
        self._write("round_robin", None)
        (port,) = free_ports(1)
        self.url = f"http://127.0.0.1:{port}"
        # Ray's socket paths may have 107 bytes: not below the output folder.
        self._temp = Path(tempfile.mkdtemp(prefix="eldr-ray-"))
        command = serve_command(self._file, port, self._temp)
        self._child: Child = supervisor.start("ray", command, self.url)
        self._deployed = 0

    def wait(self) -> None:
        """Until the configuration as it is now is deployed.

        Raises:
            ProcessFailed: Serve refused it, Ray ended, or it took too long.
        """
        self._deployed += 1

        def missing(child: Child) -> str | None:
            told = [x for x in child.log.read_bytes().splitlines() if x.startswith(_TOLD)]
            if told and "failed" in (last := json.loads(told[-1])):
                raise ProcessFailed(f"Serve refused {self._file}: {last['failed']}")
            return None if len(told) >= self._deployed else "deploy the application"

        self._supervisor.wait([self._child], missing, self._config.start_timeout)

    def close(self) -> None:
        """Serve and Ray end in their own order; what is left after a while is ended for them."""
        with uninterrupted():
            self._child.process.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._child.process.wait(_STOP)
            self._supervisor.stop(self._child)
            shutil.rmtree(self._temp, ignore_errors=True)

    def _write(self, policy: str, partition: Path | None) -> None:
        values = application(self._config.decode_workers, policy, partition, self._config.tau)
        self._file.write_text(json.dumps(values, indent=1))

    @property
    def prefill(self) -> str:
        """URL at which the proxy hands requests to a prefill replica."""
        return f"{self.url}/eldr/prefill"

    @contextmanager
    def route(self, name: str, policy: str, partition: Path | None) -> Iterator[str]:
        """The policy stays in force after the block, until the next one."""
        self._write(policy, partition)
        self._child.process.send_signal(signal.SIGHUP)
        self.wait()
        yield self.url

    def check_alive(self) -> None:
        """Raises `ProcessFailed` if Ray has ended."""
        self._supervisor.check_alive(self._child)

    def reset_prefix_caches(self) -> None:
        """Empties the prefix cache of every replica."""
        for pool in ("prefill", "decode"):
            self._every(pool, "/reset_prefix_cache", post=True)

    def counters(self) -> list[DecodeCounters]:
        """The decode replicas' counters, by rank."""
        rows = self._every("decode", "/eldr/decode")
        return [DecodeCounters.parse(json.loads(row["body"])) for row in rows]

    def prompt_tokens(self, source: str) -> int:
        """Prompt tokens that the decode replicas got from a source."""
        texts = [row["body"] for row in self._every("decode", "/metrics")]
        return int(sum(samples(text, SOURCES, source=source) for text in texts))

    def _every(self, pool: str, path: str, *, post: bool = False) -> list[dict[str, Any]]:
        """All replicas' answers, by rank."""
        url = f"{self.url}/eldr/every/{pool}{path}"
        rows: list[dict[str, Any]] = post_json(url) if post else get_json(url)
        bad = [row for row in rows if row.get("status") != 200]
        if bad:
            raise RuntimeError(f"{url}: {bad[0]}")
        return sorted(rows, key=lambda row: int(row["rank"]))


@contextmanager
def ray_fleet(config: DemoConfig, supervisor: Supervisor, console: Console) -> Iterator[RayFleet]:
    """The application, up; at the end nothing of it runs any more."""
    fleet = RayFleet(config, supervisor, console)
    try:
        fleet.wait()
        yield fleet
    finally:
        fleet.close()
