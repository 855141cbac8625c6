"""The client's side of both legs: parses requests, words errors, counts outcomes; any transport."""

from __future__ import annotations

import asyncio
import logging
import uuid
from collections.abc import Awaitable, Callable, Mapping

from eldr.serving.bodies import parse
from eldr.serving.call import FORWARDED
from eldr.serving.errors import ClientError, error_body
from eldr.serving.http1 import UpstreamError
from eldr.serving.pd.legs import Call, Client, Legs, send_whole
from eldr.serving.pd.options import RequestOptions
from eldr.serving.pd.route import Headers
from eldr.serving.security import refuse_media_urls

log = logging.getLogger(__name__)

CHAT = "/v1/chat/completions"
COMPLETIONS = frozenset({"/v1/completions", CHAT})
JSON: Headers = [("content-type", "application/json")]
_FORWARDED = frozenset(name.lower() for name in FORWARDED)


class Surface:
    """POST /v1/completions and /v1/chat/completions."""

    def __init__(self, legs: Legs, options: RequestOptions, on_end: Callable[[str], None]) -> None:
        """What serves the requests.

        Args:
            legs: run them.
            options: bounds.
            on_end: called with each request's outcome: ok, client_error, worker_error,
                router_error, cancelled, broken_stream.
        """
        self._legs = legs
        self._options = options
        self._on_end = on_end

    async def complete(
        self,
        path: str,
        headers: Mapping[str, str],
        body: Callable[[], Awaitable[bytes]],
        client: Client,
    ) -> None:
        """One request, from its body to the answer's last byte.

        Args:
            path: one of `COMPLETIONS`.
            headers: names in lower case.
            body: reads it.
            client: gets the answer.

        Raises:
            ClientError: the answer is this error; the client has nothing yet.
        """
        outcome = "cancelled"
        try:
            parsed = parse(await body(), chat=path == CHAT)
            refuse_media_urls(parsed)
            request_id = headers.get("x-request-id") or uuid.uuid4().hex
            passed = [(k, v) for k, v in headers.items() if k in _FORWARDED]
            passed += [("x-request-id", request_id), *JSON]
            call = Call(path, parsed, request_id, passed, headers.get("x-session-id"))
            async with asyncio.timeout(self._options.request_timeout):
                status = await self._legs.serve(call, client)
            outcome = "broken_stream" if call.broken else _outcome(status)
        except ClientError as error:
            outcome = _outcome(error.status)
            raise
        except TimeoutError as error:
            outcome = "worker_error"
            if client.started:
                raise
            text = f"the request took longer than {self._options.request_timeout:g} s"
            raise ClientError(504, "request_timeout", text) from error
        except Exception as error:
            outcome = "router_error"
            log.exception("a request failed between its legs")
            if client.started:
                raise
            raise ClientError(500, "router_error", "internal router error") from error
        finally:
            self._on_end(outcome)

    def too_large(self) -> ClientError:
        """The answer to a body above the bound."""
        text = f"the body exceeds {self._options.max_body} bytes"
        return ClientError(413, "request_too_large", text)


async def refuse(client: Client, error: ClientError | UpstreamError) -> None:
    """Answers with an error in OpenAI's words."""
    if isinstance(error, UpstreamError):
        error = ClientError(503, "no_worker", f"no worker answered: {error}")
    await send_whole(client, error.status, JSON, error_body(str(error), error.kind, error.status))


def _outcome(status: int) -> str:
    if status < 400:
        return "ok"
    return "client_error" if status < 500 else "worker_error"
