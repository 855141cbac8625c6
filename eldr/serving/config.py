"""The router's configuration: every option once, with its flag, environment twin, type and default.

An option's value comes from, in this order: command line, environment (`ELDR_SERVE_<NAME>`), file
(TOML or JSON), default. Unknown keys are errors with a suggestion.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field, fields
from typing import Any, Literal


class ConfigError(ValueError):
    """A configuration that cannot be used; names where it came from and what would be right."""


def without_password(url: str) -> str:
    """A URL as it may be shown: what is in front of an `@` is left out."""
    return re.sub(r"^(\w+://)?.*@", r"\1...@", url, flags=re.DOTALL)


_ENDLESS = float("inf")
_PORTS = ("port", "admin_port", "prometheus_port")
_SECONDS = (
    "startup_timeout",
    "request_timeout",
    "first_byte_timeout",
    "idle_timeout",
    "connect_timeout",
    "body_timeout",
    "queue_timeout",
    "discovery_interval",
    "ab_period",
    "eject_seconds",
    "retry_pause",
    "retry_longest_pause",
    "health_interval",
    "health_timeout",
)
_AT_LEAST_ONE = (
    "attempts",
    "retry_growth",
    "eject_failures",
    "health_failures",
    "decision_buffer",
    "max_body",
    "max_header",
    "max_concurrent",
    "decode_ranks",
    "decision_log_size",
    "decision_log_files",
    "refit_window",
)
_NOT_NEGATIVE = (
    "startup_grace",
    "poll_interval",
    "kv_high",
    "retry_budget",
    "slow_start",
    "tau",
    "min_coverage",
    "queue_size",
    "drain_grace",
    "drain_timeout",
    "decision_log_counters",
    "refit_every",
)


def _option(default: Any, group: str, text: str, *, secret: bool = False) -> Any:
    return field(default=default, metadata={"group": group, "help": text, "secret": secret})


@dataclass(frozen=True, slots=True, kw_only=True)
class RouterConfig:
    """All options of `eldr serve`; durations are seconds, sizes are bytes."""

    prefill: tuple[str, ...] = _option((), "workers", "URL of a prefill worker (repeat)")
    decode: tuple[str, ...] = _option((), "workers", "URL of a decode worker (repeat)")
    worker_file: str = _option(
        "", "workers", "TOML or JSON file with `prefill` and `decode` lists, watched for changes"
    )
    k8s_prefill: str = _option("", "workers", "label selector of prefill pods (extra eldr[k8s])")
    k8s_decode: str = _option("", "workers", "label selector of decode pods")
    k8s_namespace: str = _option("default", "workers", "namespace of these pods")
    k8s_port: int = _option(8000, "workers", "port of pods without the annotation eldr.ai/port")
    discovery_interval: float = _option(2.0, "workers", "pause between looks at file or cluster")
    decode_ranks: int = _option(1, "workers", "data-parallel ranks behind each decode URL")
    startup_timeout: float = _option(
        120.0, "workers", "how long the start waits for workers to answer"
    )
    # Two whole tries for each: who serves answers in this time, however busy; who does not is dead
    # or loads, which may take minutes, and a router that comes back must not wait for it.
    startup_grace: float = _option(
        10.0,
        "workers",
        "once a worker of each kind answers, how long the start waits for the others; they join "
        "when they answer",
    )

    policy: str = _option(
        "auto",
        "routing",
        "rule that picks the decode worker; auto: marginal_cost if the prefill workers send "
        "signatures, else least_requests",
    )
    partition: str = _option("", "routing", "fitted partition file, for policies that need one")
    refit_every: float = _option(
        0.0,
        "routing",
        "seconds between looks at whether the traffic left the partition, which is then fitted "
        "again, and follows workers that join or leave; 0: never",
    )
    refit_window: int = _option(1024, "routing", "signatures of recent requests kept for a refit")
    refit_sample: float = _option(1.0, "routing", "share of the requests that this window takes")
    tau: float = _option(0.1, "routing", "width of the locality band")
    min_coverage: float = _option(
        0.5, "routing", "signatures that cover a smaller share of the prompt are not used"
    )
    seed: int = _option(0, "routing", "seed of the policies that draw random numbers")
    prefill_policy: Literal["prefix_hash", "cache_aware", "least_requests", "round_robin"] = (
        _option(
            "prefix_hash",
            "routing",
            "rule that picks the prefill worker; cache_aware is prefix_hash by another name",
        )
    )

    unsplittable: Literal["whole", "fail"] = _option(
        "whole",
        "routing",
        "batches of prompts, prompt logprobs, beam search: whole on a decode worker, or an error",
    )
    several_choices: Literal["split", "whole", "fail"] = _option(
        "split",
        "routing",
        "n > 1: two legs like any request, whole on a decode worker, or an error",
    )
    no_prefill: Literal["fail", "whole"] = _option(
        "fail", "routing", "without any prefill worker: fail, or serve whole on a decode worker"
    )

    host: str = _option("127.0.0.1", "listen", "address to listen on")
    port: int = _option(30000, "listen", "port to listen on; 0 takes any free one")
    short_way: bool = _option(
        True,
        "listen",
        "read and answer completions in the plain form by the router's own listener; without it "
        "aiohttp's server serves everything, and takes more processor time",
    )
    admin_host: str = _option("127.0.0.1", "listen", "address of the operator's routes")
    admin_port: int = _option(
        0, "listen", "port of the operator's routes; 0: on --port if that is on loopback, else off"
    )
    prometheus_host: str = _option("127.0.0.1", "listen", "address of /metrics")
    prometheus_port: int = _option(
        0, "listen", "port of /metrics alone; 0: with the operator's routes"
    )
    tls_cert: str = _option(
        "",
        "listen",
        "certificate file (PEM) for TLS on --port, and on --admin-port beyond loopback",
    )
    tls_key: str = _option("", "listen", "its private key file, if it is not in the same file")
    tls_client_ca: str = _option("", "listen", "demand client certificates of this authority")

    api_key: tuple[str, ...] = _option(
        (), "security", "keys of clients (better from the environment)", secret=True
    )
    admin_key: str = _option("", "security", "key of the operator's routes", secret=True)
    worker_key: str = _option("", "security", "key that the workers want", secret=True)
    worker_ca: str = _option("", "security", "authority (PEM) of the workers' certificates")
    allow_media_urls: bool = _option(
        False, "security", "let requests name images and other media by URL"
    )

    request_timeout: float = _option(1800.0, "limits", "longest life of a request")
    first_byte_timeout: float = _option(
        300.0, "limits", "longest wait for the first byte of a worker's answer"
    )
    idle_timeout: float = _option(
        120.0, "limits", "longest silence of a worker in the middle of an answer"
    )
    connect_timeout: float = _option(5.0, "limits", "time to connect to a worker")
    body_timeout: float = _option(60.0, "limits", "time for a request's body to arrive")
    max_concurrent: int = _option(4096, "limits", "requests served at once")
    queue_size: int = _option(1024, "limits", "requests that may wait for their turn")
    queue_timeout: float = _option(60.0, "limits", "longest wait for a turn")
    drain_grace: float = _option(
        0.0, "limits", "after SIGTERM, time during which requests are still taken"
    )
    drain_timeout: float = _option(120.0, "limits", "after that, time for running ones to end")
    max_header: int = _option(16384, "limits", "longest request header")
    max_body: int = _option(64 * 2**20, "limits", "largest request body")

    attempts: int = _option(5, "faults", "tries per leg, each on another worker while there is one")
    retry_budget: float = _option(0.5, "faults", "retries that each request earns for all")
    retry_pause: float = _option(0.02, "faults", "longest pause before the first retry")
    retry_growth: float = _option(2.0, "faults", "how many times longer each next pause may be")
    retry_longest_pause: float = _option(2.0, "faults", "longest pause before any retry")
    eject_failures: int = _option(5, "faults", "consecutive failed requests that eject a worker")
    eject_seconds: float = _option(5.0, "faults", "first pause before an ejected worker is tried")
    slow_start: float = _option(20.0, "faults", "ramp of a worker that came back; 0: none")
    health_interval: float = _option(5.0, "faults", "pause between health checks")
    health_timeout: float = _option(10.0, "faults", "time that a health check may take")
    poll_interval: float = _option(
        5.0, "faults", "pause between looks at the workers' own metrics; 0: none"
    )
    kv_high: float = _option(
        0.97, "faults", "a worker that says that more than this share of its KV is used is spared"
    )
    health_failures: int = _option(3, "faults", "consecutive failed checks that take a worker down")

    shadow: tuple[str, ...] = _option(
        (), "observe", "policies to evaluate on the same requests without deciding (repeat)"
    )
    ab: tuple[str, ...] = _option(
        (), "observe", "A/B experiment between two or more policies, instead of --policy"
    )
    ab_design: Literal["switchback", "request"] = _option(
        "switchback", "observe", "arms by periods of the whole fleet, or by single requests"
    )
    ab_period: float = _option(60.0, "observe", "length of a period of a switchback experiment")
    decision_log: str = _option("", "observe", "file for decisions and outcomes as JSON lines")
    decision_log_sample: float = _option(1.0, "observe", "share of the requests that are logged")
    decision_log_size: int = _option(2**26, "observe", "size at which a new log file begins")
    decision_log_files: int = _option(5, "observe", "log files kept")
    decision_log_signatures: bool = _option(False, "observe", "log signatures as well")
    decision_log_counters: float = _option(
        30.0, "observe", "seconds between the log's rows of decode workers' counters; 0: none"
    )
    decision_buffer: int = _option(1000, "observe", "decisions kept for GET /eldr/decisions")
    worker_headers: bool = _option(
        False, "observe", "tell clients where a request went and why, in headers x-eldr-..."
    )
    otel_endpoint: str = _option(
        "", "observe", "OTLP/HTTP collector for spans, e.g. http://otel:4318 (extra eldr[otel])"
    )
    log_format: Literal["console", "json"] = _option("console", "observe", "form of log lines")
    log_level: Literal["debug", "info", "warning", "error"] = _option(
        "info", "observe", "least severe log lines to print"
    )

    def __post_init__(self) -> None:
        for name in _SECONDS:
            if not 0 < getattr(self, name) < _ENDLESS:
                raise ConfigError(f"{name}: must be positive, got {getattr(self, name)!r}")
        for name in _AT_LEAST_ONE:
            if not 1 <= getattr(self, name) < _ENDLESS:
                raise ConfigError(
                    f"{name}: must be finite and at least 1, got {getattr(self, name)!r}"
                )
        for name in _NOT_NEGATIVE:
            if not 0 <= getattr(self, name) < _ENDLESS:
                raise ConfigError(f"{name}: must not be negative, got {getattr(self, name)!r}")
        for name in _PORTS:
            if not 0 <= getattr(self, name) < 2**16:
                raise ConfigError(f"{name}: must be below 65536, got {getattr(self, name)!r}")
        if not 0 <= self.decision_log_sample <= 1:
            raise ConfigError(
                f"decision_log_sample: must be in [0, 1], got {self.decision_log_sample}"
            )
        if not 0 < self.refit_sample <= 1:
            raise ConfigError(f"refit_sample: must be in (0, 1], got {self.refit_sample}")
        if self.ab and self.policy != "auto":
            raise ConfigError(f"ab: its arms decide; leave policy {self.policy} out")
        if len(set(self.shadow)) < len(self.shadow):
            raise ConfigError(f"shadow: name different policies, got {list(self.shadow)}")
        if self.ab and (len(self.ab) < 2 or len(set(self.ab)) < len(self.ab)):
            raise ConfigError(f"ab: name two or more different policies, got {list(self.ab)}")
        self._check_keys()
        self._check_workers()

    def _check_keys(self) -> None:
        given = {"api_key": self.api_key, "admin_key": (self.admin_key,)}
        given["worker_key"] = (self.worker_key,)
        for name, keys in given.items():
            # An unset variable in a script must not become a key that anybody has.
            if name == "api_key" and "" in keys:
                raise ConfigError("api_key: an empty key is none; leave it out to let everyone in")
            if not all(key.isascii() and key.isprintable() and " " not in key for key in keys):
                raise ConfigError(f"{name}: a key is printable ASCII without spaces")
        if self.admin_key and self.admin_key in self.api_key:
            raise ConfigError("admin_key: clients have it as api_key; choose another one")

    def _check_workers(self) -> None:
        if bool(self.k8s_prefill) != bool(self.k8s_decode):
            raise ConfigError("k8s_prefill and k8s_decode go together")
        sources = bool(self.prefill or self.decode), bool(self.worker_file), bool(self.k8s_decode)
        if sum(sources) > 1:
            raise ConfigError(
                "workers come from one place: --prefill and --decode, --worker-file, or labels"
            )
        if self.worker_file or self.k8s_decode:
            return
        for name in ("prefill", "decode"):
            urls = getattr(self, name)
            if not urls:
                raise ConfigError(f"no {name} worker: give at least one --{name} URL")
            for url in urls:
                if "@" in url:
                    raise ConfigError(
                        f"{name} worker {without_password(url)}: no user or password belongs in a "
                        "worker URL; --worker-key is what workers want"
                    )
            twice = sorted({url for url in urls if urls.count(url) > 1})
            if twice:
                raise ConfigError(f"{name} worker {twice[0]} is given twice")


def options() -> dict[str, Any]:
    """The dataclass field of each option, by name."""
    return {f.name: f for f in fields(RouterConfig)}
