"""The process: binds its ports, opens the router, serves, and stops gracefully on a signal."""

from __future__ import annotations

import asyncio
import errno
import logging
import signal
import socket
import ssl
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import AsyncExitStack, ExitStack, asynccontextmanager, contextmanager

from aiohttp import web

from eldr.serving.admin import Admin, add_metrics
from eldr.serving.app import Surface
from eldr.serving.background import start
from eldr.serving.config import ConfigError, RouterConfig
from eldr.serving.descriptors import make_room
from eldr.serving.errors import StartError
from eldr.serving.front import Listener
from eldr.serving.opening import open_router
from eldr.serving.operator_page import OperatorPage
from eldr.serving.policy import live_policies
from eldr.serving.pool import Pool
from eldr.serving.security import is_loopback, server_tls
from eldr.serving.state import Router
from eldr.serving.web import json_errors

log = logging.getLogger(__name__)

# Every client must be able to connect in the same moment.
_BACKLOG = 4096
_SIGNALS = (signal.SIGTERM, signal.SIGINT)
# Clients get this long to read the error event that ends a stream cut by the drain's time limit.
_CUT_SECONDS = 2.0
_POLL_SECONDS = 0.02
# Between two requests on a connection that aiohttp serves; half a request does not prolong it.
_KEEP_ALIVE_SECONDS = 75.0


async def serve(config: RouterConfig, ready: Callable[[int], None] | None = None) -> None:
    """Runs the router until SIGTERM or SIGINT.

    Args:
        config: the configuration.
        ready: called with the bound port once requests are taken.

    Raises:
        StartError: nothing was started; the message says what to do.
        ConfigError: options that do not go together.
    """
    started = time.perf_counter()
    loop = asyncio.get_running_loop()
    starting = asyncio.current_task()
    assert starting is not None
    # Until requests are taken, a signal just ends the start.
    for number in _SIGNALS:
        loop.add_signal_handler(number, starting.cancel)
    make_room(config.max_concurrent)
    async with AsyncExitStack() as stack:
        # Ports are taken before the workers are waited for: a used one shows at once.
        sockets = stack.enter_context(bound_sockets(config))
        router = await stack.enter_async_context(open_router(config))
        await stack.enter_async_context(listening(router, sockets))
        stop, hurry = asyncio.Event(), asyncio.Event()
        for number in _SIGNALS:
            loop.add_signal_handler(number, lambda: (hurry if stop.is_set() else stop).set())
        _announce(router, sockets, time.perf_counter() - started)
        if ready is not None:
            ready(sockets["main"].getsockname()[1])
        await stop.wait()
        await drain(router, hurry)


async def drain(router: Router, hurry: asyncio.Event) -> None:
    """Lets running requests end; a second signal, or the time limit, cuts them short.

    Cut streams end in an error event, cut requests in an error.
    """
    config = router.config
    # Load balancers need a moment to notice that /readiness says no.
    router.stopping = True
    await _wait(lambda: hurry.is_set(), config.drain_grace)
    router.draining = True
    log.info("stopping; %d requests are running", router.admission.running)
    await _wait(lambda: not router.admission.running or hurry.is_set(), config.drain_timeout)
    if router.admission.running:
        log.warning("cutting %d requests short", router.admission.running)
        router.client.fail_all("the router is stopping")
        await _wait(lambda: not router.admission.running, _CUT_SECONDS)


async def _wait(true: Callable[[], bool], seconds: float) -> None:
    loop = asyncio.get_running_loop()
    end = loop.time() + seconds
    while not true() and loop.time() < end:
        await asyncio.sleep(_POLL_SECONDS)


def check_exposure(config: RouterConfig) -> None:
    """Refuses an operator's surface that strangers could reach.

    Raises:
        ConfigError: the admin port listens beyond this machine, but needs no key.
    """
    if config.admin_port and not is_loopback(config.admin_host) and not config.admin_key:
        raise ConfigError(
            f"admin_host {config.admin_host} is reachable from other machines: set an admin key "
            "(ELDR_SERVE_ADMIN_KEY), or listen on 127.0.0.1"
        )


@contextmanager
def bound_sockets(config: RouterConfig) -> Iterator[dict[str, socket.socket]]:
    """The bound listeners by surface: main, and admin and metrics where they have ports.

    Raises:
        StartError: an address is in use or not ours.
    """
    check_exposure(config)
    wanted = {"main": (config.host, config.port)}
    if config.admin_port:
        wanted["admin"] = (config.admin_host, config.admin_port)
    if config.prometheus_port:
        wanted["metrics"] = (config.prometheus_host, config.prometheus_port)
    with ExitStack() as stack:
        yield {
            name: stack.enter_context(bound_socket(host, port))
            for name, (host, port) in wanted.items()
        }


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
            f"{host}:{port} is {reason}; choose another port, or stop what listens there"
        ) from error


@asynccontextmanager
async def listening(router: Router, sockets: dict[str, socket.socket]) -> AsyncIterator[None]:
    """Takes requests on the sockets while the block runs.

    Raises:
        StartError: the TLS files do not fit.
    """
    config = router.config
    tls = server_tls(config.tls_cert, config.tls_key, config.tls_client_ca)
    async with AsyncExitStack() as stack:
        for name, listener in sockets.items():
            app = web.Application(client_max_size=config.max_body, middlewares=[json_errors])
            surface = Surface(router)
            if name == "main":
                surface.add_to(app)
            # Beyond this machine, the operator's routes are only where they were asked for.
            if name == "admin" or (name == "main" and _admin_on_main(config)):
                Admin(router).add_to(app)
                OperatorPage(router).add_to(app)
                add_metrics(app, router.metrics)
            elif name == "metrics":
                add_metrics(app, router.metrics)
            runner = await _runner(stack, config, app)
            if name == "main":
                start(stack, "deadlines", surface.deadlines.run)
            if name == "main" and config.short_way:
                await _listen_short(stack, config, surface, runner, listener, tls)
            else:
                # Beyond this machine the admin key travels, so it is under TLS as well.
                inside = name == "metrics" or (name == "admin" and is_loopback(config.admin_host))
                over = None if inside else tls
                await web.SockSite(runner, listener, backlog=_BACKLOG, ssl_context=over).start()
        yield


def _admin_on_main(config: RouterConfig) -> bool:
    return not config.admin_port and is_loopback(config.host)


async def _runner(
    stack: AsyncExitStack, config: RouterConfig, app: web.Application
) -> web.AppRunner:
    runner = web.AppRunner(
        app,
        handler_cancellation=True,  # a client that leaves ends its request
        access_log=None,
        shutdown_timeout=_CUT_SECONDS,
        keepalive_timeout=_KEEP_ALIVE_SECONDS,
        max_line_size=config.max_header,
        max_field_size=config.max_header,
    )
    await runner.setup()
    stack.push_async_callback(runner.cleanup)
    return runner


async def _listen_short(
    stack: AsyncExitStack,
    config: RouterConfig,
    surface: Surface,
    runner: web.AppRunner,
    listener: socket.socket,
    tls: ssl.SSLContext | None,
) -> None:
    """Listens for completions on the short way, and for all else on aiohttp's."""
    assert runner.server is not None  # it is set up
    front = Listener(
        surface.short_way,
        runner.server,
        longest_head=config.max_header,
        head_seconds=config.body_timeout,
    )
    start(stack, "front", front.sweep)
    stack.push_async_callback(front.close, _CUT_SECONDS)
    server = await asyncio.get_running_loop().create_server(
        front, sock=listener, backlog=_BACKLOG, ssl=tls
    )
    stack.callback(server.close)


def _announce(router: Router, sockets: dict[str, socket.socket], seconds: float) -> None:
    config = router.config
    log.info(
        "router ready on http%s://%s:%d after %.2f s: policy %s, %s prefill, %s decode workers",
        "s" if config.tls_cert else "",
        config.host,
        sockets["main"].getsockname()[1],
        seconds,
        " against ".join(live_policies(router.config)),
        _count(router.prefill),
        _count(router.decode),
    )


def _count(pool: Pool) -> str:
    """How many members there are, or how many of them answer."""
    answering = sum(not endpoint.awaited for endpoint in pool.endpoints)
    return str(pool.size) if answering == pool.size else f"{answering} of {pool.size}"
