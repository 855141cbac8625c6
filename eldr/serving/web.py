"""Answers of the router itself."""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable
from typing import Any

import orjson
from aiohttp import web
from multidict import CIMultiDict

from eldr.serving.call import REQUEST_ID
from eldr.serving.errors import ClientError
from eldr.serving.upstream import Answer, Pairs

log = logging.getLogger(__name__)

_KINDS = {404: "not_found", 405: "method_not_allowed", 413: "request_too_large"}


def json_answer(value: Any, status: int = 200) -> web.Response:
    """A JSON answer; bytes are taken as JSON already."""
    body = value if isinstance(value, bytes) else orjson.dumps(value)
    return web.Response(status=status, body=body, headers={"Content-Type": "application/json"})


def refusal(request: web.BaseRequest, error: ClientError) -> web.Response:
    """The answer to a request that the router does not serve."""
    return as_response(refused(error, request.headers.get(REQUEST_ID)))


def refused(error: ClientError, request_id: str | None) -> Answer:
    """The same as a plain answer; `request_id`: the client's own."""
    headers = [(b"Content-Type", b"application/json")]
    if error.retry_after is not None:
        headers.append((b"Retry-After", b"%d" % max(1, round(error.retry_after))))
    if error.status == 401:
        headers.append((b"WWW-Authenticate", b"Bearer"))
    if request_id is not None:
        headers.append((REQUEST_ID.encode(), request_id.encode("utf-8", "surrogateescape")))
    return Answer(error.status, headers, error.body)


def as_response(answer: Answer) -> web.Response:
    """An answer in aiohttp's words."""
    return web.Response(
        status=answer.status, headers=as_headers(answer.raw_headers), body=answer.body
    )


def as_headers(pairs: Pairs) -> CIMultiDict[str]:
    """Headers in aiohttp's words."""
    return CIMultiDict((name.decode("latin-1"), _text(value)) for name, value in pairs)


def _text(value: bytes) -> str:
    """A header's value; aiohttp sends it as UTF-8."""
    try:
        return value.decode()
    except UnicodeDecodeError:
        return value.decode("latin-1")


@web.middleware
async def json_errors(
    request: web.Request, handler: Callable[[web.Request], Awaitable[web.StreamResponse]]
) -> web.StreamResponse:
    """Errors that no route made, an unknown path or a bug, look like all others to a client."""
    try:
        return await handler(request)
    except web.HTTPError as error:
        kind = _KINDS.get(error.status, "invalid_request_error")
        text = f"{request.method} {request.path}: {error.reason}"
        answer = refusal(request, ClientError(error.status, kind, text))
        if "Allow" in error.headers:
            answer.headers["Allow"] = error.headers["Allow"]
        return answer
    except ConnectionResetError:  # the client has gone
        raise
    except Exception:
        if request.writer.output_size > 0:
            raise  # half an answer is out: the connection must end
        log.exception("%s %s failed inside the router", request.method, request.path)
        return refusal(request, ClientError(500, "router_error", "internal router error"))
