"""Answers of the router itself."""

from __future__ import annotations

from typing import Any

import orjson
from aiohttp import web
from multidict import CIMultiDict

from eldr.serving.call import REQUEST_ID
from eldr.serving.errors import ClientError
from eldr.serving.upstream import Answer, Pairs


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
    return CIMultiDict((name.decode("latin-1"), value.decode("latin-1")) for name, value in pairs)
