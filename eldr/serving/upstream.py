"""HTTP to the workers: one shared client session, failures named by what they mean for a retry."""

from __future__ import annotations

import asyncio
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Literal

import aiohttp
from multidict import CIMultiDict
from yarl import URL

# uvicorn, which vLLM runs on, drops connections that idle for 5 s; ours must go first, or a request
# meets a closing connection.
_KEEPALIVE_SECONDS = 4.0

FailureKind = Literal["connect", "reset", "timeout", "malformed"]


@dataclass(slots=True)
class Attempt:
    """One try of a leg on one worker; `sent` is true once bytes of the request may have left."""

    sent: bool = False


_attempt: ContextVar[Attempt] = ContextVar("eldr_attempt")


class UpstreamError(Exception):
    """A worker gave no usable answer.

    Attributes:
        kind: `connect` (never reached), `reset` (connection lost), `timeout` (no answer in time),
            `malformed` (not HTTP, or truncated).
        sent: whether the worker may have seen the request.
    """

    def __init__(self, kind: FailureKind, sent: bool, message: str) -> None:
        super().__init__(message)
        self.kind = kind
        self.sent = sent


class _Request(aiohttp.ClientRequest):
    """Marks the attempt as sent at the moment its bytes go out."""

    async def send(self, conn: aiohttp.connector.Connection) -> aiohttp.ClientResponse:
        attempt = _attempt.get(None)
        if attempt is not None:
            attempt.sent = True
        return await super().send(conn)


def open_session(connect_timeout: float) -> aiohttp.ClientSession:
    """The session that every request shares; no connection limit, cookies or redirects."""
    return aiohttp.ClientSession(
        connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=_KEEPALIVE_SECONDS),
        cookie_jar=aiohttp.DummyCookieJar(),
        auto_decompress=False,
        timeout=aiohttp.ClientTimeout(total=None, sock_connect=connect_timeout),
        request_class=_Request,
        skip_auto_headers=("User-Agent", "Accept-Encoding"),
        # Answers of a worker are bounded by what it generates; lines may hold long header values.
        read_bufsize=2**18,
    )


async def post(
    session: aiohttp.ClientSession,
    url: URL,
    body: bytes,
    headers: CIMultiDict[str],
    attempt: Attempt,
) -> aiohttp.ClientResponse:
    """Sends one request and returns when the answer's status line and headers are there.

    Raises:
        UpstreamError: no answer; `asyncio.TimeoutError` of the caller's own limits passes through.
    """
    token = _attempt.set(attempt)
    try:
        return await session.post(url, data=body, headers=headers, allow_redirects=False)
    except (aiohttp.ClientError, OSError) as error:
        raise failure(error, attempt) from error
    finally:
        _attempt.reset(token)


async def read_whole(response: aiohttp.ClientResponse, attempt: Attempt) -> bytes:
    """The complete body.

    Raises:
        UpstreamError: the connection ended before the body did.
    """
    try:
        return await response.read()
    except (aiohttp.ClientError, OSError) as error:
        raise failure(error, attempt) from error


def failure(error: BaseException, attempt: Attempt) -> UpstreamError:
    """Names what an aiohttp or socket error means for the request."""
    text = str(error) or type(error).__name__
    if isinstance(error, aiohttp.ClientConnectorError | aiohttp.ConnectionTimeoutError):
        return UpstreamError("connect", attempt.sent, text)
    if isinstance(error, asyncio.TimeoutError):
        return UpstreamError("timeout", attempt.sent, text)
    if isinstance(error, aiohttp.ServerDisconnectedError | aiohttp.ClientOSError | OSError):
        return UpstreamError("reset", attempt.sent, text)
    return UpstreamError("malformed", attempt.sent, text)
