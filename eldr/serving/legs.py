"""The two legs of a request: prefill first, then decode on the worker that the policy picks."""

from __future__ import annotations

import logging
from collections.abc import Mapping

from aiohttp import web

from eldr.serving.answers import MalformedAnswer, Prefilled, PushConnector, parse_prefill
from eldr.serving.call import Call
from eldr.serving.decode_pool import DecodePool, Ticket
from eldr.serving.endpoints import Endpoint
from eldr.serving.errors import ClientError
from eldr.serving.http1 import UpstreamError
from eldr.serving.prefill_pool import PrefillPool
from eldr.serving.relay import Truncated, end_broken_stream, relay_events
from eldr.serving.upstream import Answer, Attempt, Exchange, Limits, open_exchange

log = logging.getLogger(__name__)

# Answers by which a worker says "not here, not now": another worker may take the request.
_ELSEWHERE = frozenset({429, 502, 503, 504})
_STATUS = {"connect": 503, "reset": 502, "malformed": 502, "timeout": 504}
_LONGEST_ANSWER = 2**28


class Legs:
    """Runs requests through a prefill pool and a decode pool."""

    def __init__(
        self,
        prefill: PrefillPool,
        decode: DecodePool,
        *,
        attempts: int,
        first_byte: float,
        idle: float,
    ) -> None:
        self._prefill = prefill
        self._decode = decode
        self._attempts = attempts
        self._first_byte = first_byte
        self._idle = idle

    async def serve(self, call: Call) -> web.StreamResponse:
        """Both legs; returns when the client has its last byte.

        Raises:
            ClientError: no worker could serve the request.
        """
        prefilled = await self.prefill(call)
        if isinstance(prefilled, Answer):
            return _pass(prefilled)
        return await self.decode(call, prefilled)

    async def prefill(self, call: Call) -> Prefilled | Answer:
        """The prefill leg; an `Answer` is a refusal that the client should see."""
        body = call.body.prefill()
        tried: set[Endpoint] = set()
        last: UpstreamError | Answer | None = None
        for _ in range(self._attempts):
            endpoint = self._prefill.choose(call.prefix, tried)
            if endpoint is None:
                break
            tried.add(endpoint)
            try:
                with self._prefill.running(endpoint):
                    answer = await self._ask(endpoint, call, body)
                if answer.status == 200:
                    call.prefill_worker = endpoint.name
                    return parse_prefill(answer.body)
                last = answer
                if answer.status not in _ELSEWHERE:
                    return answer
            except UpstreamError as error:
                last = error
            except MalformedAnswer as error:
                last = UpstreamError("malformed", True, str(error))
            except PushConnector as error:
                raise ClientError(502, "push_connector", str(error)) from error
        return _give_up("prefill", last)

    async def decode(self, call: Call, prefilled: Prefilled) -> web.StreamResponse:
        """The decode leg, from the choice of the worker to the client's last byte."""
        failed: set[str] = set()
        band: frozenset[str] = frozenset()
        last: UpstreamError | Answer | None = None
        for _ in range(self._attempts):
            ticket = self._decode.reserve(call, prefilled, failed, band)
            if ticket is None:
                break
            failed.add(ticket.endpoint.name)
            band = band or ticket.band
            attempt = Attempt()
            try:
                outcome = await self._decode_on(ticket, call, prefilled, attempt)
                if isinstance(outcome, web.StreamResponse):
                    return outcome
                last = outcome
                if outcome.status not in _ELSEWHERE:
                    return _pass(outcome)
            except UpstreamError as error:
                last = error
            finally:
                ticket.release()
            if attempt.sent and prefilled.kv is not None:
                # The worker may have fetched or freed the KV: only a new prefill surely has it.
                again = await self.prefill(call)
                if isinstance(again, Answer):
                    return _pass(again)
                prefilled = again
        return _pass(_give_up("decode", last))

    def _limits(self, call: Call) -> Limits:
        return Limits(self._first_byte, self._idle, call.expires)

    async def _ask(self, endpoint: Endpoint, call: Call, body: bytes) -> Answer:
        async with await open_exchange(
            endpoint, call.path, call.headers, body, self._limits(call), Attempt()
        ) as exchange:
            return await exchange.answer(_LONGEST_ANSWER)

    async def _decode_on(
        self, ticket: Ticket, call: Call, prefilled: Prefilled, attempt: Attempt
    ) -> web.StreamResponse | Answer:
        body = call.body.decode(prefilled.kv)
        async with await open_exchange(
            ticket.endpoint, call.path, call.headers, body, self._limits(call), attempt
        ) as exchange:
            if exchange.connection.status == 200 and call.body.stream and exchange.streams:
                return await self._stream(call, ticket, exchange)
            answer = await exchange.answer(_LONGEST_ANSWER)
            return answer if answer.status != 200 else _pass(answer, ticket.headers)

    async def _stream(self, call: Call, ticket: Ticket, exchange: Exchange) -> web.StreamResponse:
        # The client's status line waits for the first event: until then another worker can serve.
        first = await exchange.connection.read()
        if not first:
            raise UpstreamError("reset", True, "the stream ended before its first event")
        headers = exchange.passed_headers()
        headers.update(ticket.headers)
        client = web.StreamResponse(status=200, headers=headers)
        await client.prepare(call.request)
        try:
            await relay_events(exchange.connection, client, first)
        except Truncated as error:
            log.warning("%s: %s broke off: %s", call.request_id, ticket.endpoint.name, error)
            await end_broken_stream(
                client, f"the decode worker's stream broke off ({error}); the text is incomplete"
            )
        return client


def _pass(answer: Answer, extra: Mapping[str, str] | None = None) -> web.Response:
    if extra:
        answer.headers.update(extra)
    return web.Response(status=answer.status, headers=answer.headers, body=answer.body)


def _give_up(leg: str, last: UpstreamError | Answer | None) -> Answer:
    """The last worker's own words, or an error of ours when there are none."""
    if isinstance(last, Answer):
        return last
    if last is None:
        raise ClientError(503, f"no_{leg}_worker", f"no {leg} worker can take the request now")
    raise ClientError(_STATUS[last.kind], f"{leg}_{last.kind}", f"no {leg} worker answered: {last}")
