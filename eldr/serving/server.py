"""The process: binds its port, opens the router, serves, and stops on a signal."""

from __future__ import annotations

import asyncio
import errno
import logging
import signal
import socket
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

from aiohttp import web

from eldr.serving.app import build
from eldr.serving.config import RouterConfig
from eldr.serving.errors import StartError
from eldr.serving.state import Router, open_router

log = logging.getLogger(__name__)

# Every client must be able to connect in the same moment.
_BACKLOG = 4096
_SHUTDOWN_SECONDS = 5.0
_SIGNALS = (signal.SIGTERM, signal.SIGINT)


async def serve(config: RouterConfig, ready: Callable[[int], None] | None = None) -> None:
    """Runs the router until SIGTERM or SIGINT.

    Args:
        config: the configuration.
        ready: called with the bound port once requests are taken.

    Raises:
        StartError: nothing was started; the message says what to do.
    """
    started = time.perf_counter()
    loop = asyncio.get_running_loop()
    starting = asyncio.current_task()
    assert starting is not None
    # Until requests are taken, a signal just ends the start.
    for number in _SIGNALS:
        loop.add_signal_handler(number, starting.cancel)
    # The port is taken before the workers are waited for: a used one shows at once.
    with bound_socket(config.host, config.port) as listener:
        async with open_router(config) as router, listening(router, listener):
            stop = asyncio.Event()
            for number in _SIGNALS:
                loop.add_signal_handler(number, stop.set)
            port = listener.getsockname()[1]
            _announce(router, port, time.perf_counter() - started)
            if ready is not None:
                ready(port)
            await stop.wait()
            log.info("stopping")


def bound_socket(host: str, port: int) -> socket.socket:
    """A TCP socket bound to the address, not yet listening.

    Raises:
        StartError: the address is in use or not ours.
    """
    try:
        family, _, _, _, address = socket.getaddrinfo(
            host or None, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
    except OSError as error:
        raise StartError(f"cannot listen on {host!r}: {error}") from error
    listener = socket.socket(family, socket.SOCK_STREAM)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
        return listener
    except OSError as error:
        listener.close()
        reason = "in use" if error.errno == errno.EADDRINUSE else f"not available ({error})"
        raise StartError(
            f"{host}:{port} is {reason}; choose another --port, or stop what listens there"
        ) from error


@asynccontextmanager
async def listening(router: Router, listener: socket.socket) -> AsyncIterator[None]:
    """Takes requests on the socket while the block runs."""
    runner = web.AppRunner(
        build(router),
        handler_cancellation=True,  # a client that leaves ends its request
        access_log=None,
        shutdown_timeout=_SHUTDOWN_SECONDS,
    )
    await runner.setup()
    try:
        await web.SockSite(runner, listener, backlog=_BACKLOG).start()
        yield
    finally:
        await runner.cleanup()


def _announce(router: Router, port: int, seconds: float) -> None:
    config = router.config
    log.info(
        "router ready on http://%s:%d after %.2f s: policy %s, %d prefill, %d decode workers",
        config.host,
        port,
        seconds,
        config.policy,
        len(router.prefill.endpoints),
        len(router.decode.endpoints),
    )
