"""Frees KV that a prefill worker keeps for a decode worker which will never come for it.

Only a decode worker can tell the prefill worker that it does not need the KV. vLLM does so when it
rejects a request that carries a KV handle (`_with_kv_transfer_rejection_cleanup`), so the shortest
way is a request that it must reject: one for a model that nobody serves. Where that fails, the
prefill worker's lease frees the KV later.
"""

from __future__ import annotations

import asyncio
import logging

from eldr.serving.http1 import UpstreamError
from eldr.serving.metrics import Metrics
from eldr.serving.pool import Pool
from eldr.serving.upstream import Attempt, Limits, open_exchange

log = logging.getLogger(__name__)

_SECONDS = 10.0
_MOST_AT_ONCE = 64
_HEADERS = b"Content-Type: application/json\r\n"


class KvRelease:
    """Sends releases in the background, a bounded number at once."""

    def __init__(self, metrics: Metrics) -> None:
        self._metrics = metrics
        self._tasks: set[asyncio.Task[None]] = set()

    def start(self, kv: bytes, decode: Pool) -> None:
        """Frees the KV behind a handle, in the background."""
        if len(self._tasks) >= _MOST_AT_ONCE:
            self._metrics.kv_releases.labels("dropped").inc()
            return
        task = asyncio.get_running_loop().create_task(self._release(kv, decode))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _release(self, kv: bytes, decode: Pool) -> None:
        body = (
            b'{"model":"eldr-kv-release","prompt":[0],"max_tokens":1,"kv_transfer_params":%b}' % kv
        )
        out = next(iter(decode.exclusions()))
        able = [e for e in decode.endpoints if e.name not in out]
        outcome = "failed"
        try:
            if able:
                endpoint = min(able, key=lambda e: e.running)
                now = asyncio.get_running_loop().time()
                limits = Limits(_SECONDS, _SECONDS, now + _SECONDS)
                path = "/v1/completions"
                with await open_exchange(
                    endpoint, path, _HEADERS, body, limits, Attempt()
                ) as exchange:
                    await exchange.answer(2**20)
                outcome = "released"
        except UpstreamError as error:
            log.debug("KV release at %s: %s", endpoint.name, error)
        self._metrics.kv_releases.labels(outcome).inc()

    async def close(self) -> None:
        """Waits for the releases that are on their way."""
        if self._tasks:
            await asyncio.wait(self._tasks, timeout=_SECONDS)
