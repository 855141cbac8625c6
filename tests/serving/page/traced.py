"""Mock workers that replay the bundled expert trace: real signatures, really counted steps."""

from __future__ import annotations

import asyncio
import json
import random
from collections import Counter
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

from eldr.geometry import Geometry
from eldr.routing.fit import fit_partition
from eldr.routing.recorded import Recorded
from eldr.signature import Signature, encode
from eldr.workload.tiny import TRACE_PATH
from eldr.workload.traces import ExpertTrace, load
from tests.serving.mocks.worker import MockWorker, Plan, Seen, _chunk, _event, _head, _write
from tests.serving.rig import Rig


@cache
def trace() -> ExpertTrace:
    """Four layers of 64 experts, top 4; 420 requests of seven domains."""
    return load(TRACE_PATH)


def _index(seen: Seen) -> int:
    return int(seen.body["prompt"].rpartition(":")[2])


class TracedPrefill(MockWorker):
    """Answers prompts `trace:N` with the signature of the trace's request N.

    Every `cached`-th prompt comes mostly from the prefix cache: its signature covers little.
    """

    def __init__(self, cached: int = 0) -> None:
        super().__init__("prefill", geometry=trace().geometry)
        self._request = 0
        self._cached = cached

    def _prefill_body(self, seen: Seen) -> bytes:
        self._request = _index(seen)
        return super()._prefill_body(seen)

    def _signature(self, tokens: int) -> dict[str, Any]:
        counts = trace().prompt_counts[self._request]
        prompt = int(counts.sum()) // (trace().geometry.layers * trace().geometry.top_k)
        covered = 0.2 if self._cached and self.count % self._cached == 0 else 1.0
        return encode(Signature(counts, prompt, covered), trace().geometry)


class TracedDecode(MockWorker):
    """Decodes in steps: each adds the next token of every running request, and is counted."""

    def __init__(self, step: float = 0.01) -> None:
        super().__init__("decode", geometry=trace().geometry)
        self.step = step
        shape: Geometry = trace().geometry
        self.use = np.zeros((shape.layers, shape.experts), np.int64)
        self.steps = 0
        self.by_batch: dict[int, list[int]] = {}
        self._running: dict[int, tuple[int, asyncio.Queue[None]]] = {}
        self._next = 0
        self._loop: asyncio.Task[None] | None = None

    async def start(self) -> None:
        await super().start()
        self._loop = asyncio.create_task(self._decode())

    async def kill(self) -> None:
        assert self._loop is not None
        self._loop.cancel()
        await super().kill()

    async def _decode(self) -> None:
        while True:
            await asyncio.sleep(self.step)
            if self._running:
                self.one_step()

    def one_step(self) -> None:
        """Every running request's next token, in one step."""
        read = np.zeros(self.use.shape, bool)
        for key, (row, queue) in self._running.items():
            for layer, experts in enumerate(trace().topk[row]):
                read[layer, experts] = True
            self._running[key] = (row + 1, queue)
            queue.put_nowait(None)
        self.steps += 1
        self.use += read
        batch = self.by_batch.setdefault(len(self._running), [0, 0])
        batch[0] += 1
        batch[1] += int(read.sum())

    async def _stream(self, plan: Plan, seen: Seen, writer: asyncio.StreamWriter) -> bool:
        writer.write(_head(200, {"Content-Type": "text/event-stream"}, None))
        request, key = _index(seen), self._next
        self._next += 1
        tokens = min(seen.body["max_tokens"], int(trace().offsets[request + 1]))
        queue: asyncio.Queue[None] = asyncio.Queue()
        self._running[key] = (int(trace().cuts[request]), queue)
        try:
            for i in range(tokens):
                await queue.get()
                writer.write(_chunk(b"data: " + json.dumps(_event(seen, i)).encode() + b"\n\n"))
                await writer.drain()
        finally:
            del self._running[key]
        await self._pieces(plan, _chunk(b"data: [DONE]\n\n") + b"0\r\n\r\n", writer)
        return True

    async def _get(self, path: str, writer: asyncio.StreamWriter) -> bool:
        if path != "/eldr/decode":
            return await super()._get(path, writer)
        _write(writer, 200, json.dumps(self.counted()).encode())
        await writer.drain()
        return True

    def counted(self) -> dict[str, Any]:
        """What GET /eldr/decode answers."""
        return {
            "v": 1,
            "geometry": trace().geometry.digest,
            "steps": self.steps,
            "tokens": sum(b * s for b, (s, _) in self.by_batch.items()),
            "kv_tokens": 0,
            "seconds": self.steps * self.step,
            "distinct": self.use.sum(axis=1).tolist(),
            "use": self.use.tolist(),
            "by_batch": {str(b): row for b, row in self.by_batch.items()},
        }


def fitted(folder: Path, workers: int) -> str:
    """A partition file, fitted to the prompts of the even half of the trace."""
    half = trace().select(range(0, len(trace()), 2))
    counts = half.prompt_counts
    tokens = (half.cuts - half.offsets[:-1]).astype(np.int32)
    coverage = np.ones(len(half), np.float32)
    recorded = Recorded(counts, tokens, coverage, trace().geometry)
    path = folder / "partition.safetensors"
    fit_partition(recorded, [str(i) for i in range(workers)]).save(path)
    return str(path)


async def drive(r: Rig, requests: int, clients: int, seed: int = 0, tokens: int = 48) -> Counter:
    """Sends the trace's requests in random order, `clients` at a time; counts the statuses."""
    rng = random.Random(seed)
    todo = [rng.randrange(len(trace())) for _ in range(requests)]
    statuses: Counter = Counter()

    async def client() -> None:
        while todo:
            request = todo.pop()
            body = {
                "model": "m",
                "prompt": f"trace:{request}",
                "max_tokens": rng.randrange(tokens // 2, tokens + 1),
                "stream": True,
            }
            domain = trace().domains[trace().domain[request]]
            headers = {"X-Request-Id": f"{domain}-{requests - len(todo):04d}"}
            url = r.url + "/v1/completions"
            async with r.client.post(url, json=body, headers=headers) as response:
                await response.read()
                statuses[response.status] += 1

    await asyncio.gather(*(client() for _ in range(clients)))
    return statuses
