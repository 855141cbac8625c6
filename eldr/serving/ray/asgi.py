"""Calls an ASGI application in the same process: one request in, head and body pieces out."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from typing import Any

from eldr.serving.pd.route import Head, Leg


class ApplicationError(RuntimeError):
    """The application ended without an answer."""


async def exchange(application: Any, leg: Leg) -> AsyncGenerator[Head | bytes]:
    """Runs one request: yields its head, then pieces of the body as they come.

    Pieces that are there at the same time come as one. A consumer that stops early ends the
    request as a client that hangs up would.

    Raises:
        ApplicationError: the application ended or failed before its head.
    """
    messages: asyncio.Queue[Head | bytes | None] = asyncio.Queue()
    sent, complete, gone = False, False, asyncio.Event()

    async def receive() -> dict[str, Any]:
        nonlocal sent
        if not sent:
            sent = True
            return {"type": "http.request", "body": leg.body, "more_body": False}
        await gone.wait()
        return {"type": "http.disconnect"}

    async def send(message: dict[str, Any]) -> None:
        nonlocal complete
        if message["type"] == "http.response.start":
            pairs = [
                (k.decode("latin-1").lower(), v.decode("latin-1")) for k, v in message["headers"]
            ]
            messages.put_nowait(Head(message["status"], pairs))
        elif message["type"] == "http.response.body":
            complete = not message.get("more_body", False)
            if message.get("body"):
                messages.put_nowait(bytes(message["body"]))

    running = asyncio.ensure_future(application(_scope(leg), receive, send))
    running.add_done_callback(lambda _: messages.put_nowait(None))
    try:
        head = await messages.get()
        if not isinstance(head, Head):
            raise ApplicationError(f"the engine's server gave no answer: {_why(running)}")
        yield head
        ended = False
        while not ended and isinstance(piece := await messages.get(), bytes):
            pieces = [piece]
            while not messages.empty() and not ended:
                more = messages.get_nowait()
                if isinstance(more, bytes):
                    pieces.append(more)
                else:
                    ended = True
            yield b"".join(pieces)
        if not complete:
            raise ApplicationError(f"the engine's server broke off: {_why(running)}")
    finally:
        gone.set()
        running.cancel()
        await asyncio.wait((running,))  # unlike awaiting the task, this tells our own end from its


def _why(running: asyncio.Future[Any]) -> str:
    error = running.exception() if running.done() and not running.cancelled() else None
    return repr(error)


def _scope(leg: Leg) -> dict[str, Any]:
    path, _, query = leg.path.partition("?")
    return {
        "type": "http",
        "asgi": {"version": "3.0", "spec_version": "2.3"},
        "http_version": "1.1",
        "method": leg.method,
        "scheme": "http",
        "path": path,
        "raw_path": path.encode(),
        "root_path": "",
        "query_string": query.encode(),
        "headers": [(k.encode("latin-1"), v.encode("latin-1")) for k, v in leg.headers],
        "client": ("127.0.0.1", 0),
        "server": ("127.0.0.1", 0),
        "state": {},
    }
