"""vllm-router's flags, so that `eldr serve` can take its place in a unit file or a chart.

Flags of the same meaning set options of ours. Flags that tune something which works otherwise here
are accepted and logged; what cannot be honoured is refused with a sentence. With
--vllm-pd-disaggregation the command line is taken for vllm-router's as a whole: --api-key is then
the key for workers, --policy is for both roles, and /metrics is on port 29000.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from eldr.serving.config import ConfigError

_PREFIX = "vllm_router_"
MODE = "vllm_pd_disaggregation"
_METRICS_PORT = 29000


@dataclass(frozen=True, slots=True)
class Flag:
    """What becomes of one of vllm-router's flags.

    Attributes:
        option: the option of ours that it sets, or "".
        convert: from its text to the option's value.
        takes: number of values: 0, 1 or "+".
        note: why it has no effect here; logged.
        refused: why it cannot be honoured; an error.
    """

    option: str = ""
    convert: Callable[[str], Any] = str
    takes: int | str = 1
    note: str = ""
    refused: str = ""


def _only(*accepted: str, why: str) -> Callable[[str], Any]:
    """Accepts these values alone, without setting anything."""

    def check(text: str) -> None:
        if text.lower() not in accepted:
            raise ValueError(f"{text!r} is not supported: {why}")

    return check


def _seconds(text: str) -> float:
    return float(text) / 1e3


_PREFILL_POLICIES = ("cache_aware", "prefix_hash", "round_robin", "least_requests")
_NOT_HERE = {
    "cache_aware": "a decode worker gets its KV from prefill and has no prefix to be aware of; "
    "choose auto, least_requests or power_of_two",
    "kv_aware": "this router reads no KV events; choose auto or least_kv",
    "sticky_least_loaded": "choose session, which is sticky with bounded load",
}


def _decode_policy(text: str) -> str:
    if text in _NOT_HERE:
        raise ValueError(f"{text!r} is not supported for decode: {_NOT_HERE[text]}")
    return "session" if text == "consistent_hash" else text


def _selector(text: str) -> str:
    return ",".join(text.split())


_REGULAR = "this router serves prefill and decode workers only: give --prefill and --decode"
_PROGRAMS = "there is no program scheduling"

FLAGS: dict[str, Flag] = {
    MODE: Flag(takes=0),
    "decode_policy": Flag("policy", _decode_policy),
    "worker_startup_timeout_secs": Flag("startup_timeout", float),
    "request_timeout_secs": Flag("request_timeout", float),
    "queue_timeout_secs": Flag("queue_timeout", float),
    "max_payload_size": Flag("max_body", int),
    "max_concurrent_requests": Flag("max_concurrent", int),
    "intra_node_data_parallel_size": Flag("decode_ranks", int),
    "retry_max_retries": Flag("attempts", int),
    "retry_initial_backoff_ms": Flag("retry_pause", _seconds),
    "retry_max_backoff_ms": Flag("retry_longest_pause", _seconds),
    "retry_backoff_multiplier": Flag("retry_growth", float),
    "cb_failure_threshold": Flag("eject_failures", int),
    "cb_timeout_duration_secs": Flag("eject_seconds", float),
    "health_failure_threshold": Flag("health_failures", int),
    "health_check_timeout_secs": Flag("health_timeout", float),
    "health_check_interval_secs": Flag("health_interval", float),
    "prefill_selector": Flag("k8s_prefill", _selector, "+"),
    "decode_selector": Flag("k8s_decode", _selector, "+"),
    "service_discovery_port": Flag("k8s_port", int),
    "service_discovery_namespace": Flag("k8s_namespace"),
    "service_discovery": Flag(takes=0),
    "disable_retries": Flag("attempts", lambda _: 1, 0),
    "kv_connector": Flag(
        "", _only("nixl", why="push connectors must know the decode worker before prefill")
    ),
    "health_check_endpoint": Flag("", _only("/health", why="workers are asked at /health")),
    "request_id_headers": Flag(
        "", _only("x-request-id", why="requests are identified by X-Request-Id"), "+"
    ),
    "worker_startup_check_interval": Flag(note="workers are asked four times a second"),
    "retry_jitter_factor": Flag(note="pauses are drawn evenly between 0 and their bound"),
    "cb_success_threshold": Flag(note="one success closes a breaker, then --slow-start ramps up"),
    "cb_window_duration_secs": Flag(note="consecutive failures count, not those in a window"),
    "health_success_threshold": Flag(note="one good check is enough, then --slow-start ramps up"),
    **dict.fromkeys(
        (
            *("cache_threshold", "balance_abs_threshold", "balance_rel_threshold"),
            *("eviction_interval_secs", "max_tree_size"),
        ),
        Flag(note="prefixes are hashed here, there is no tree to tune"),
    ),
    **dict.fromkeys(("worker_urls", "selector"), Flag(takes="+", refused=_REGULAR)),
    "enable_igw": Flag(takes=0, refused="one router serves one model"),
    "mini_lb": Flag(takes=0, refused=_REGULAR),
    "disable_circuit_breaker": Flag(
        takes=0, refused="a worker that refuses connections is always spared for a moment"
    ),
    "vllm_discovery_address": Flag(refused="workers come from flags, --worker-file or Kubernetes"),
    "rate_limit_tokens_per_second": Flag(
        refused="there is no token bucket; --max-concurrent and --queue-size bound the load"
    ),
    "cors_allowed_origins": Flag(takes="+", refused="browsers should not call this router"),
    "log_dir": Flag(refused="logs go to stderr; let the service manager keep them"),
    **dict.fromkeys(
        ("wasm_middleware", "wasm_middleware_sha256", "wasm_middleware_route"),
        Flag(refused="there are no plug-ins"),
    ),
    "enable_program_scheduling": Flag(takes=0, refused=_PROGRAMS),
    "program_scheduling_config_json": Flag(refused=_PROGRAMS),
    **dict.fromkeys(
        (
            *("router_temperature", "kv_penalty_host", "kv_penalty_external", "kv_penalty_disk"),
            *("kv_aware_session_affinity_ttl_secs", "kv_event_source", "kv_event_replay_source"),
            *("kv_event_block_size", "kv_event_model", "pd_kv_events"),
        ),
        Flag(refused="this router reads no KV events"),
    ),
}


def add_flags(parser: argparse.ArgumentParser) -> None:
    """Adds vllm-router's flags; they are in docs/operations.md, not in --help."""
    for name, flag in FLAGS.items():
        settings: dict[str, Any] = {"default": argparse.SUPPRESS, "help": argparse.SUPPRESS}
        if flag.takes == 0:
            settings["action"] = "store_true"
        elif flag.takes == "+":
            settings["nargs"] = "+"
        parser.add_argument(_spelled(name), dest=_PREFIX + name, **settings)


def translate(given: dict[str, Any]) -> tuple[dict[str, Any], list[str]]:
    """Options that vllm-router's flags set, and notes on those without effect.

    Args:
        given: parsed arguments; ours are read, and changed where --vllm-pd-disaggregation gives
            them another meaning.

    Raises:
        ConfigError: a flag cannot be honoured, has a wrong value, or says what another says.
    """
    options: dict[str, Any] = {}
    notes: list[str] = []
    if given.get(_PREFIX + MODE):
        _as_vllm_router(given, notes)
    for name, flag in FLAGS.items():
        if _PREFIX + name not in given:
            continue
        if flag.refused:
            raise ConfigError(f"{_spelled(name)}: {flag.refused}")
        if flag.note:
            notes.append(f"{_spelled(name)} has no effect: {flag.note}")
            continue
        values = given[_PREFIX + name]
        try:
            value = flag.convert(" ".join(values) if isinstance(values, list) else str(values))
        except ValueError as error:
            raise ConfigError(f"{_spelled(name)}: {error}") from error
        if not flag.option:
            continue
        if options.get(flag.option, value) != value or flag.option in given:
            raise ConfigError(f"{_spelled(name)} and {_spelled(flag.option)} set the same option")
        options[flag.option] = value
    return options, notes


def _as_vllm_router(given: dict[str, Any], notes: list[str]) -> None:
    """Flags that both routers have, in vllm-router's meaning."""
    keys = given.pop("api_key", [])
    if keys:
        if len(keys) > 1 or "worker_key" in given:
            raise ConfigError("--api-key is vllm-router's here, one key for all workers")
        given["worker_key"] = keys[0]
    both = given.pop("policy", None)
    if both is not None and "prefill_policy" not in given:
        if both in _PREFILL_POLICIES:
            given["prefill_policy"] = both
        else:
            notes.append(f"--policy {both} holds for decode; the prefill policy is the default")
    if both in ("cache_aware", "prefix_hash"):  # the first is the default there
        notes.append(f"--policy {both} holds for prefill; the decode policy is the default")
    elif both is not None:
        given.setdefault(_PREFIX + "decode_policy", both)
    given.setdefault("prometheus_port", _METRICS_PORT)
    # --prefill URL [BOOTSTRAP_PORT]
    workers = given.get("prefill", [])
    ports = [word for word in workers if word.isdigit()]
    if ports:
        raise ConfigError(
            f"--prefill: bootstrap port {ports[0]} belongs to a push connector, which must know "
            "the decode worker before prefill; use the NIXL connector in pull mode"
        )
    if workers:
        given["prefill"] = [word for word in workers if word.lower() != "none"]


def _spelled(name: str) -> str:
    return "--" + name.replace("_", "-")
