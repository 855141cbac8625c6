"""The coordinator process: `python -m eldr.serving.llmd CONFIG` (JSON or YAML)."""

from __future__ import annotations

import argparse
import asyncio
import logging
import signal
import sys
from collections.abc import Sequence

from aiohttp import web

from eldr.serving.config import ConfigError
from eldr.serving.llmd.config import CoordinatorConfig, read_config
from eldr.serving.llmd.server import open_coordinator
from eldr.serving.pd.options import read_file

log = logging.getLogger("eldr.serving.llmd")
_DRAIN_SECONDS = 120.0


def main(argv: Sequence[str] | None = None) -> int:
    """Exit codes: 0 stopped by a signal, 1 the address is not free, 2 usage."""
    parser = argparse.ArgumentParser(prog="python -m eldr.serving.llmd", description=__doc__)
    parser.add_argument("config", metavar="CONFIG", help="JSON or YAML file")
    args = parser.parse_args(argv)
    logging.basicConfig(level=logging.INFO, format="%(levelname)s %(name)s: %(message)s")
    try:
        asyncio.run(serve(read_config(read_file(args.config))))
    except ConfigError as error:
        print(f"eldr: {error}", file=sys.stderr)
        return 2
    except OSError as error:
        print(f"eldr: {error}", file=sys.stderr)
        return 1
    return 0


async def serve(config: CoordinatorConfig) -> None:
    """Serves until SIGTERM or SIGINT; running requests may end."""
    stop = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, stop.set)
    async with open_coordinator(config) as app:
        runner = web.AppRunner(
            app, handler_cancellation=True, access_log=None, shutdown_timeout=_DRAIN_SECONDS
        )
        await runner.setup()
        try:
            await web.TCPSite(runner, config.host, config.port).start()
            log.info("coordinator on %s:%d for %s", config.host, config.port, config.gateway)
            await stop.wait()
        finally:
            await runner.cleanup()


if __name__ == "__main__":
    sys.exit(main())
