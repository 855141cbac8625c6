"""The Ray Serve application against `eldr serve` on the same mock workers, one run, interleaved.

    python -m benchmarks.ray_overhead --json > results/ray_overhead.json

Both sides decide with marginal_cost and get the canned answers of `router_mocks`: `eldr serve` over
HTTP from mock processes, the application from mock engines inside its replicas, since under Ray the
replica is the worker. Kinds of requests: `plain`; `stream`, whose events all come at once; `paced`,
whose events come and pass one by one, as tokens do. CPU time is what the kernel accounts to each
process, and only the processes between client and engine count: `eldr serve` is one; under Ray they
are Serve's HTTP proxy and ELDR's proxy replica. Replicas and Ray's own processes are listed apart.
"""

from __future__ import annotations

import argparse
import contextlib
import datetime
import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import uvloop

from benchmarks.machine import cpu_name
from benchmarks.router import CONNECTIONS, alone, cpu_ns, load, mocks, quantiles
from benchmarks.router_mocks import EVENTS
from eldr.demo.ports import free_ports

# Kind of request -> pause after each event in seconds, and its share of a round's requests.
KINDS = {"plain": (0.0, 1.0), "stream": (0.0, 1.0), "paced": (0.05, 0.25)}
_NO_CPU = {"num_cpus": 0}
# Process title -> part of the path.
_PARTS = {
    "ray::ProxyActor": "serve_http_proxy",
    "ray::ServeReplica:eldr:EldrProxy": "eldr_proxy",
    "ray::ServeReplica:eldr:EldrPrefill": "replicas",
    "ray::ServeReplica:eldr:EldrDecode": "replicas",
}
BETWEEN = ("eldr_serve", "serve_http_proxy", "eldr_proxy")


@dataclass
class Side:
    """One of the two under test."""

    name: str
    port: int
    parts: dict[str, list[int]]
    cpu_us: dict[str, dict[str, list[float]]] = field(default_factory=dict)
    seconds: dict[str, list[float]] = field(default_factory=dict)
    errors: int = 0

    def measure(self, kind: str, total: int) -> None:
        """One round of one kind of request."""
        before = self._cpu()
        errors, seconds = uvloop.run(load(self.port, total, CONNECTIONS, stream=kind != "plain"))
        self.errors += errors
        self.seconds.setdefault(kind, []).extend(seconds)
        for part, used in self._cpu().items():
            rounds = self.cpu_us.setdefault(kind, {}).setdefault(part, [])
            rounds.append((used - before[part]) / 1e3 / total)

    def _cpu(self) -> dict[str, int]:
        return {part: sum(map(cpu_ns, pids)) for part, pids in self.parts.items()}

    def row(self) -> dict[str, Any]:
        """The side's figures."""
        out: dict[str, Any] = {"errors": self.errors}
        for kind, cpu_us in self.cpu_us.items():
            parts = {p: round(statistics.median(v), 1) for p, v in cpu_us.items()}
            between = round(sum(v for p, v in parts.items() if p in BETWEEN), 1)
            out[kind] = {"cpu_us_between": between, "cpu_us": parts}
            out[kind] |= quantiles(self.seconds[kind])
        return out


@contextlib.contextmanager
def eldr_serve(prefill: list[str], decode: list[str]) -> Iterator[Side]:
    """The router process."""
    port, metrics = free_ports(2)
    workers = [w for url in prefill for w in ("--prefill", url)]
    workers += [w for url in decode for w in ("--decode", url)]
    command = [sys.executable, "-m", "eldr", "serve", "--log-level", "error"]
    command += ["--policy", "marginal_cost", "--port", str(port), "--prometheus-port", str(metrics)]
    process = subprocess.Popen([*command, *workers], stderr=subprocess.DEVNULL)
    try:
        yield Side("eldr_serve", port, {"eldr_serve": [process.pid]})
    finally:
        process.terminate()
        process.wait()


@contextlib.contextmanager
def ray_application(prefill: int, decode: int, pause: float) -> Iterator[Side]:
    """Ray and the application with mock engines."""
    (port,) = free_ports(1)
    config = {
        "application": "benchmarks.ray_mocks:open_application",
        "engine": {"pause": pause},
        "prefill": {"replicas": prefill, "actor": _NO_CPU},
        "decode": {"replicas": decode, "actor": _NO_CPU},
        "proxy": {"actor": _NO_CPU},
        "routing": {"policy": "marginal_cost"},
    }
    with tempfile.TemporaryDirectory(prefix="eldr-ray-", dir="/tmp") as folder:
        file = Path(folder) / "app.json"
        file.write_text(json.dumps(config))
        command = [sys.executable, "-m", "eldr.serving.ray", str(file), "--port", str(port)]
        command += ["--num-cpus", "1", "--object-store-mib", "100", "--temp-dir", f"{folder}/r"]
        process = subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, start_new_session=True
        )
        try:
            assert process.stdout is not None
            ready = next((line for line in process.stdout if b'"ready"' in line), None)
            if ready is None:
                raise SystemExit(f"Ray ended with {process.wait()}; try the command: {command}")
            yield Side("ray", port, ray_parts(process.pid))
        finally:
            process.terminate()
            process.wait()


def ray_parts(session: int) -> dict[str, list[int]]:
    """The processes of a Ray that this program started, by part of the path."""
    parts: dict[str, list[int]] = {}
    for entry in Path("/proc").iterdir():
        with contextlib.suppress(OSError, ValueError):
            pid = int(entry.name)
            if os.getsid(pid) == session and pid != session:
                title = (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode().strip()
                part = next((p for t, p in _PARTS.items() if title.startswith(t)), "ray_itself")
                parts.setdefault(part, []).append(pid)
    return parts


def compare(
    pause: float, rounds: int, total: int
) -> tuple[dict[str, dict[str, Any]], dict[str, Any]]:
    """Both sides, interleaved, on the kinds with this pause: figures by side, and one by one."""
    kinds = {kind: int(total * share) for kind, (of, share) in KINDS.items() if of == pause}
    with (
        mocks(pause) as (prefill, decode),
        eldr_serve(prefill, decode) as router,
        ray_application(len(prefill), len(decode), pause) as ray,
    ):
        sides = [router, ray]
        for side in sides:  # connections and caches are warm before anything counts
            uvloop.run(load(side.port, max(total // 4, CONNECTIONS), CONNECTIONS, stream=True))
        for number in range(rounds):
            for kind, requests in kinds.items():
                for side in sides if number % 2 == 0 else reversed(sides):
                    side.measure(kind, requests)
        single = {kind: one_by_one(sides, max(total // 5, 5), kind) for kind in kinds if not pause}
        return {side.name: side.row() for side in sides}, single


def one_by_one(sides: list[Side], total: int, kind: str) -> dict[str, dict[str, float]]:
    """Times of requests that have the machine to themselves, by side."""
    seconds: dict[str, list[float]] = {side.name: [] for side in sides}
    for _ in range(3):
        for side in sides:
            seconds[side.name] += uvloop.run(alone([side.port], total, stream=kind == "stream"))
    return {name: quantiles(values) for name, values in seconds.items()}


def run(rounds: int, total: int) -> dict[str, Any]:
    """The result as JSON values."""
    load_before = os.getloadavg()
    rows, single = compare(0.0, rounds, total)
    paced, _ = compare(KINDS["paced"][0], rounds, total)
    for name, row in rows.items():
        row["errors"] += paced[name].pop("errors")
        row |= paced[name]
        more = row["paced"]["cpu_us_between"] - row["plain"]["cpu_us_between"]
        row["cpu_us_per_event"] = round(more / EVENTS, 1)
    ray, serve = rows["ray"], rows["eldr_serve"]
    return {
        "sides": rows,
        "cpu_ratio": {
            kind: round(ray[kind]["cpu_us_between"] / serve[kind]["cpu_us_between"], 2)
            for kind in KINDS
        },
        "one_request_at_a_time": single,
        "rounds": rounds,
        "requests_per_round": total,
        "connections": CONNECTIONS,
        "events": EVENTS,
        "load_average_before": [round(x, 1) for x in load_before],
        "load_average": [round(x, 1) for x in os.getloadavg()],
        "machine": {"cores": os.cpu_count(), "cpu": cpu_name()},
        "date": datetime.date.today().isoformat(),
        "command": " ".join(["python -m benchmarks.ray_overhead", *sys.argv[1:]]),
    }


def main() -> int:
    """Runs and prints."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--requests", type=int, default=400, help="per round, kind and side")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    args = parser.parse_args()
    result = run(args.rounds, args.requests)
    print(json.dumps(result, indent=1) if args.json else json.dumps(result))
    return 1 if any(row["errors"] for row in result["sides"].values()) else 0


if __name__ == "__main__":
    sys.exit(main())
