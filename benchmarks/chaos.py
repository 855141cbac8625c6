"""Chaos run: a real router process, workers killed, hung, restarted and confused at random.

    python -m benchmarks.chaos [--requests 10000] [--seed 0] [--json]

2 prefill and 6 decode mock workers, of which at least one of each kind is healthy at any moment.
What must hold: every request is answered or fails with a well-formed error; none is lost before its
first byte; all counters and reservations return to zero; the router's memory stays flat. Exit code
1 if one of them does not hold. What happens next depends on the seed and on how many requests have
ended, not on time.
"""

from __future__ import annotations

import argparse
import asyncio
import collections
import datetime
import json
import os
import random
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp

from benchmarks.machine import cpu_name
from eldr.demo.ports import free_ports
from eldr.geometry import Geometry
from tests.serving.mocks.worker import FOREVER, MockWorker, Plan

GEOMETRY = Geometry(4, 64, 4)
CONCURRENT = 48
# A random event happens after so many ended requests, on average.
EVENT_EVERY = 25
# Memory at the end, relative to after half of the requests. The allocator goes on to settle until
# about 20,000 of them; then it is the same to 1 %.
_FLAT = 1.04


def faults(rng: random.Random) -> Plan:
    """A way in which a living worker misbehaves."""
    after = rng.randrange(1, 6)
    kinds = [
        Plan(reset="answer"),
        Plan(status=rng.choice([429, 502, 503, 504])),
        Plan(raw=b"HTTP/1.1 200 OK\r\nContent-Le"),
        Plan(raw=b"\x16\x03\x01 this is no HTTP\r\n\r\n"),
        Plan(events=6, reset=after),
        Plan(events=6, fin=after),
        Plan(events=6, clean_end=after),
        Plan(events=6, piece=rng.randrange(1, 30)),
        Plan(events=6, wait=0.05),
        Plan(events=6, error_event={"error": {"message": "engine", "code": 500}}),
    ]
    return rng.choice(kinds)


@dataclass
class Chaos:
    """The workers and what is done to them."""

    prefill: list[MockWorker]
    decode: list[MockWorker]
    rng: random.Random
    sick: dict[MockWorker, str] = field(default_factory=dict)
    events: collections.Counter[str] = field(default_factory=collections.Counter)
    _one_at_a_time: asyncio.Lock = field(default_factory=asyncio.Lock)

    async def strike(self) -> None:
        """One random event: something breaks, or something broken is repaired."""
        async with self._one_at_a_time:
            await self._strike()

    async def _strike(self) -> None:
        pool = self.prefill if self.rng.random() < 0.3 else self.decode
        worker = self.rng.choice(pool)
        if worker in self.sick:
            await self.heal(worker)
        elif sum(w not in self.sick for w in pool) > 1:
            await self._break(worker)

    async def _break(self, worker: MockWorker) -> None:
        how = self.rng.choice(["kill", "kill", "hang", "fault", "fault", "bounce"])
        self.events[how] += 1
        if how == "bounce":  # restarted so fast that no health check sees it
            await worker.kill()
            await worker.start()
            return
        self.sick[worker] = how
        if how == "kill":
            await worker.kill()
        elif how == "hang":
            worker.plan, worker.healthy = Plan(wait=FOREVER), False
        else:
            worker.plan = faults(self.rng)

    async def heal(self, worker: MockWorker) -> None:
        """Repairs a worker; a hung one is restarted, as an operator would."""
        how = self.sick.pop(worker)
        self.events["heal"] += 1
        if how == "hang":
            await worker.kill()
        worker.plan, worker.healthy = Plan(events=6), True
        if how in ("kill", "hang"):
            await worker.start()


def telling(worker: MockWorker) -> Callable[[], str]:
    """What a worker's /metrics say: its load, and a start time that every restart changes."""
    return lambda: (
        f"vllm:num_requests_running {worker.active}\nvllm:num_requests_waiting 0\n"
        f"vllm:kv_cache_usage_perc 0.1\nprocess_start_time_seconds {100 * worker.starts}\n"
    )


async def pieces(raw: bytes) -> AsyncIterator[bytes]:
    """A body of unknown length."""
    yield raw[: len(raw) // 2]
    yield raw[len(raw) // 2 :]


async def one(client: aiohttp.ClientSession, url: str, number: int, rng: random.Random) -> str:
    """Sends a request and says how it ended."""
    stream, leaves, chunked = rng.random() < 0.6, rng.random() < 0.03, rng.random() < 0.1
    body = {"model": "m", "prompt": f"{number} " * rng.randrange(1, 60), "stream": stream}
    raw = json.dumps(body).encode()
    try:
        async with client.post(
            url + "/v1/completions", data=pieces(raw) if chunked else raw
        ) as response:
            if leaves:
                return "left"
            raw = await response.read()
            return judge(response.status, stream, raw)
    except (aiohttp.ClientError, OSError) as error:
        return f"malformed: {type(error).__name__}"


def judge(status: int, stream: bool, raw: bytes) -> str:
    """Names the outcome; anything that is not well-formed is `malformed`."""
    try:
        if status != 200:
            return f"lost: {status} {json.loads(raw)['error']['type']}"
        if not stream:
            return "ok" if json.loads(raw)["choices"] else "malformed: no choices"
        if not raw.endswith(b"data: [DONE]\n\n"):
            return "malformed: no end mark"
        events = [json.loads(e.removeprefix(b"data: ")) for e in raw.split(b"\n\n")[:-2]]
        if "error" in events[-1]:
            return "broken" if len(events) > 1 else "lost: an error event alone"
        return "ok"
    except (ValueError, KeyError, TypeError, IndexError) as error:
        return f"malformed: {error}"


def start_router(chaos: Chaos, port: int, log: Path) -> subprocess.Popen[bytes]:
    """Starts `eldr serve` in front of the workers."""
    command = [sys.executable, "-m", "eldr", "serve", "--port", str(port)]
    command += ["--prefill", *(w.url for w in chaos.prefill)]
    command += ["--decode", *(w.url for w in chaos.decode)]
    command += ["--policy", "marginal_cost", "--health-interval", "1", "--health-timeout", "2"]
    command += ["--health-failures", "2", "--eject-seconds", "1", "--slow-start", "2"]
    command += [
        "--poll-interval",
        "0.5",
        "--first-byte-timeout",
        "20",
        "--idle-timeout",
        "10",
        "--log-level",
        "error",
    ]
    with log.open("wb") as out:
        return subprocess.Popen(command, stdout=out, stderr=out)


async def ready(client: aiohttp.ClientSession, url: str, router: subprocess.Popen[bytes]) -> None:
    """Waits for the router."""
    for _ in range(600):
        if router.poll() is not None:
            raise SystemExit(f"the router ended with {router.returncode}")
        try:
            async with client.get(url + "/readiness") as response:
                if response.status == 200:
                    return
        except aiohttp.ClientError:
            pass
        await asyncio.sleep(0.1)
    raise SystemExit("the router did not become ready within 60 s")


def resident(pid: int) -> int:
    """Resident bytes of a process."""
    pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")


async def load(
    chaos: Chaos, client: aiohttp.ClientSession, url: str, total: int, pid: int
) -> tuple[collections.Counter[str], list[int]]:
    """All requests, a fixed number at once; the router's memory after every tenth of them."""
    outcomes: collections.Counter[str] = collections.Counter()
    memory: list[int] = []
    numbers = iter(range(total))
    ended = 0

    async def client_loop(seed: int) -> None:
        nonlocal ended
        rng = random.Random(seed)
        for number in numbers:
            outcomes[await one(client, url, number, rng)] += 1
            ended += 1
            if ended % (total // 10) == 0:
                memory.append(resident(pid))
                print(f"{ended} requests: {dict(outcomes)}", file=sys.stderr)
            if ended % EVENT_EVERY == 0:
                await chaos.strike()

    await asyncio.gather(*(client_loop(chaos.rng.randrange(2**32)) for _ in range(CONCURRENT)))
    return outcomes, memory


async def settled(
    client: aiohttp.ClientSession, url: str
) -> tuple[dict[str, float], dict[str, float]]:
    """What is left in the router once all is quiet, and its retries; waits for zero for a while."""
    left: dict[str, float] = {}
    text = ""
    for _ in range(300):
        async with client.get(url + "/workers") as response:
            rows = await response.json()
        async with client.get(url + "/metrics") as response:
            text = await response.text()
        left = {
            "requests": sum(r["requests"] for kind in rows.values() for r in kind),
            "kv_tokens": sum(r["kv_tokens"] for r in rows["decode"]),
            "experts": sum(r["experts"] for r in rows["decode"]),
            "running": _sample(text, "eldr_router_running_requests"),
            "waiting": _sample(text, "eldr_router_waiting_requests"),
            "others": sum(r["others"] for kind in rows.values() for r in kind),
        }
        if not any(left.values()):
            break
        await asyncio.sleep(0.1)
    return left, retried(text)


def retried(text: str) -> dict[str, float]:
    """The router's own count of repeated tries, by leg and outcome."""
    rows = (x.split() for x in text.splitlines() if x.startswith("eldr_router_retries_total{"))
    words = ((*re.findall(r'"(\w+)"', labels), float(value)) for labels, value in rows)
    return {f"{leg} {outcome}": value for leg, outcome, value in words}


def _sample(text: str, name: str) -> float:
    return next(float(x.split()[-1]) for x in text.splitlines() if x.startswith(name + " "))


async def run(requests: int, seed: int) -> dict[str, Any]:
    """The whole run; the result as JSON values."""
    rng = random.Random(seed)
    prefill = [MockWorker("prefill", geometry=GEOMETRY) for _ in range(2)]
    chaos = Chaos(prefill, [MockWorker("decode") for _ in range(6)], rng)
    for worker in (*chaos.prefill, *chaos.decode):
        worker.plan, worker.keep_seen = Plan(events=6), False
        worker.expert, worker.metrics = rng.randrange(64), telling(worker)
        await worker.start()
    (port,), started = free_ports(1), time.perf_counter()
    with tempfile.TemporaryDirectory() as folder:
        router = start_router(chaos, port, Path(folder) / "router.log")
        url = f"http://127.0.0.1:{port}"
        try:
            connector = aiohttp.TCPConnector(limit=0)
            limit = aiohttp.ClientTimeout(total=300)
            async with aiohttp.ClientSession(connector=connector, timeout=limit) as client:
                await ready(client, url, router)
                outcomes, memory = await load(chaos, client, url, requests, router.pid)
                for worker in list(chaos.sick):
                    await chaos.heal(worker)
                left, retries = await settled(client, url)
        finally:
            router.terminate()
            code = router.wait(timeout=60)
            errors = (Path(folder) / "router.log").read_text()
    seconds = time.perf_counter() - started
    result = report(requests, seed, seconds, outcomes, chaos, left, memory, code, errors)
    return {**result, "retries": retries}


def report(
    requests: int,
    seed: int,
    seconds: float,
    outcomes: collections.Counter[str],
    chaos: Chaos,
    left: dict[str, float],
    memory: list[int],
    code: int,
    errors: str,
) -> dict[str, Any]:
    """The figures and the verdict."""
    lost = sum(n for name, n in outcomes.items() if name.startswith("lost"))
    malformed = sum(n for name, n in outcomes.items() if name.startswith("malformed"))
    checks = {
        "all_ended": sum(outcomes.values()) == requests,
        "well_formed": malformed == 0,
        "none_lost_before_first_byte": lost == 0,
        "counters_zero": not any(left.values()),
        "memory_flat": memory[-1] <= memory[len(memory) // 2] * _FLAT,
        "no_unhandled_exception": "Traceback" not in errors and code == 0,
    }
    return {
        "requests": requests,
        "seed": seed,
        "seconds": round(seconds, 1),
        "outcomes": dict(sorted(outcomes.items())),
        "events": dict(sorted(chaos.events.items())),
        "left": left,
        "memory_mb": [round(m / 2**20, 1) for m in memory],
        "checks": checks,
        "ok": all(checks.values()),
        "router_log": errors[-2000:] if "Traceback" in errors else "",
        "machine": {"cores": os.cpu_count(), "cpu": cpu_name()},
        "date": datetime.date.today().isoformat(),
        "command": f"python -m benchmarks.chaos --requests {requests} --seed {seed} --json",
    }


def main() -> int:
    """Runs and prints."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--requests", type=int, default=10_000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    args = parser.parse_args()
    result = asyncio.run(run(args.requests, args.seed))
    if args.json:
        print(json.dumps(result, indent=1))
    else:
        for name, value in result.items():
            print(f"{name}: {value}")
    return 0 if result["ok"] else 1


if __name__ == "__main__":
    sys.exit(main())
