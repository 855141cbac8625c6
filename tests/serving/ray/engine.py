"""A mock engine as an ASGI application: prefill signs prompts by topic, decode echoes and counts.

A prompt is `topic TOPIC WORDS...`. The prefill answer's signature uses the experts of the topic
only; the decode answer's text is a function of the prompt, so that every replica says the same.
"""

from __future__ import annotations

import asyncio
import json
import zlib
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import numpy as np

from eldr.geometry import Geometry
from eldr.signature import Signature, encode

GEOMETRY = Geometry(2, 32, 2)
TOPICS = 4
_EXPERTS = GEOMETRY.experts // TOPICS


def counts(topic: int, tokens: int) -> np.ndarray:
    """Hits of a prompt: evenly over the experts of its topic, uint32 [L, E]."""
    out = np.zeros((GEOMETRY.layers, GEOMETRY.experts), np.uint32)
    out[:, topic * _EXPERTS : (topic + 1) * _EXPERTS] = tokens * GEOMETRY.top_k // _EXPERTS
    return out


def text_of(prompt: str) -> list[str]:
    """The words of the answer to a prompt."""
    return [f"w{zlib.crc32(f'{prompt}/{i}'.encode()) % 1000}" for i in range(6)]


@asynccontextmanager
async def open_application(options: dict[str, Any], host: str) -> AsyncIterator[Any]:
    """An engine of the role that `additional-config` names; `pause`: seconds between events."""
    yield Engine(options["additional-config"]["eldr"]["role"], options.get("pause", 0.0))


class Engine:
    def __init__(self, role: str, pause: float) -> None:
        self.role, self.pause = role, pause
        self.steps = self.tokens = 0
        self.use = np.zeros((GEOMETRY.layers, GEOMETRY.experts), np.int64)

    async def __call__(self, scope, receive, send) -> None:
        body = (await receive())["body"]
        status, answer = 200, {}
        if scope["path"] == "/eldr/info":
            shape = {"layers": GEOMETRY.layers, "experts": GEOMETRY.experts, "top_k": 2}
            shape["digest"] = GEOMETRY.digest
            answer = {"v": 1, "role": self.role, "model": "m", "geometry": shape}
        elif scope["path"] == "/eldr/decode" and self.role == "decode":
            answer = self._counters()
        elif scope["path"] == "/v1/models":
            answer = {"object": "list", "data": [{"id": "m"}]}
        elif scope["path"].startswith("/v1/"):
            status, answer = await self._complete(json.loads(body), send)
        if answer is not None:
            await _whole(send, status, answer)

    async def _complete(self, body, send):
        kv = body.get("kv_transfer_params")
        if body["model"] != "m":
            return 404, {"error": {"message": "no such model"}}
        if self.role == "prefill":
            if kv == {"eldr": {"counts": True}}:
                kv = {}
            elif not kv or kv.get("do_remote_decode") is not True or body["max_tokens"] != 1:
                return 400, {"error": {"message": f"not a prefill request: {body}"}}
            return 200, self._prefill(body["prompt"])
        if not kv or kv.get("do_remote_prefill") is not True or "eldr" in kv:
            return 400, {"error": {"message": f"not a decode request: {body}"}}
        await self._decode(body, send)
        return 200, None

    def _prefill(self, prompt):
        signature = Signature(counts(int(prompt.split()[1]), 16), 16)
        handle = {
            "do_remote_prefill": True,
            "do_remote_decode": False,
            "remote_engine_id": "engine",
            "transfer_mode": "pull",
            "eldr": encode(signature, GEOMETRY),
        }
        usage = {"prompt_tokens": 16, "completion_tokens": 1, "total_tokens": 17}
        choice = {"index": 0, "text": "x", "finish_reason": "length"}
        return {"choices": [choice], "usage": usage, "kv_transfer_params": handle}

    async def _decode(self, body, send) -> None:
        words = text_of(body["prompt"])
        if body.get("stream"):
            await _start(send, 200, b"text/event-stream")
        for word in words:
            await asyncio.sleep(self.pause)
            self.steps += 1
            self.tokens += 1
            self.use += counts(int(body["prompt"].split()[1]), 16) > 0
            if body.get("stream"):
                event = json.dumps({"choices": [{"index": 0, "text": word}]})
                await _more(send, f"data: {event}\n\n".encode())
        if body.get("stream"):
            await _more(send, b"data: [DONE]\n\n")
            await send({"type": "http.response.body", "body": b"", "more_body": False})
        else:
            await _whole(send, 200, {"choices": [{"index": 0, "text": " ".join(words)}]})

    def _counters(self):
        return {
            "v": 1,
            "geometry": GEOMETRY.digest,
            "steps": self.steps,
            "tokens": self.tokens,
            "kv_tokens": 16 * self.tokens,
            "seconds": 0.01 * self.steps,
            "distinct": self.use.sum(axis=1).tolist(),
            "use": self.use.tolist(),
            "by_batch": {"1": [self.steps, int(self.use.sum())]},
        }


async def _start(send, status: int, kind: bytes) -> None:
    headers = [(b"content-type", kind)]
    await send({"type": "http.response.start", "status": status, "headers": headers})


async def _more(send, data: bytes) -> None:
    await send({"type": "http.response.body", "body": data, "more_body": True})


async def _whole(send, status: int, answer) -> None:
    await _start(send, status, b"application/json")
    await send(
        {"type": "http.response.body", "body": json.dumps(answer).encode(), "more_body": False}
    )
