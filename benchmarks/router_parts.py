"""Processor time of the router's parts, each against the library that would do it otherwise.

    python -m benchmarks.router_parts [--json]

Also a part of `python -m benchmarks.router`. Microseconds per request; least, median and most of
interleaved rounds: a leg by `eldr.serving.http1` and by aiohttp's client; a whole request, plain
and streamed, by the short way and by aiohttp's server (a query in the URL sends it there); reading
a signature and deciding by it.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from itertools import count, product
from typing import Any

import aiohttp
import orjson
import uvloop

from benchmarks.router_mocks import GEOMETRY, PREFILL
from eldr.routing import Fleet, RouteRequest, Worker, make_policy
from eldr.serving.answers import parse_prefill
from eldr.serving.endpoints import Endpoint, worker_url
from eldr.serving.origins import Client
from eldr.serving.upstream import Attempt, Limits, open_exchange
from eldr.signature import decode

ROUNDS = 7
KINDS = ("plain", "stream")
_AT_ONCE = 16
_HEADERS = b"Content-Type: application/json\r\n"
_BODY = b'{"model":"m","prompt":"' + b"x" * 2000 + b'"}'
_PATH = "/v1/completions"
Figures = dict[str, float]


def figures(rounds: list[float]) -> Figures:
    """What the rounds of a part came to."""
    found = {"min": min(rounds), "median": statistics.median(rounds), "max": max(rounds)}
    return {name: round(value, 1) for name, value in found.items()}


def legs(url: str, total: int = 1600) -> dict[str, Figures]:
    """One exchange with a decode mock, by our client and by aiohttp's."""
    return uvloop.run(_legs(url, total))


async def _legs(url: str, total: int) -> dict[str, Figures]:
    loop = asyncio.get_running_loop()
    client = Client(5.0)
    client.start()
    endpoint = Endpoint("decode", worker_url(url), client)
    session = aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0), auto_decompress=False)

    async def ours() -> None:
        limits = Limits(60.0, 60.0, loop.time() + 60.0)
        with await open_exchange(endpoint, _PATH, _HEADERS, _BODY, limits, Attempt()) as exchange:
            await exchange.answer(2**20)

    async def theirs() -> None:
        headers = {"Content-Type": "application/json"}
        async with session.post(url + _PATH, data=_BODY, headers=headers) as response:
            await response.read()

    async def many(one: Any) -> float:
        async def some() -> None:
            for _ in range(total // _AT_ONCE):
                await one()

        start = time.process_time()
        await asyncio.gather(*(some() for _ in range(_AT_ONCE)))
        return (time.process_time() - start) / total * 1e6

    out: dict[str, list[float]] = {"ours": [], "aiohttp": []}
    for number in range(ROUNDS + 1):
        for name, one in (("ours", ours), ("aiohttp", theirs)):
            used = await many(one)
            if number:  # the first round opens connections
                out[name].append(used)
    await session.close()
    await client.close()
    return {name: figures(values) for name, values in out.items()}


def server(prefill: list[str], decode: list[str], total: int = 800) -> dict[str, Figures]:
    """A whole request through `eldr serve`, by the short way and by aiohttp's server."""
    from benchmarks.router import CONNECTIONS, Router, cpu_ns, load, wait_ready
    from eldr.demo.ports import free_ports

    (port,) = free_ports(1)
    command = [sys.executable, "-m", "eldr", "serve", "--log-level", "error"]
    command += ["--policy", "least_requests", "--port", str(port)]
    command += ["--prefill", *prefill, "--decode", *decode]
    ways = {"short_way": "", "aiohttp": "?x"}
    out: dict[str, list[float]] = {f"{way}_{kind}": [] for kind in KINDS for way in ways}
    process = subprocess.Popen(command, stderr=subprocess.DEVNULL)
    try:
        wait_ready(Router("eldr", port, process))
        for number in range(ROUNDS + 1):
            for kind, (way, query) in product(KINDS, ways.items()):
                before = cpu_ns(process.pid)
                uvloop.run(load(port, total, CONNECTIONS, stream=kind == "stream", query=query))
                if number:
                    used = (cpu_ns(process.pid) - before) / 1e3 / total
                    out[f"{way}_{kind}"].append(used)
    finally:
        process.terminate()
        process.wait()
    return {name: figures(values) for name, values in out.items()}


def decisions() -> dict[str, Figures]:
    """Reading a prefill answer and its signature, and deciding and accounting among 4 workers."""
    answer = PREFILL.split(b"\r\n\r\n", 1)[1]
    raw = parse_prefill(answer).signature
    assert raw is not None
    signature = decode(orjson.loads(raw), GEOMETRY)
    out = {
        "prefill_answer": _each(lambda: parse_prefill(answer)),
        "signature": _each(lambda: decode(orjson.loads(raw), GEOMETRY)),
    }
    for name in ("least_requests", "marginal_cost"):
        workers = [Worker(f"w{i}") for i in range(4)]
        # As in the router, which reads no signatures for a policy that needs none.
        geometry = GEOMETRY if name == "marginal_cost" else None
        fleet = Fleet(make_policy(name), workers, geometry=geometry)
        numbers = count()

        def one(fleet: Fleet = fleet, numbers: Any = numbers) -> None:
            request = RouteRequest(str(next(numbers)), signature)
            fleet.reserve(request)
            fleet.release(request.id)

        out[name] = _each(one)
    return out


def _each(one: Callable[[], object], times: int = 400) -> Figures:
    values = []
    for _ in range(ROUNDS + 1):
        start = time.process_time()
        for _ in range(times):
            one()
        values.append((time.process_time() - start) / times * 1e6)
    return figures(values[1:])


def parts() -> dict[str, Any]:
    """All of them."""
    from benchmarks.router import mocks

    with mocks(0.0) as (prefill, decoders):
        return {
            "unit": "microseconds of processor time per request",
            "leg": legs(decoders[0]),
            "request": server(prefill, decoders),
            "decision": decisions(),
            "answer_bytes": len(PREFILL),
        }


def main() -> int:
    """Runs and prints."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    args = parser.parse_args()
    print(json.dumps(parts(), indent=1 if args.json else None))
    return 0


if __name__ == "__main__":
    sys.exit(main())
