"""One machine, one command: a local Ray with the application on it.

    python -m eldr.serving.ray CONFIG [--host 127.0.0.1] [--port 8000] [--num-cpus N] ...

CONFIG is a JSON or YAML file of `RayConfig`. On SIGHUP it is read again, and Serve replaces what
changed while it serves: proxies for another routing, engines for other engine options. On SIGTERM
or SIGINT everything that was started ends. On a cluster use `serve deploy` with a Serve config file
instead (docs/ray.md).
"""

from __future__ import annotations

import argparse
import logging
import os
import secrets
import signal
import sys
import tempfile
import threading
from collections.abc import Sequence
from typing import Any

import msgspec

from eldr.serving.config import ConfigError
from eldr.serving.pd.options import read_file
from eldr.serving.ray.config import RayConfig, read_config

log = logging.getLogger("eldr.serving.ray")

APPLICATION = "eldr"
_ENDS = (signal.SIGTERM, signal.SIGINT)


class _Ended(BaseException):
    """Whoever started this wants it to end, perhaps in the middle of a deployment."""


def main(argv: Sequence[str] | None = None) -> int:
    """Exit codes: 0 stopped, 1 the application did not come up, 2 usage."""
    args = _parser().parse_args(argv)
    logging.basicConfig(level=logging.INFO, format="%(levelname)s %(name)s: %(message)s")
    try:
        config = read_config(read_file(args.config))
    except ConfigError as error:
        print(f"eldr: {error}", file=sys.stderr)
        return 2
    from ray import serve

    _start_ray(args)
    try:
        for number in _ENDS:  # in place of Ray's own
            signal.signal(number, _end)
        again = threading.Event()
        signal.signal(signal.SIGHUP, lambda *_: again.set())
        options = {"host": args.host, "port": args.port}
        serve.start(proxy_location="HeadOnly", http_options=options)
        try:
            _deploy(config, args)
        except RuntimeError as error:  # Serve's word for replicas that do not start
            log.error("%s", error)
            return 1
        while True:
            again.wait()
            again.clear()
            _reload(args)
    except _Ended:
        return 0
    finally:
        for number in _ENDS:  # a second one must not leave half of it running
            signal.signal(number, signal.SIG_IGN)
        serve.shutdown()
        _stop_ray()


def _end(*_: object) -> None:
    raise _Ended


def _reload(args: argparse.Namespace) -> None:
    try:
        _deploy(read_config(read_file(args.config)), args)
    except (ConfigError, RuntimeError) as error:
        log.error("the application stays as it is: %s", error)
        _tell({"failed": str(error)})


def _deploy(config: RayConfig, args: argparse.Namespace) -> None:
    from ray import serve

    from eldr.serving.ray.app import build_eldr_pd_app

    serve.run(build_eldr_pd_app(config), name=APPLICATION, route_prefix="/")
    _tell({"ready": f"http://{args.host}:{args.port}", "policy": config.routing.policy})


def _tell(outcome: dict[str, str]) -> None:
    """One line per deployment, on stdout: whoever started this waits for it."""
    print(msgspec.json.encode(outcome).decode(), flush=True)


def _start_ray(args: argparse.Namespace) -> None:
    import ray

    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    if not {"RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH"} & os.environ.keys():
        os.environ["RAY_AUTH_TOKEN"] = secrets.token_hex(32)  # of this cluster, which ends with us
    options: dict[str, Any] = {}
    if args.num_cpus is not None:
        options["num_cpus"] = args.num_cpus
    if args.object_store_mib:
        options["object_store_memory"] = args.object_store_mib * 2**20
    # Ray's sockets live there, and their paths may have 107 bytes.
    folder = args.temp_dir or tempfile.mkdtemp(prefix="eldr-ray-")
    ray.init(
        include_dashboard=args.dashboard,
        log_to_driver=False,
        _temp_dir=folder,
        _metrics_export_port=args.metrics_port or None,
        **options,
    )
    log.info("Ray runs in %s", folder)


def _stop_ray() -> None:
    import ray

    ray.shutdown()


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m eldr.serving.ray", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("config", metavar="CONFIG", help="JSON or YAML file of the application")
    parser.add_argument("--host", default="127.0.0.1", help="address to listen on")
    parser.add_argument("--port", type=int, default=8000, help="port to listen on")
    parser.add_argument("--num-cpus", type=int, help="logical CPUs (default: the machine's)")
    parser.add_argument("--object-store-mib", type=int, default=0, help="Ray's object store")
    parser.add_argument("--metrics-port", type=int, default=0, help="Ray's metrics page")
    parser.add_argument("--dashboard", action="store_true", help="start Ray's dashboard")
    parser.add_argument("--temp-dir", default="", help="where Ray keeps sockets and logs")
    return parser


if __name__ == "__main__":
    sys.exit(main())
