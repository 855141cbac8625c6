"""What the demo asks of engines and the router in front of them; `eldr serve` over processes."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Protocol

from eldr.demo.commands import eldr
from eldr.demo.config import DemoConfig
from eldr.demo.console import Console
from eldr.demo.http import counter, get_json, post_json
from eldr.demo.measure import DecodeCounters
from eldr.demo.ports import free_ports
from eldr.demo.processes import Child, Supervisor
from eldr.demo.workers import router_command, worker_command, worker_env
from eldr.workload.tiny import MODEL_DIR

# vLLM's counter of where prompt tokens came from, and two of its sources.
SOURCES = "vllm:prompt_tokens_by_source_total"
RECOMPUTED, TRANSFERRED = "local_compute", "external_kv_transfer"

_ROUTER_START = 120.0  # seconds
_DECODE_NICENESS = 10


class Fleet(Protocol):
    """One prefill engine, decode engines in a fixed order, and a router that can be changed."""

    @property
    def prefill(self) -> str:
        """URL at which the prefill engine is recorded, and serves requests alone."""

    def route(self, name: str, policy: str, partition: Path | None) -> AbstractContextManager[str]:
        """A router in front of the engines, for the block.

        Args:
            name: of the phase, for logs and pages.
            policy: that decides.
            partition: file for policies that need one; others leave it alone.

        Returns:
            The router's URL.
        """

    def check_alive(self) -> None:
        """Raises `ProcessFailed` if something has ended that should run."""

    def reset_prefix_caches(self) -> None:
        """Empties the prefix cache of every engine."""

    def counters(self) -> list[DecodeCounters]:
        """The decode engines' counters."""

    def prompt_tokens(self, source: str) -> int:
        """Prompt tokens that the decode engines got from a source, since they started."""


class ProcessFleet:
    """vLLM servers as child processes, and an `eldr serve` per phase."""

    def __init__(self, config: DemoConfig, supervisor: Supervisor, console: Console) -> None:
        self._config, self._supervisor = config, supervisor
        count = 1 + config.decode_workers
        console.say(
            f"starting {count} vLLM workers on this machine's CPU; logs in {config.out}/logs"
        )
        ports = free_ports(2 * count)  # two calls could find the same one
        self._prefill, *self._decode = [
            self._start_worker(*place)
            for place in zip(range(count), ports[:count], ports[count:], strict=True)
        ]
        self._router: Child | None = None
        supervisor.wait_healthy(self._engines, config.start_timeout)

    def _start_worker(self, number: int, port: int, side_channel: int) -> Child:
        role = "decode" if number else "prefill"
        return self._supervisor.start(
            f"decode-{number - 1}" if number else "prefill",
            worker_command(role, port, MODEL_DIR),
            f"http://127.0.0.1:{port}",
            worker_env(side_channel),
            # A prefill GPU does not wait for decode GPUs. Here all share a few cores, and decode
            # workers that compete with prefill starve themselves of requests to batch.
            niceness=_DECODE_NICENESS if number else 0,
        )

    @property
    def _engines(self) -> list[Child]:
        return [self._prefill, *self._decode]

    @property
    def prefill(self) -> str:
        """URL of the prefill worker."""
        return self._prefill.url

    @contextmanager
    def route(self, name: str, policy: str, partition: Path | None) -> Iterator[str]:
        """Leaves `operator-NAME.html` behind, the page of what the router decided."""
        (port,) = free_ports(1)
        log = self._config.out / f"decisions-{name}.jsonl"
        log.unlink(missing_ok=True)  # of an earlier run
        command = router_command(
            port,
            self.prefill,
            [child.url for child in self._decode],
            policy,
            partition,
            None if partition is None else self._config.tau,
            log,
        )
        router = self._supervisor.start(f"router-{name}", command, f"http://127.0.0.1:{port}")
        self._supervisor.wait_healthy([router], _ROUTER_START)
        self._router = router
        try:
            yield router.url
        finally:
            self._router = None
            self._supervisor.stop(router)
        eldr("report", str(log), "-o", str(self._config.out / f"operator-{name}.html"))

    def check_alive(self) -> None:
        """Raises `ProcessFailed` if a worker or the router has ended."""
        for child in (self._router, *self._engines):
            if child is not None:
                self._supervisor.check_alive(child)

    def reset_prefix_caches(self) -> None:
        """Empties the prefix cache of every worker."""
        for child in self._engines:
            post_json(f"{child.url}/reset_prefix_cache")

    def counters(self) -> list[DecodeCounters]:
        """The decode workers' counters."""
        return [
            DecodeCounters.parse(get_json(f"{child.url}/eldr/decode")) for child in self._decode
        ]

    def prompt_tokens(self, source: str) -> int:
        """Prompt tokens that the decode workers got from a source."""
        return int(sum(counter(child.url, SOURCES, source=source) for child in self._decode))


@contextmanager
def process_fleet(
    config: DemoConfig, supervisor: Supervisor, console: Console
) -> Iterator[ProcessFleet]:
    """Servers that are up; the supervisor ends them."""
    yield ProcessFleet(config, supervisor, console)
