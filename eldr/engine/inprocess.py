"""vLLM's OpenAI server without its listener: an ASGI application around an engine of this process.

For hosts that bring their own transport, such as a Ray Serve replica. The engine is configured by
the options of vLLM's command line, so whatever works there works here.
"""

from __future__ import annotations

import json
import os
import socket
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from typing import Any

# Where other engines of the cluster reach this one's NIXL side channel; both may be set beforehand.
_SIDE_PORT = "VLLM_NIXL_SIDE_CHANNEL_PORT"
_SIDE_HOST = "VLLM_NIXL_SIDE_CHANNEL_HOST"


def command_line(options: Mapping[str, Any]) -> list[str]:
    """Options by name (dashes or underscores) as arguments of vLLM's command line.

    True is a bare flag, False its `--no-` form, None leaves the option out, mappings and lists are
    written as vLLM reads them: JSON, and one argument per item.
    """
    out: list[str] = []
    for name, value in options.items():
        flag = name.replace("_", "-")
        if value is None:
            continue
        if isinstance(value, bool):
            out.append(f"--{flag}" if value else f"--no-{flag}")
        elif isinstance(value, Mapping):
            out += [f"--{flag}", json.dumps(value)]
        elif isinstance(value, list | tuple):
            out += [f"--{flag}", *map(str, value)]
        else:
            out += [f"--{flag}", str(value)]
    return out


def reserve_side_channel(host: str) -> None:
    """Gives this process's engine a side channel of its own unless the environment names one."""
    os.environ.setdefault(_SIDE_HOST, host)
    if _SIDE_PORT not in os.environ:
        with socket.socket() as probe:
            probe.bind((host, 0))
            os.environ[_SIDE_PORT] = str(probe.getsockname()[1])


@asynccontextmanager
async def open_application(options: Mapping[str, Any], host: str) -> AsyncIterator[Any]:
    """Starts the engine and yields its ASGI application; ends the engine on the way out.

    Args:
        options: of vLLM's command line, for example `{"model": ..., "dtype": "bfloat16"}`.
        host: address under which this machine is reached by the other engines.
    """
    reserve_side_channel(host)  # vLLM reads its environment when it is imported or configured
    from vllm.entrypoints.launchers.api_server.app_state import init_app_state
    from vllm.entrypoints.launchers.api_server.entry import build_async_engine_client
    from vllm.entrypoints.launchers.app import build_app
    from vllm.entrypoints.launchers.cli_args import make_arg_parser, validate_parsed_serve_args
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    args = make_arg_parser(FlexibleArgumentParser()).parse_args(command_line(options))
    validate_parsed_serve_args(args)
    async with build_async_engine_client(args) as client:
        tasks = await client.get_supported_tasks()
        application = build_app(args, tasks, client.model_config)
        await init_app_state(client, application.state, args, tasks)
        async with application.router.lifespan_context(application):
            yield application
