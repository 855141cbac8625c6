"""`eldr serve` against vllm-router on the same mocks: CPU per request, added latency, many streams.

    python -m venv /tmp/peer && /tmp/peer/bin/pip install vllm-router==0.1.17
    python -m benchmarks.router --peer /tmp/peer/bin/vllm-router [--rounds 5] [--json]

Interleaved in one run: every round measures every router once per kind of request, so that what
else the machine does hits all alike. CPU time is what the kernel accounts to the router's threads.
Health checks, metrics and the decision buffer are on. Without --peer (or vllm-router on PATH) the
peer's rows are left out, with the reason.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import datetime
import json
import os
import shutil
import statistics
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import uvloop

from benchmarks.machine import cpu_name
from benchmarks.router_parts import parts
from eldr.demo.ports import free_ports

CONNECTIONS = 16
STREAMS = 1000
PROMPT = "x" * 2000


def request(port: int, *, stream: bool, query: str = "") -> bytes:
    """A chat request as bytes."""
    body = json.dumps(
        {
            "model": "m",
            "messages": [{"role": "user", "content": PROMPT}],
            "max_tokens": 16,
            "stream": stream,
        }
    ).encode()
    return (
        b"POST /v1/chat/completions%b HTTP/1.1\r\nHost: 127.0.0.1:%d\r\n"
        b"Content-Type: application/json\r\nContent-Length: %d\r\n\r\n%b"
        % (query.encode(), port, len(body), body)
    )


class Caller(asyncio.Protocol):
    """A keep-alive connection that sends the same request again and again."""

    def __init__(self, data: bytes, stream: bool) -> None:
        self._data, self._stream = data, stream
        self._buffer = bytearray()
        self._done: asyncio.Future[bool] | None = None
        self._transport: asyncio.Transport | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        self._transport = transport

    def connection_lost(self, error: Exception | None) -> None:
        self._finish(False)

    async def call(self) -> bool:
        """One request; whether it was answered as it should be."""
        assert self._transport is not None
        self._buffer.clear()
        self._done = asyncio.get_running_loop().create_future()
        self._transport.write(self._data)
        return await self._done

    def data_received(self, data: bytes) -> None:
        self._buffer += data
        if self._stream:
            if self._buffer.endswith(b"0\r\n\r\n"):
                self._finish(
                    b"data: [DONE]" in self._buffer[-64:] and b'"error"' not in self._buffer
                )
            elif self._buffer.startswith(b"HTTP/1.1 ") and self._buffer[9:12] != b"200":
                self._finish(False)
            return
        end = self._buffer.find(b"\r\n\r\n")
        if end < 0:
            return
        head = bytes(self._buffer[:end]).lower()
        length = int(head.split(b"content-length:", 1)[1].split(b"\r\n", 1)[0])
        if len(self._buffer) >= end + 4 + length:
            self._finish(head.startswith(b"http/1.1 200"))

    def _finish(self, ok: bool) -> None:
        if self._done is not None and not self._done.done():
            self._done.set_result(ok)

    def close(self) -> None:
        """Drops the connection."""
        if self._transport is not None:
            self._transport.close()


async def connect(port: int, *, stream: bool, query: str = "") -> Caller:
    """A connection to a port."""
    loop = asyncio.get_running_loop()
    data = request(port, stream=stream, query=query)
    _, caller = await loop.create_connection(lambda: Caller(data, stream), "127.0.0.1", port)
    return caller


async def load(
    port: int, total: int, connections: int, *, stream: bool, query: str = ""
) -> tuple[int, list[float]]:
    """So many requests over so many connections: errors, and seconds of each request."""
    numbers, errors, seconds = iter(range(total)), 0, []

    async def loop() -> None:
        nonlocal errors
        caller = await connect(port, stream=stream, query=query)
        for _ in numbers:
            start = time.perf_counter()
            if not await caller.call():
                errors += 1
                caller.close()
                caller = await connect(port, stream=stream, query=query)
            seconds.append(time.perf_counter() - start)
        caller.close()

    await asyncio.gather(*(loop() for _ in range(connections)))
    return errors, seconds


def cpu_ns(pid: int) -> int:
    """Processor time of all threads of a process."""
    total = 0
    for task in Path(f"/proc/{pid}/task").iterdir():
        with contextlib.suppress(FileNotFoundError):
            total += int((task / "schedstat").read_text().split()[0])
    return total


@dataclass
class Router:
    """A router under test."""

    name: str
    port: int
    process: subprocess.Popen[bytes]
    cpu_us: dict[str, list[float]] = field(default_factory=dict)
    seconds: dict[str, list[float]] = field(default_factory=dict)
    errors: int = 0

    def measure(self, kind: str, total: int) -> None:
        """One round of one kind of request."""
        before = cpu_ns(self.process.pid)
        errors, seconds = uvloop.run(load(self.port, total, CONNECTIONS, stream=kind == "stream"))
        used = cpu_ns(self.process.pid) - before
        self.errors += errors
        self.cpu_us.setdefault(kind, []).append(used / 1e3 / total)
        self.seconds.setdefault(kind, []).extend(seconds)


@contextlib.contextmanager
def mocks(pause: float) -> Iterator[tuple[list[str], list[str]]]:
    """2 prefill and 4 decode mocks in a process of their own; their URLs."""
    ports = free_ports(6)
    roles = ["prefill"] * 2 + ["decode"] * 4
    pairs = [f"{port}:{role}" for port, role in zip(ports, roles, strict=True)]
    command = [sys.executable, "-m", "benchmarks.router_mocks", str(pause), *pairs]
    process = subprocess.Popen(command, stdout=subprocess.PIPE)
    try:
        assert process.stdout is not None
        process.stdout.readline()
        urls = [f"http://127.0.0.1:{port}" for port in ports]
        yield urls[:2], urls[2:]
    finally:
        process.terminate()
        process.wait()


def commands(peer: str | None) -> dict[str, list[str]]:
    """Routers under test: the command line up to the workers."""
    eldr = [sys.executable, "-m", "eldr", "serve", "--log-level", "error"]
    out = {
        "eldr_least_requests": [*eldr, "--policy", "least_requests"],
        "eldr_marginal_cost": [*eldr, "--policy", "marginal_cost"],
    }
    for policy in ("power_of_two", "round_robin") if peer else ():
        out[f"vllm_router_{policy}"] = [
            *(str(peer), "--vllm-pd-disaggregation", "--prefill-policy", "round_robin"),
            *("--decode-policy", policy, "--log-level", "error"),
        ]
    return out


@contextlib.contextmanager
def routers(peer: str | None, prefill: list[str], decode: list[str]) -> Iterator[list[Router]]:
    """All routers, started and ready."""
    started: list[Router] = []
    try:
        for name, command in commands(peer).items():
            port, extra = free_ports(2)
            workers = [w for url in prefill for w in ("--prefill", url)]
            workers += [w for url in decode for w in ("--decode", url)]
            command = [*command, *workers, "--host", "127.0.0.1", "--port", str(port)]
            command += ["--prometheus-port", str(extra)]
            process = subprocess.Popen(
                command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
            )
            started.append(Router(name, port, process))
        for router in started:
            wait_ready(router)
        yield started
    finally:
        for router in started:
            router.process.terminate()
        for router in started:
            router.process.wait()


def wait_ready(router: Router) -> None:
    """Waits for /health."""
    for _ in range(600):
        if router.process.poll() is not None:
            raise SystemExit(f"{router.name} ended with {router.process.returncode}")
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{router.port}/health", timeout=5):
                return
        except (urllib.error.URLError, OSError):
            time.sleep(0.1)
    raise SystemExit(f"{router.name} did not become ready")


def throughput(peer: str | None, rounds: int, total: int) -> dict[str, Any]:
    """CPU per request and latency of every router, interleaved."""
    with mocks(0.0) as (prefill, decode), routers(peer, prefill, decode) as started:
        for router in started:  # connections and caches are warm before anything counts
            uvloop.run(load(router.port, total // 4, CONNECTIONS, stream=True))
        for number in range(rounds):
            order = started[number % len(started) :] + started[: number % len(started)]
            for kind in ("plain", "stream"):
                for router in order:
                    router.measure(kind, total)
        return {router.name: _row(router) for router in started}


def _row(router: Router) -> dict[str, Any]:
    row: dict[str, Any] = {"errors": router.errors, "resident_mb": resident_mb(router.process.pid)}
    for kind, values in router.cpu_us.items():
        row[kind] = {
            "cpu_us_median": round(statistics.median(values), 1),
            "cpu_us_min": round(min(values), 1),
            "cpu_us_rounds": [round(v, 1) for v in values],
            **quantiles(router.seconds[kind]),
        }
    return row


def quantiles(seconds: list[float]) -> dict[str, float]:
    """P50 and p99 in milliseconds."""
    ordered = sorted(seconds)
    return {
        f"p{q}_ms": round(1e3 * ordered[min(len(ordered) - 1, len(ordered) * q // 100)], 3)
        for q in (50, 99)
    }


def resident_mb(pid: int) -> float:
    """Resident memory of a process."""
    pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
    return round(pages * os.sysconf("SC_PAGE_SIZE") / 2**20, 1)


async def alone(ports: list[int], total: int, *, stream: bool) -> list[float]:
    """Seconds per request when nothing else runs, through a chain of ports one after the other."""
    callers = [await connect(p, stream=stream and p == ports[-1]) for p in ports]
    seconds = []
    for _ in range(total):
        start = time.perf_counter()
        for caller in callers:
            await caller.call()
        seconds.append(time.perf_counter() - start)
    for caller in callers:
        caller.close()
    return seconds


def latency(peer: str | None, total: int) -> dict[str, Any]:
    """What a router adds to prefill and decode asked directly one after the other."""
    out: dict[str, Any] = {}
    with mocks(0.0) as (prefill, decode), routers(peer, prefill, decode) as started:
        direct = [int(url.rsplit(":", 1)[1]) for url in (prefill[0], decode[0])]
        for kind in ("plain", "stream"):
            base: list[float] = []
            through: dict[str, list[float]] = {router.name: [] for router in started}
            for _ in range(5):
                base += uvloop.run(alone(direct, total // 5, stream=kind == "stream"))
                for router in started:
                    through[router.name] += uvloop.run(
                        alone([router.port], total // 5, stream=kind == "stream")
                    )
            zero = quantiles(base)
            out[kind] = {"direct": zero}
            for name, seconds in through.items():
                own = quantiles(seconds)
                out[kind][name] = {k: round(own[k] - zero[k], 3) for k in own}
    return out


def streams(peer: str | None) -> dict[str, Any]:
    """A thousand streams at the same time, 16 events each, 20 ms apart."""
    out = {}
    with mocks(0.02) as (prefill, decode), routers(peer, prefill, decode) as started:
        for router in started:
            errors, seconds = uvloop.run(load(router.port, STREAMS, STREAMS, stream=True))
            out[router.name] = {"errors": errors, **quantiles(seconds)}
    return out


def run(peer: str | None, rounds: int, total: int) -> dict[str, Any]:
    """Everything; the result as JSON values."""
    rows = throughput(peer, rounds, total)
    many = streams(peer)
    ratios: dict[str, dict[str, float]] = {}
    if peer:
        for name in (n for n in rows if n.startswith("eldr")):
            ratios[name] = {
                kind: round(
                    rows[name][kind]["cpu_us_median"]
                    / min(
                        r[kind]["cpu_us_median"] for n, r in rows.items() if n.startswith("vllm")
                    ),
                    2,
                )
                for kind in ("plain", "stream")
            }
    return {
        "routers": rows,
        "cpu_ratio_to_best_peer": ratios,
        "peer": peer_version(peer) if peer else "left out: no vllm-router; give --peer PATH",
        "added_latency_ms": latency(peer, total),
        "concurrent_streams": {"streams": STREAMS, **many},
        "parts": parts(),
        "rounds": rounds,
        "requests_per_round": total,
        "connections": CONNECTIONS,
        "load_average": [round(x, 1) for x in os.getloadavg()],
        "machine": {"cores": os.cpu_count(), "cpu": cpu_name()},
        "date": datetime.date.today().isoformat(),
        "command": f"python -m benchmarks.router --peer vllm-router --rounds {rounds} --json",
    }


def peer_version(peer: str) -> str:
    """What the peer calls itself."""
    python = Path(peer).with_name("python")
    code = "import importlib.metadata as m; print(m.version('vllm-router'))"
    done = subprocess.run([str(python), "-c", code], capture_output=True, text=True, check=False)
    return f"vllm-router {done.stdout.strip() or 'of unknown version'}"


def main() -> int:
    """Runs and prints."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--peer", default=shutil.which("vllm-router"), help="vllm-router's command")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--requests", type=int, default=1500, help="per round, kind and router")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    args = parser.parse_args()
    result = run(args.peer, args.rounds, args.requests)
    print(json.dumps(result, indent=1) if args.json else json.dumps(result))
    return 0


if __name__ == "__main__":
    sys.exit(main())
