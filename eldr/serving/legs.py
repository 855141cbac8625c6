"""The two legs of a request: prefill first, then decode on the worker that the policy picks."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass

import aiohttp
from aiohttp import web
from multidict import CIMultiDictProxy

from eldr.serving.answers import MalformedAnswer, Prefilled, PushConnector, parse_prefill
from eldr.serving.call import Call
from eldr.serving.decode_pool import DecodePool, Ticket
from eldr.serving.endpoints import Endpoint
from eldr.serving.errors import ClientError
from eldr.serving.prefill_pool import PrefillPool
from eldr.serving.relay import Truncated, end_broken_stream, passed_headers, relay_events
from eldr.serving.upstream import Attempt, UpstreamError, post, read_whole

log = logging.getLogger(__name__)

# Answers by which a worker says "not here, not now": another worker may take the request.
_ELSEWHERE = frozenset({429, 502, 503, 504})
_STATUS = {"connect": 503, "reset": 502, "malformed": 502, "timeout": 504}


@dataclass(slots=True)
class Answer:
    """A worker's complete answer that goes to the client as it is."""

    status: int
    headers: CIMultiDictProxy[str]
    body: bytes


class Legs:
    """Runs requests through a prefill pool and a decode pool."""

    def __init__(
        self,
        session: aiohttp.ClientSession,
        prefill: PrefillPool,
        decode: DecodePool,
        *,
        attempts: int,
    ) -> None:
        self._session = session
        self._prefill = prefill
        self._decode = decode
        self._attempts = attempts

    async def serve(self, call: Call) -> web.StreamResponse:
        """Both legs; returns when the client has its last byte.

        Raises:
            ClientError: no worker could serve the request.
        """
        prefilled = await self.prefill(call)
        if isinstance(prefilled, Answer):
            return _pass(call, prefilled)
        return await self.decode(call, prefilled)

    async def prefill(self, call: Call) -> Prefilled | Answer:
        """The prefill leg; an `Answer` is a refusal that the client should see."""
        body = call.body.prefill()
        tried: set[Endpoint] = set()
        last: UpstreamError | Answer | None = None
        while call.attempts < self._attempts:
            endpoint = self._prefill.choose(call.prefix, tried)
            if endpoint is None:
                break
            call.attempts += 1
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
        tried: set[str] = set()
        last: UpstreamError | Answer | None = None
        call.attempts = 0
        while call.attempts < self._attempts:
            ticket = self._decode.reserve(call, prefilled, tried)
            if ticket is None:
                break
            call.attempts += 1
            tried.add(ticket.endpoint.name)
            attempt = Attempt()
            try:
                outcome = await self._decode_on(ticket, call, prefilled, attempt)
            except UpstreamError as error:
                outcome, last = None, error
            finally:
                ticket.release()
            if isinstance(outcome, web.StreamResponse):
                return outcome
            if outcome is not None:
                last = outcome
                if outcome.status not in _ELSEWHERE:
                    return _pass(call, outcome)
            if attempt.sent and prefilled.kv is not None:
                # The worker may have fetched or freed the KV: only a new prefill surely has it.
                again = await self.prefill(call)
                if isinstance(again, Answer):
                    return _pass(call, again)
                prefilled = again
        return _pass(call, _give_up("decode", last))

    async def _ask(self, endpoint: Endpoint, call: Call, body: bytes) -> Answer:
        attempt = Attempt()
        response = await post(
            self._session, endpoint.route(call.path), body, endpoint.headers(call.headers), attempt
        )
        try:
            return Answer(response.status, response.headers, await read_whole(response, attempt))
        finally:
            response.release()

    async def _decode_on(
        self, ticket: Ticket, call: Call, prefilled: Prefilled, attempt: Attempt
    ) -> web.StreamResponse | Answer:
        endpoint = ticket.endpoint
        response = await post(
            self._session,
            endpoint.route(call.path),
            call.body.decode(prefilled.kv),
            endpoint.headers(call.headers),
            attempt,
        )
        try:
            streams = call.body.stream and response.content_type == "text/event-stream"
            if response.status != 200 or not streams:
                answer = Answer(
                    response.status, response.headers, await read_whole(response, attempt)
                )
                return answer if response.status != 200 else _pass(call, answer, ticket.headers)
            return await self._stream(call, ticket, response, attempt)
        finally:
            # An unfinished answer must not be reused; closing it aborts the request at the worker.
            response.release() if response.content.at_eof() else response.close()

    async def _stream(
        self,
        call: Call,
        ticket: Ticket,
        upstream: aiohttp.ClientResponse,
        attempt: Attempt,
    ) -> web.StreamResponse:
        # The client's status line waits for the first event: until then another worker can serve.
        try:
            first = await upstream.content.readany()
        except (aiohttp.ClientError, OSError) as error:
            raise UpstreamError("reset", True, str(error)) from error
        if not first:
            raise UpstreamError("reset", True, "the stream ended before its first event")
        client = web.StreamResponse(
            status=200, headers=passed_headers(upstream.headers, ticket.headers)
        )
        await client.prepare(call.request)
        try:
            await relay_events(upstream, client, first)
        except Truncated as error:
            log.warning("%s: %s broke off: %s", call.request_id, ticket.endpoint.name, error)
            await end_broken_stream(
                client, f"the decode worker's stream broke off ({error}); the text is incomplete"
            )
        return client


def _pass(call: Call, answer: Answer, extra: Mapping[str, str] | None = None) -> web.Response:
    return web.Response(
        status=answer.status, headers=passed_headers(answer.headers, extra), body=answer.body
    )


def _give_up(leg: str, last: UpstreamError | Answer | None) -> Answer:
    """The last worker's own words, or an error of ours when there are none."""
    if isinstance(last, Answer):
        return last
    if last is None:
        raise ClientError(503, f"no_{leg}_worker", f"no {leg} worker can take the request now")
    status = _STATUS[last.kind]
    raise ClientError(status, f"{leg}_{last.kind}", f"no {leg} worker answered: {last}")
