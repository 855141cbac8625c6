"""The two legs of a request over pools: prefill first, then the decode worker that ELDR chose.

The rules are those of `eldr.serving.legs`: until the first byte every failure is repeated
elsewhere, with a new prefill once a decode replica may have taken the KV; after it, a broken stream
ends in an error event.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing
from dataclasses import dataclass
from typing import Protocol

from eldr.serving.answers import (
    NOT_PREFILLED,
    MalformedAnswer,
    Prefilled,
    PushConnector,
    parse_prefill,
)
from eldr.serving.bodies import SEVERAL_CHOICES, Body, unsplittable
from eldr.serving.decision_headers import decision_headers
from eldr.serving.errors import ClientError, error_event
from eldr.serving.http1 import UpstreamError
from eldr.serving.pd.options import RequestOptions
from eldr.serving.pd.route import REPLICA_HEADER, Head, Headers, Leg, Route
from eldr.serving.retry import RetryBudget, RetryRules, Tries
from eldr.serving.upstream import Answer

log = logging.getLogger(__name__)

_ELSEWHERE = frozenset({429, 502, 503, 504})
_STATUS = {"connect": 503, "reset": 502, "malformed": 502, "timeout": 504, "cut": 504}
_ERROR_EVENT = b'data: {"error"'
_RELEASE_SECONDS = 10.0

Failure = UpstreamError | Answer


class Pools(Protocol):
    """What the legs need of the two pools: see `ray.handles` and `llmd.gateway`."""

    async def prefill(self, request_id: str, leg: Leg) -> Answer:
        """One request on a prefill replica."""

    def decode(self, route: Route, leg: Leg) -> AsyncGenerator[Head | bytes]:
        """One request on the decode replica that the route gets."""


class Client(Protocol):
    """Where the answer goes."""

    @property
    def started(self) -> bool:
        """Whether it has a status."""

    async def start(self, status: int, headers: Headers) -> None:
        """The head, once."""

    async def write(self, data: bytes) -> None:
        """A piece of the body."""


@dataclass(slots=True)
class Call:
    """A client's request, parsed.

    Attributes:
        path: API path, the same on both legs.
        body: parsed.
        request_id: the client's, or ours.
        headers: for both legs.
        session: key for session affinity, or None.
        broken: the answer's stream broke off.
    """

    path: str
    body: Body
    request_id: str
    headers: Headers
    session: str | None = None
    broken: bool = False

    def leg(self, body: bytes) -> Leg:
        """This request with another body."""
        return Leg("POST", self.path, self.headers, body)


class Legs:
    """Runs requests through both pools."""

    def __init__(
        self, pools: Pools, options: RequestOptions, on_retry: Callable[[str], None]
    ) -> None:
        self._pools = pools
        self._options = options
        self._on_retry = on_retry
        self._budget = RetryBudget(
            RetryRules(attempts=options.attempts, budget=options.retry_budget)
        )
        self._releases: set[asyncio.Task[None]] = set()

    async def serve(self, call: Call, client: Client) -> int:
        """Both legs; returns the status once the client has its last byte.

        Raises:
            ClientError: no replica could serve the request; the client has nothing yet.
        """
        self._budget.earn()
        if self._whole(call.body):
            return await self._decode(call, NOT_PREFILLED, "", client)
        prefilled, replica = await self._prefill(call, client)
        if isinstance(prefilled, Answer):
            return await _pass(prefilled, client)
        return await self._decode(call, prefilled, replica, client)

    def _whole(self, body: Body) -> bool:
        """Whether a request skips prefill.

        Raises:
            ClientError: the configuration wants such requests to fail.
        """
        reason, options = unsplittable(body), self._options
        if reason is None:
            return False
        choice = options.several_choices if reason == SEVERAL_CHOICES else options.unsplittable
        if choice == "fail":
            text = f"prefill and decode run apart here, so {reason} is not served"
            raise ClientError(400, "not_supported", text)
        return choice == "whole"

    async def _prefill(self, call: Call, client: Client) -> tuple[Prefilled | Answer, str]:
        """The prefill leg and who did it; an `Answer` is a refusal that the client should see."""
        leg = call.leg(call.body.prefill())
        last: Failure | None = None
        tries = Tries(self._options.attempts, 0)
        while last is None or await self._may_try("prefill", tries):
            try:
                async with asyncio.timeout(self._options.first_byte_timeout):
                    found = await self._pools.prefill(call.request_id, leg)
                if found.status == 200:
                    replica = (found.header(REPLICA_HEADER.encode()) or b"").decode()
                    return parse_prefill(found.body), replica
                if found.status not in _ELSEWHERE:
                    return found, ""
                last = found
            except TimeoutError:
                last = UpstreamError("timeout", True, "no answer in time")
            except UpstreamError as error:
                last = error
            except MalformedAnswer as error:
                last = UpstreamError("malformed", True, str(error))
            except PushConnector as error:
                raise ClientError(502, "push_connector", str(error)) from error
        return _give_up("prefill", last), ""

    async def _decode(self, call: Call, prefilled: Prefilled, replica: str, client: Client) -> int:
        """The decode leg, from the choice of the replica to the client's last byte."""
        route = Route(call.request_id, session=call.session)
        last: Failure | None = None
        sent, tries = False, Tries(self._options.attempts, 0)
        try:
            while last is None or await self._may_try("decode", tries):
                if sent and prefilled.kv is not None:
                    # The replica may have fetched the KV: only a new prefill surely has it.
                    again, replica = await self._prefill(call, client)
                    if isinstance(again, Answer):
                        return await _pass(again, client)
                    prefilled = again
                route.prefill, route.signature = replica, prefilled.signature
                route.prompt_tokens = prefilled.prompt_tokens
                outcome = await self._decode_once(call, prefilled, route, client)
                if isinstance(outcome, int):
                    sent = True
                    return outcome
                sent = sent or not isinstance(outcome, UpstreamError) or outcome.sent
                if isinstance(outcome, Answer) and not _try_elsewhere(outcome, prefilled, tries):
                    return await _pass(outcome, client)
                last = outcome
                route.release()
                if route.worker:
                    route.failed.add(route.worker)
            return await _pass(_give_up("decode", last), client)
        finally:
            route.close()
            if not sent and prefilled.kv is not None:
                self._free(prefilled.kv)

    async def _decode_once(
        self, call: Call, prefilled: Prefilled, route: Route, client: Client
    ) -> int | Failure:
        """One try; a number is the status of an answer that the client has."""
        leg = call.leg(call.body.decode(prefilled.kv))
        try:
            async with aclosing(self._pools.decode(route, leg)) as pieces:
                head = await self._next(pieces, self._options.first_byte_timeout)
                assert isinstance(head, Head)
                streams = head.header("content-type").startswith("text/event-stream")
                if head.status == 200 and call.body.stream and streams:
                    first = await self._next(pieces, self._options.first_byte_timeout)
                    assert isinstance(first, bytes)
                    if first.startswith(_ERROR_EVENT):
                        return UpstreamError("reset", True, f"first event: {first[:300]!r}")
                    await self._relay(call, route, head, first, pieces, client)
                    return head.status
                body = b""
                async for piece in pieces:
                    assert isinstance(piece, bytes)
                    body += piece
        except UpstreamError as error:
            return error
        headers = _passed(head.headers) + self._names(route)
        if head.status != 200:
            return Answer(head.status, [(k.encode(), v.encode()) for k, v in headers], body)
        await send_whole(client, 200, headers, body)
        return 200

    async def _relay(
        self,
        call: Call,
        route: Route,
        head: Head,
        first: bytes,
        pieces: AsyncGenerator[Head | bytes],
        client: Client,
    ) -> None:
        """Copies events to the client; what breaks off ends in an error event."""
        await client.start(head.status, _passed(head.headers) + self._names(route))
        piece: Head | bytes = first
        last = b""
        try:
            while True:
                assert isinstance(piece, bytes)
                await client.write(piece)
                last = (last + piece)[-32:]
                piece = await self._next(pieces, self._options.idle_timeout)
        except UpstreamError as error:
            if last.rstrip().endswith(b"[DONE]"):
                return
            call.broken = True
            log.warning("%s: %s broke off: %s", call.request_id, route.worker, error)
            text = f"the decode replica's stream broke off ({error}); the text is incomplete"
            await client.write(error_event(text, "upstream_error", 502))

    @staticmethod
    async def _next(pieces: AsyncGenerator[Head | bytes], limit: float) -> Head | bytes:
        try:
            async with asyncio.timeout(limit):
                return await anext(pieces)
        except TimeoutError as error:
            raise UpstreamError("timeout", True, f"silent for {limit:g} s") from error
        except StopAsyncIteration as error:
            raise UpstreamError("reset", True, "the stream ended without its end mark") from error

    def _names(self, route: Route) -> Headers:
        if not self._options.worker_headers or route.decision is None:
            return []
        return list(decision_headers(route.prefill, route.decision).items())

    async def _may_try(self, leg: str, tries: Tries) -> bool:
        """Pays for another try and pauses before it; False if there must be none."""
        if not tries.next(free=False) or not self._budget.spend():
            return False
        self._on_retry(leg)
        await asyncio.sleep(self._budget.pause(tries.retries - 1))
        return True

    # Freeing KV that nobody will fetch: see eldr.serving.kv_release

    def _free(self, kv: bytes) -> None:
        body = (
            b'{"model":"eldr-kv-release","prompt":[0],"max_tokens":1,"kv_transfer_params":%b}' % kv
        )
        headers = [("content-type", "application/json")]
        leg = Leg("POST", "/v1/completions", headers, body)
        task = asyncio.ensure_future(self._send_release(leg))
        self._releases.add(task)
        task.add_done_callback(self._releases.discard)

    async def _send_release(self, leg: Leg) -> None:
        route = Route(f"kv-release-{time.monotonic_ns()}")
        try:
            async with asyncio.timeout(_RELEASE_SECONDS):
                async with aclosing(self._pools.decode(route, leg)) as pieces:
                    async for _ in pieces:
                        pass
        except (UpstreamError, TimeoutError) as error:
            log.debug("KV release: %s; the prefill engine's lease frees it", error)
        finally:
            route.close()


def _try_elsewhere(answer: Answer, prefilled: Prefilled, tries: Tries) -> bool:
    """Whether another replica may do better; 500 is also what an engine without its KV says."""
    if answer.status in _ELSEWHERE:
        return True
    return answer.status == 500 and prefilled.kv is not None and tries.retries == 0


def _give_up(leg: str, last: Failure | None) -> Answer:
    """The last replica's own words, or an error of ours when there are none."""
    if isinstance(last, Answer):
        return last
    if last is None:
        raise ClientError(503, f"no_{leg}_worker", f"no {leg} replica can take the request now")
    raise ClientError(
        _STATUS[last.kind], f"{leg}_{last.kind}", f"no {leg} replica answered: {last}"
    )


_NOT_PASSED = frozenset(
    {"connection", "content-length", "date", "keep-alive", "server", "transfer-encoding"}
)


def _passed(headers: Headers) -> Headers:
    return [(k, v) for k, v in headers if k not in _NOT_PASSED and k != REPLICA_HEADER]


async def _pass(answer: Answer, client: Client) -> int:
    headers: list[tuple[str, str]] = [
        (k.decode("latin-1").lower(), v.decode("latin-1")) for k, v in answer.raw_headers
    ]
    await send_whole(client, answer.status, _passed(headers), answer.body)
    return answer.status


async def send_whole(client: Client, status: int, headers: Headers, body: bytes) -> None:
    """An answer in one piece, with its length."""
    await client.start(status, [*headers, ("content-length", str(len(body)))])
    await client.write(body)
