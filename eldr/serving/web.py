"""Answers of the router itself."""

from __future__ import annotations

from typing import Any

import orjson
from aiohttp import web

from eldr.serving.call import REQUEST_ID
from eldr.serving.errors import ClientError


def json_answer(value: Any, status: int = 200) -> web.Response:
    """A JSON answer; bytes are taken as JSON already."""
    body = value if isinstance(value, bytes) else orjson.dumps(value)
    return web.Response(status=status, body=body, headers={"Content-Type": "application/json"})


def refusal(request: web.BaseRequest, error: ClientError) -> web.Response:
    """The answer to a request that the router does not serve."""
    response = json_answer(error.body, error.status)
    if error.retry_after is not None:
        response.headers["Retry-After"] = str(max(1, round(error.retry_after)))
    if error.status == 401:
        response.headers["WWW-Authenticate"] = "Bearer"
    if REQUEST_ID in request.headers:
        response.headers[REQUEST_ID] = request.headers[REQUEST_ID]
    return response
