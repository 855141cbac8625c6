"""The router's configuration: every option once, with its flag, environment twin, type and default.

An option's value comes from, in this order: command line, environment (`ELDR_SERVE_<NAME>`), file
(TOML or JSON), default. Unknown keys are errors with a suggestion.
"""

from __future__ import annotations

from dataclasses import dataclass, field, fields
from typing import Any, Literal


class ConfigError(ValueError):
    """A configuration that cannot be used; names where it came from and what would be right."""


_SECONDS = (
    "startup_timeout",
    "request_timeout",
    "first_byte_timeout",
    "idle_timeout",
    "connect_timeout",
)


def _option(default: Any, group: str, text: str, *, secret: bool = False) -> Any:
    return field(default=default, metadata={"group": group, "help": text, "secret": secret})


@dataclass(frozen=True, slots=True, kw_only=True)
class RouterConfig:
    """All options of `eldr serve`; durations are seconds, sizes are bytes."""

    prefill: tuple[str, ...] = _option((), "workers", "URL of a prefill worker (repeat)")
    decode: tuple[str, ...] = _option((), "workers", "URL of a decode worker (repeat)")
    startup_timeout: float = _option(
        120.0, "workers", "how long workers may take to answer at start"
    )

    policy: str = _option("least_requests", "routing", "rule that picks the decode worker")
    partition: str = _option("", "routing", "fitted partition file, for policies that need one")
    tau: float = _option(0.05, "routing", "width of the locality band")
    min_coverage: float = _option(
        0.5, "routing", "signatures that cover a smaller share of the prompt are not used"
    )
    seed: int = _option(0, "routing", "seed of the policies that draw random numbers")
    prefill_policy: Literal["prefix_hash", "least_requests", "round_robin"] = _option(
        "prefix_hash", "routing", "rule that picks the prefill worker"
    )

    host: str = _option("127.0.0.1", "listen", "address to listen on")
    port: int = _option(30000, "listen", "port to listen on")

    request_timeout: float = _option(1800.0, "limits", "longest life of a request")
    first_byte_timeout: float = _option(
        300.0, "limits", "longest wait for the first byte of a worker's answer"
    )
    idle_timeout: float = _option(
        120.0, "limits", "longest silence of a worker in the middle of an answer"
    )
    connect_timeout: float = _option(5.0, "limits", "time to connect to a worker")
    attempts: int = _option(3, "limits", "tries per leg, each on another worker")
    max_body: int = _option(64 * 2**20, "limits", "largest request body")

    decision_buffer: int = _option(1000, "observe", "decisions kept for GET /eldr/decisions")
    worker_headers: bool = _option(
        False, "observe", "add x-eldr-prefill-worker, x-eldr-decode-worker and x-eldr-branch"
    )
    log_level: Literal["debug", "info", "warning", "error"] = _option(
        "info", "observe", "least severe log lines to print"
    )

    def __post_init__(self) -> None:
        for name in (
            "startup_timeout",
            "request_timeout",
            "connect_timeout",
            "first_byte_timeout",
            "idle_timeout",
        ):
            if not getattr(self, name) > 0:
                raise ConfigError(f"{name}: must be positive, got {getattr(self, name)!r}")
        if self.attempts < 1:
            raise ConfigError(f"attempts: must be at least 1, got {self.attempts}")
        for name in ("prefill", "decode"):
            urls = getattr(self, name)
            if not urls:
                raise ConfigError(f"no {name} worker: give at least one --{name} URL")
            twice = sorted({url for url in urls if urls.count(url) > 1})
            if twice:
                raise ConfigError(f"{name} worker {twice[0]} is given twice")


def options() -> dict[str, Any]:
    """The dataclass field of each option, by name."""
    return {f.name: f for f in fields(RouterConfig)}
