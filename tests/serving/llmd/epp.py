"""A mock of an Inference Gateway with its endpoint picker: checks llm-d's protocol, plays pods.

It knows the pods of both roles, filters by the profile that `EPP-Profile` names, and scores decode
pods as llm-d's configuration in deploy/ does: label equal to the cluster header first, then fewest
running requests. A call that breaks the protocol is answered 421 and kept in `violations`.
"""

from __future__ import annotations

import asyncio
import json
from collections import Counter
from dataclasses import dataclass, field

from aiohttp import web

from eldr.signature import Signature, encode
from tests.serving.ray.engine import GEOMETRY, counts, text_of

PROFILES = {"prefill", "decode"}


@dataclass
class Pod:
    """A pod of a role; `cluster` is its label."""

    name: str
    role: str
    cluster: str = ""
    running: int = 0
    served: Counter = field(default_factory=Counter)
    fail: int = 0  # that many next calls are answered 503
    hang_up: int = 0  # so many next streams break off after their first event


class Endpoint:
    """The gateway."""

    def __init__(self, pods: list[Pod]) -> None:
        self.pods = pods
        self.violations: list[str] = []
        self.calls: list[tuple[str, str, str]] = []  # profile, pod, cluster header
        self._known: set[str] = set()
        self._handles = 0

    def application(self) -> web.Application:
        app = web.Application()
        app.router.add_post("/v1/completions", self.call)
        app.router.add_post("/v1/chat/completions", self.call)
        return app

    def _check(self, profile: str, cluster: str | None, body: dict) -> str | None:
        kv = body.get("kv_transfer_params") or {}
        if profile not in PROFILES:
            return f"EPP-Profile is {profile!r}"
        if profile == "prefill":
            if cluster is not None:
                return "a prefill call names a cluster"
            if kv.get("do_remote_decode") is not True or kv.get("do_remote_prefill") is not False:
                return f"prefill without a KV request: {kv}"
            if body.get("max_tokens") != 1 or body.get("stream"):
                return "prefill asks for more than one token"
        else:
            if body.get("model") == "eldr-kv-release":
                return None
            if kv.get("do_remote_prefill") is not True or kv.get("remote_id") not in self._known:
                return f"decode without a handle of a prefill: {kv}"
            if "eldr" in kv:
                return "the signature reached a decode pod"
        return None

    async def call(self, request: web.Request) -> web.StreamResponse:
        profile = request.headers.get("EPP-Profile", "")
        cluster = request.headers.get("x-eldr-cluster")
        body = await request.json()
        problem = self._check(profile, cluster, body)
        if problem is not None:
            self.violations.append(problem)
            return web.json_response({"error": {"message": problem}}, status=421)
        pod = self._pick(profile, cluster)
        self.calls.append((profile, pod.name, cluster or ""))
        pod.running += 1
        try:
            return await self._serve(request, pod, body)
        finally:
            pod.running -= 1

    def _pick(self, profile: str, cluster: str | None) -> Pod:
        able = [pod for pod in self.pods if pod.role == profile]
        return min(able, key=lambda pod: (pod.cluster != cluster, pod.running))

    async def _serve(self, request: web.Request, pod: Pod, body: dict) -> web.StreamResponse:
        if pod.fail:
            pod.fail -= 1
            return web.json_response({"error": {"message": "full"}}, status=503)
        if body["model"] != "m":
            return web.json_response({"error": {"message": "no such model"}}, status=404)
        prompt = body.get("prompt") or body["messages"][0]["content"]
        topic = int(prompt.split()[1])
        pod.served[topic] += 1
        if pod.role == "prefill":
            return web.json_response(self._prefilled(topic))
        words = text_of(prompt)
        if not body.get("stream"):
            return web.json_response({"choices": [{"index": 0, "text": " ".join(words)}]})
        answer = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await answer.prepare(request)
        for word in words:
            event = json.dumps({"choices": [{"index": 0, "text": word}]})
            await answer.write(f"data: {event}\n\n".encode())
            if pod.hang_up:
                pod.hang_up -= 1
                assert request.transport is not None
                request.transport.abort()
                return answer
            await asyncio.sleep(0)
        await answer.write(b"data: [DONE]\n\n")
        return answer

    def _prefilled(self, topic: int) -> dict:
        self._handles += 1
        handle = f"h{self._handles}"
        self._known.add(handle)
        params = {
            "do_remote_prefill": True,
            "do_remote_decode": False,
            "remote_id": handle,
            "eldr": encode(Signature(counts(topic, 16), 16), GEOMETRY),
        }
        return {"choices": [], "usage": {"prompt_tokens": 16}, "kv_transfer_params": params}
