"""The two legs of a request: prefill first, then decode on the worker that the policy picks."""

from __future__ import annotations

import asyncio
import logging
import time
from dataclasses import dataclass

from eldr.serving.answers import (
    NOT_PREFILLED,
    MalformedAnswer,
    Prefilled,
    PushConnector,
    parse_prefill,
)
from eldr.serving.bodies import SEVERAL_CHOICES, unsplittable
from eldr.serving.call import Call
from eldr.serving.decode_pool import DecodePool, Ticket
from eldr.serving.endpoints import Endpoint
from eldr.serving.errors import ClientError
from eldr.serving.http1 import UpstreamError
from eldr.serving.kv_release import KvRelease
from eldr.serving.metrics import Metrics
from eldr.serving.pool import Pool
from eldr.serving.prefill_pool import PrefillPool
from eldr.serving.relay import Truncated, end_broken_stream, first_event, relay_events
from eldr.serving.retry import RetryBudget, Tries
from eldr.serving.upstream import Answer, Attempt, Exchange, Limits, open_exchange

log = logging.getLogger(__name__)

# Answers by which a worker says "not here, not now": another worker may take the request.
_FULL = frozenset({429, 503})
_ELSEWHERE = _FULL | {502, 504}
_STATUS = {"connect": 503, "reset": 502, "malformed": 502, "timeout": 504, "cut": 504}
_LONGEST_ANSWER = 2**28
# Prefill workers that refuse connections are gone, though no health check may have seen it yet.
_NOBODY_THERE = frozenset({"no_prefill_worker", "prefill_connect"})

Failure = UpstreamError | Answer


@dataclass(frozen=True, slots=True)
class LegLimits:
    """Seconds that a worker may take to its first byte, and between two of them."""

    first_byte: float
    idle: float


@dataclass(frozen=True, slots=True)
class WholeRules:
    """What becomes of requests for which two legs make no sense.

    Attributes:
        unsplittable: "whole" (on a decode worker) or "fail": batches of prompts, prompt logprobs,
            beam search.
        several_choices: "split", "whole" or "fail": n or best_of above one.
        no_prefill: "fail" or "whole": no prefill worker is there.
    """

    unsplittable: str = "whole"
    several_choices: str = "split"
    no_prefill: str = "fail"


class Legs:
    """Runs requests through a prefill pool and a decode pool."""

    def __init__(
        self,
        prefill: PrefillPool,
        decode: DecodePool,
        *,
        budget: RetryBudget,
        limits: LegLimits,
        whole: WholeRules,
        metrics: Metrics,
        kv_release: KvRelease,
    ) -> None:
        self._prefill = prefill
        self._decode = decode
        self._budget = budget
        self._limits = limits
        self._whole = whole
        self._metrics = metrics
        self._kv_release = kv_release

    async def serve(self, call: Call) -> Answer | None:
        """Both legs; the answer for the client, or None when it was streamed to its last byte.

        Raises:
            ClientError: no worker could serve the request.
        """
        self._budget.earn()
        reason = self._why_whole(call)
        if reason is not None:
            self._metrics.whole.labels(reason).inc()
            return await self.decode(call, NOT_PREFILLED)
        started = time.perf_counter()
        try:
            prefilled = await self.prefill(call)
        except ClientError as error:
            if self._whole.no_prefill == "fail" or error.kind not in _NOBODY_THERE:
                raise
            self._metrics.whole.labels("no_prefill_worker").inc()
            return await self.decode(call, NOT_PREFILLED)
        if isinstance(prefilled, Answer):
            return prefilled.passed()
        call.prefilled = time.perf_counter()
        self._metrics.prefill.observe(call.prefilled - started)
        cached = min(prefilled.cached_tokens, prefilled.prompt_tokens)
        if cached:
            self._metrics.prompt_tokens.add("cached", count=cached)
        self._metrics.prompt_tokens.add("computed", count=prefilled.prompt_tokens - cached)
        if prefilled.kv is None:
            self._metrics.kv_missing.inc()
        return await self.decode(call, prefilled)

    def _why_whole(self, call: Call) -> str | None:
        """The reason to serve a request without a prefill leg, None for both legs.

        Raises:
            ClientError: the configuration wants such requests to fail.
        """
        whole = self._whole
        reason = unsplittable(call.body)
        if reason is not None:
            choice = whole.several_choices if reason == SEVERAL_CHOICES else whole.unsplittable
            if choice == "fail":
                text = f"prefill and decode run apart here, so {reason} is not served"
                raise ClientError(400, "not_supported", text)
            return reason if choice == "whole" else None
        if whole.no_prefill == "whole" and not self._prefill.able():
            return "no_prefill_worker"
        return None

    async def prefill(self, call: Call) -> Prefilled | Answer:
        """The prefill leg; an `Answer` is a refusal that the client should see."""
        body = call.body.prefill()
        failed: set[str] = set()
        last: Failure | None = None
        tries = Tries(self._budget.rules.attempts, self._prefill.size)
        while last is None or await self._may_try(self._prefill, tries, failed, last):
            endpoint = self._prefill.choose(call.prefix, failed)
            if endpoint is None and failed:
                failed.clear()  # everyone failed once: the next round may go better
                endpoint = self._prefill.choose(call.prefix)
            if endpoint is None:
                break
            outcome = await self._prefill_on(endpoint, call, body)
            if isinstance(outcome, Prefilled):
                return outcome
            if isinstance(outcome, Answer) and outcome.status not in _ELSEWHERE:
                return outcome
            last = outcome
            failed.add(endpoint.name)
        return _give_up("prefill", last)

    async def decode(self, call: Call, prefilled: Prefilled) -> Answer | None:
        """The decode leg; like `serve`."""
        failed: set[str] = set()
        band: frozenset[str] = frozenset()
        last: Failure | None = None
        attempt = Attempt()
        try:
            tries = Tries(self._budget.rules.attempts, self._decode.size)
            while last is None or await self._may_try(self._decode, tries, failed, last):
                if attempt.sent and prefilled.kv is not None:
                    # The worker may have fetched or freed the KV: only a new prefill surely has it.
                    again = await self.prefill(call)
                    if isinstance(again, Answer):
                        return again.passed()
                    prefilled, attempt = again, Attempt()
                ticket = self._decode.reserve(call, prefilled, failed, band)
                if ticket is None and failed:
                    failed.clear()
                    ticket = self._decode.reserve(call, prefilled)
                if ticket is None:
                    break
                outcome = await self._decode_on(ticket, call, prefilled, attempt)
                if outcome is None:
                    return None
                if isinstance(outcome, Answer) and not _try_elsewhere(outcome, prefilled, tries):
                    return outcome.passed(ticket.headers if outcome.status == 200 else ())
                last = outcome
                failed.add(ticket.endpoint.name)
                band = band or ticket.band
            return _give_up("decode", last).passed()
        finally:
            # No decode worker knows this KV: without a word the prefill worker would keep it until
            # its lease ends.
            if not attempt.sent and prefilled.kv is not None:
                self._kv_release.start(prefilled.kv, self._decode)

    async def _may_try(self, pool: Pool, tries: Tries, failed: set[str], last: Failure) -> bool:
        """Pays for another try and pauses before it; False if there must be none.

        Free is a try after a refused connection, which cost nobody time, and one for which there is
        a sound worker: if that fails as well it is sound no more, so that free tries cannot
        multiply when all workers fail.
        """
        kind = last.kind if isinstance(last, UpstreamError) else None
        free = kind == "connect" or pool.sound(failed)
        if kind == "cut" or not tries.next(free=free):
            return False
        if not free and not self._budget.spend():
            self._metrics.retries.labels(pool.role, "no_budget").inc()
            return False
        self._metrics.retries.labels(pool.role, "retried").inc()
        await asyncio.sleep(self._budget.pause(tries.retries - 1))
        return True

    async def _prefill_on(self, endpoint: Endpoint, call: Call, body: bytes) -> Prefilled | Failure:
        self._metrics.leg_requests["prefill"].add()
        try:
            endpoint.running += 1
            try:
                limits = Limits(self._limits.first_byte, self._limits.idle, call.expires)
                with await open_exchange(
                    endpoint, call.path, call.headers, body, limits, Attempt()
                ) as exchange:
                    answer = await exchange.answer(_LONGEST_ANSWER)
            finally:
                self._prefill.ended(endpoint)
            if answer.status == 200:
                prefilled = parse_prefill(answer.body)
                self._prefill.succeeded(endpoint)
                self._prefill.answered(endpoint, prefilled.engine)
                call.prefill_worker = endpoint.name
                return prefilled
            _report(self._prefill, endpoint, answer)
            return answer
        except UpstreamError as error:
            self._prefill.failed(endpoint, error)
            return error
        except MalformedAnswer as error:
            failure = UpstreamError("malformed", True, str(error))
            self._prefill.failed(endpoint, failure)
            return failure
        except PushConnector as error:
            raise ClientError(502, "push_connector", str(error)) from error

    async def _decode_on(
        self, ticket: Ticket, call: Call, prefilled: Prefilled, attempt: Attempt
    ) -> Failure | None:
        endpoint = ticket.endpoint
        call.ticket = ticket
        try:
            limits = Limits(self._limits.first_byte, self._limits.idle, call.expires)
            body = call.body.decode(prefilled.kv)
            with await self._open_decode(endpoint, call, body, limits, attempt) as exchange:
                if exchange.connection.status == 200 and call.body.stream and exchange.streams:
                    await self._stream(call, ticket, exchange)
                    return None
                answer = await exchange.answer(_LONGEST_ANSWER)
            if answer.status == 200:
                self._decode.succeeded(endpoint)
            else:
                _report(self._decode, endpoint, answer)
            return answer
        except UpstreamError as error:
            self._decode.failed(endpoint, error)
            return error
        finally:
            ticket.release()

    async def _open_decode(
        self, endpoint: Endpoint, call: Call, body: bytes, limits: Limits, attempt: Attempt
    ) -> Exchange:
        metrics, started = self._metrics, time.perf_counter()
        metrics.leg_requests["decode"].add()
        metrics.pending_decode += 1
        try:
            return await open_exchange(endpoint, call.path, call.headers, body, limits, attempt)
        finally:
            metrics.pending_decode -= 1
            metrics.decode_pending.observe(time.perf_counter() - started)

    async def _stream(self, call: Call, ticket: Ticket, exchange: Exchange) -> None:
        # The client's status line waits for the first event: until then another worker can serve.
        first = await first_event(exchange.connection)
        if first.startswith(_ERROR_EVENT):
            raise UpstreamError("reset", True, _error_text(first))
        client = call.client
        await client.begin([*exchange.passed_headers(), *ticket.headers])
        call.first_byte()
        try:
            call.last_byte(await relay_events(exchange.connection, client, first))
            self._decode.succeeded(ticket.endpoint)
        except Truncated as error:
            call.broken = True
            self._decode.failed(ticket.endpoint, error.cause)
            log.warning("%s: %s broke off: %s", call.request_id, ticket.endpoint.name, error)
            await end_broken_stream(
                client, f"the decode worker's stream broke off ({error}); the text is incomplete"
            )


_ERROR_EVENT = b'data: {"error"'


def _error_text(event: bytes) -> str:
    return f"the worker's first event is an error: {event[6:300].decode('utf-8', 'replace')}"


def _try_elsewhere(answer: Answer, prefilled: Prefilled, tries: Tries) -> bool:
    """Whether another worker may do better.

    A 500 is the worker's own fault, except that a decode worker that cannot load the KV says 500:
    that deserves one new prefill.
    """
    if answer.status in _ELSEWHERE:
        return True
    return answer.status == 500 and prefilled.kv is not None and tries.retries == 0


def _report(pool: Pool, endpoint: Endpoint, answer: Answer) -> None:
    """What a refusal says about its worker."""
    if answer.status in _FULL:
        pool.full(endpoint, _retry_after(answer))
    elif answer.status >= 500:
        pool.failed(endpoint, UpstreamError("reset", True, f"HTTP {answer.status}"))
    else:
        pool.succeeded(endpoint)


def _retry_after(answer: Answer) -> float | None:
    try:
        return max(0.0, float(answer.header(b"retry-after") or b""))
    except ValueError:
        return None


def _give_up(leg: str, last: Failure | None) -> Answer:
    """The last worker's own words, or an error of ours when there are none."""
    if isinstance(last, Answer):
        return last
    if last is None:
        raise ClientError(503, f"no_{leg}_worker", f"no {leg} worker can take the request now")
    raise ClientError(_STATUS[last.kind], f"{leg}_{last.kind}", f"no {leg} worker answered: {last}")
