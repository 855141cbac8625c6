"""Errors of the router: those a start ends with, and those a client gets as OpenAI-shaped JSON."""

from __future__ import annotations

import orjson


class StartError(Exception):
    """The router cannot start; the message names the value at fault and what to do."""


class ClientError(Exception):
    """A request that the router answers itself, with an OpenAI-shaped error body.

    Attributes:
        status: HTTP status.
        kind: value of `error.type`; a closed set, also a metric label.
        retry_after: seconds for the Retry-After header, or None.
    """

    def __init__(
        self, status: int, kind: str, message: str, *, retry_after: float | None = None
    ) -> None:
        super().__init__(message)
        self.status = status
        self.kind = kind
        self.retry_after = retry_after

    @property
    def body(self) -> bytes:
        """The JSON body."""
        return error_body(str(self), self.kind, self.status)


def legible(text: str) -> str:
    """What a client sent, as logs and JSON can hold it: bytes that are no UTF-8 are replaced."""
    if text.isascii():
        return text
    return text.encode("utf-8", "surrogateescape").decode("utf-8", "replace")


def error_body(message: str, kind: str, status: int) -> bytes:
    """`{"error": {...}}` as OpenAI clients and vLLM spell it."""
    error = {"message": legible(message), "type": kind, "param": None, "code": status}
    return orjson.dumps({"error": error})


def error_event(message: str, kind: str, status: int) -> bytes:
    """The events that end a broken stream: the error, then the end mark that clients wait for."""
    return b"data: " + error_body(message, kind, status) + b"\n\ndata: [DONE]\n\n"
