"""vllm-router's flags: taken over, without effect, or refused; none is unknown."""

from __future__ import annotations

import argparse
import re
import shlex

import pytest

from eldr.serving.config import ConfigError, options
from eldr.serving.dropin import FLAGS
from eldr.serving.options import Resolved, add_options, resolve

WORKERS = "--prefill http://p:1 --decode http://d:2"
# Flags of vllm-router 0.1.17.
THEIRS = re.findall(
    r"\S+",
    """
host port worker-urls enable-program-scheduling program-scheduling-config-json policy
prefill-policy decode-policy router-temperature kv-penalty-host kv-penalty-external
kv-penalty-disk kv-aware-session-affinity-ttl-secs kv-event-source kv-event-replay-source
kv-event-block-size kv-event-model pd-kv-events mini-lb vllm-pd-disaggregation prefill decode
worker-startup-timeout-secs worker-startup-check-interval cache-threshold balance-abs-threshold
balance-rel-threshold eviction-interval-secs max-tree-size max-payload-size wasm-middleware
wasm-middleware-sha256 wasm-middleware-route intra-node-data-parallel-size enable-igw api-key
log-dir log-level service-discovery selector service-discovery-port service-discovery-namespace
prefill-selector decode-selector vllm-discovery-address kv-connector prometheus-port
prometheus-host request-id-headers request-timeout-secs retry-max-retries
retry-initial-backoff-ms retry-max-backoff-ms retry-backoff-multiplier retry-jitter-factor
disable-retries cb-failure-threshold cb-success-threshold cb-timeout-duration-secs
cb-window-duration-secs disable-circuit-breaker health-failure-threshold
health-success-threshold health-check-timeout-secs health-check-interval-secs
health-check-endpoint max-concurrent-requests queue-size queue-timeout-secs
rate-limit-tokens-per-second cors-allowed-origins
""",
)


def given(line: str) -> Resolved:
    parser = argparse.ArgumentParser()
    add_options(parser)
    return resolve(parser.parse_args(shlex.split(line)), {})


@pytest.mark.parametrize("flag", THEIRS)
def test_every_flag_is_known(flag: str) -> None:
    name = flag.replace("-", "_")
    assert (name in FLAGS) != (name in options())


def test_t07_flags_alone_decide_the_mode_with_a_whole_command_line_of_theirs() -> None:
    got = given(
        "--vllm-pd-disaggregation --prefill http://p:1 none --prefill http://q:1 "
        "--decode http://d:2 --decode http://e:2 --policy power_of_two "
        "--prefill-policy cache_aware "
        "--api-key secret --request-timeout-secs 600 --retry-max-retries 3 "
        "--retry-initial-backoff-ms 50 --retry-max-backoff-ms 3000 --retry-backoff-multiplier 1.5 "
        "--cb-failure-threshold 10 --cb-timeout-duration-secs 60 --health-check-interval-secs 30 "
        "--health-check-timeout-secs 4 --health-failure-threshold 2 --max-payload-size 1000000 "
        "--max-concurrent-requests 99 --queue-size 7 --queue-timeout-secs 8 "
        "--intra-node-data-parallel-size 2 --worker-startup-timeout-secs 900 --kv-connector nixl "
        "--health-check-endpoint /health --request-id-headers x-request-id --log-level warning"
    )
    expected = {
        "prefill": ("http://p:1", "http://q:1"),
        "decode": ("http://d:2", "http://e:2"),
        "policy": "power_of_two",
        "prefill_policy": "cache_aware",
        "worker_key": "secret",
        "api_key": (),
        "request_timeout": 600.0,
        "attempts": 3,
        "retry_pause": 0.05,
        "retry_longest_pause": 3.0,
        "retry_growth": 1.5,
        "eject_failures": 10,
        "eject_seconds": 60.0,
        "health_interval": 30.0,
        "health_timeout": 4.0,
        "health_failures": 2,
        "max_body": 1_000_000,
        "max_concurrent": 99,
        "queue_size": 7,
        "queue_timeout": 8.0,
        "decode_ranks": 2,
        "startup_timeout": 900.0,
        "prometheus_port": 29000,
    }
    assert {name: getattr(got.config, name) for name in expected} == expected
    assert not got.notes
    assert got.origins["attempts"] == "flag"


@pytest.mark.parametrize(
    ("policy", "decode", "prefill"),
    [
        ("round_robin", "round_robin", "round_robin"),
        ("consistent_hash", "session", "prefix_hash"),
        ("cache_aware", "auto", "cache_aware"),
        ("random", "random", "prefix_hash"),
    ],
)
def test_one_policy_for_both_roles(policy: str, decode: str, prefill: str) -> None:
    got = given(f"--vllm-pd-disaggregation {WORKERS} --policy {policy}")
    assert (got.config.policy, got.config.prefill_policy) == (decode, prefill)
    assert bool(got.notes) == (policy != "round_robin")


def test_flags_of_both_keep_our_meaning_in_our_command_line() -> None:
    got = given(f"{WORKERS} --api-key client --policy random")
    assert (got.config.api_key, got.config.worker_key) == (("client",), "")
    assert got.config.prometheus_port == 0


def test_kubernetes_selectors() -> None:
    got = given(
        "--service-discovery --prefill-selector app=m role=prefill --decode-selector app=m "
        "--service-discovery-port 9000 --service-discovery-namespace prod"
    )
    config = got.config
    assert (config.k8s_prefill, config.k8s_decode) == ("app=m,role=prefill", "app=m")
    assert (config.k8s_port, config.k8s_namespace) == (9000, "prod")


def test_tuning_that_works_otherwise_is_noted() -> None:
    got = given(f"{WORKERS} --retry-jitter-factor 0.2 --cache-threshold 0.5")
    assert [note.split(" has no effect: ")[0] for note in got.notes] == [
        "--retry-jitter-factor",
        "--cache-threshold",
    ]


@pytest.mark.parametrize(
    ("line", "says"),
    [
        ("--worker-urls http://w:1", "--worker-urls: this router serves prefill and decode"),
        ("--kv-connector mooncake", "--kv-connector: 'mooncake' is not supported: push"),
        ("--decode-policy kv_aware", "--decode-policy: 'kv_aware' is not supported for decode"),
        ("--health-check-endpoint /ping", "workers are asked at /health"),
        ("--rate-limit-tokens-per-second 5", "no token bucket"),
        ("--retry-max-retries many", "--retry-max-retries: invalid literal"),
        ("--attempts 3 --retry-max-retries 4", "set the same option"),
        ("--disable-retries --retry-max-retries 4", "set the same option"),
        ("--policy random --decode-policy session", "set the same option"),
        ("--vllm-pd-disaggregation --prefill http://q:1 9000", "bootstrap port 9000"),
        ("--vllm-pd-disaggregation --api-key a --worker-key b", "one key for all workers"),
    ],
)
def test_what_cannot_be_honoured_is_refused_with_a_sentence(line: str, says: str) -> None:
    with pytest.raises(ConfigError) as refused:
        given(f"{WORKERS} {line}")
    assert says in str(refused.value)
