"""`eldr serve`: runs the prefill/decode router."""

from __future__ import annotations

import argparse
import json
import sys
from typing import Any

from eldr.cli import CANNOT_TELL, DONE, USAGE
from eldr.serving.config import ConfigError, RouterConfig
from eldr.serving.errors import StartError
from eldr.serving.options import add_options, resolve, show

_EPILOG = """\
Every option can also come from the environment (ELDR_SERVE_<NAME>, upper case) or from --config
FILE (TOML or JSON); command line > environment > file > default.

examples:
  eldr serve --prefill http://p0:8100 --decode http://d0:8200 --decode http://d1:8200
  eldr serve --prefill http://p0:8100 --decode http://d0:8200 http://d1:8200 \\
      --policy locality_band --partition partition.safetensors --port 30000

exit codes: 0 stopped by a signal, 2 usage, 3 the router could not start
"""


def configure(parser: argparse.ArgumentParser) -> None:
    """Adds the options of `eldr serve`."""
    parser.epilog = _EPILOG
    add_options(parser)


def run(args: argparse.Namespace) -> int:
    """Runs the router until it is told to stop."""
    try:
        resolved = resolve(args)
    except ConfigError as error:
        print(f"eldr serve: {error}", file=sys.stderr)
        return USAGE
    for note in resolved.notes:
        print(f"eldr serve: {note}", file=sys.stderr)
    if args.show_config:
        _print_config(show(resolved), as_json=args.json)
        return DONE
    return start(resolved.config)


def _print_config(rows: dict[str, dict[str, Any]], *, as_json: bool) -> None:
    if as_json:
        print(json.dumps(rows))
        return
    width = max(len(name) for name in rows)
    for name, row in rows.items():
        print(f"{name:{width}}  {row['value']!r}  ({row['origin']})")


def start(config: RouterConfig) -> int:
    """Starts the event loop and serves; the exit code."""
    import asyncio
    import gc

    import uvloop

    from eldr.serving.logs import set_up

    set_up(config.log_level, config.log_format)
    from eldr.serving.server import serve  # what its parts say when they load is logged as well

    # What is loaded stays: a collector that walks it all again and again costs 2 % of a request.
    gc.collect()
    gc.freeze()
    gc.set_threshold(5_000, 10, 2)
    try:
        uvloop.run(serve(config))
    except (StartError, ConfigError) as error:
        print(f"eldr serve: {error}", file=sys.stderr)
        return USAGE if isinstance(error, ConfigError) else CANNOT_TELL
    except (KeyboardInterrupt, asyncio.CancelledError):
        return DONE
    return DONE
