"""The demo's sequence: start, record, fit, replay once per policy, check, report."""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from eldr.demo import checks, plots, report
from eldr.demo.commands import eldr, run, split_prompts, vllm_version
from eldr.demo.config import DemoConfig
from eldr.demo.console import Console
from eldr.demo.http import get_json, post_json
from eldr.demo.load import DemoRequest, replay
from eldr.demo.measure import DecodeCounters, PolicyResult, policy_result
from eldr.demo.ports import free_ports
from eldr.demo.processes import Child, Supervisor
from eldr.demo.workers import ENGINE_ENV, router_command, worker_command, worker_env
from eldr.workload.tiny import GEOMETRY, MODEL_DIR, PROMPT_DIR, load_prompts

# Policies that choose by signature need the fitted partition.
_NEEDS_PARTITION = frozenset({"locality_band"})
_ROUTER_START = 120.0  # seconds
_DECODE_NICENESS = 10


@dataclass(frozen=True, slots=True)
class Fleet:
    """The running workers of one demo."""

    prefill: Child
    decode: tuple[Child, ...]

    @property
    def decode_urls(self) -> list[str]:
        """URLs of the decode workers, in the partition's order."""
        return [child.url for child in self.decode]


def run_demo(config: DemoConfig, console: Console) -> dict[str, Any]:
    """Runs everything and returns the object written to summary.json.

    Raises:
        ProcessFailed: a worker or the router died or did not come up.
        RuntimeError: a request failed or a measurement is missing.
    """
    config.out.mkdir(parents=True, exist_ok=True)
    requests = make_requests(config)
    with Supervisor(config.out / "logs", console) as supervisor:
        fleet = _start_workers(config, supervisor, console)
        partition = _fit(config, fleet, console)
        outputs = _check_outputs(config, supervisor, fleet, console)
        results = [
            _replay_policy(config, policy, partition, requests, supervisor, fleet, console)
            for policy in config.policies
        ]
        recomputed = checks.recomputed_prompt_tokens(fleet.decode_urls)
        transferred = checks.transferred_prompt_tokens(fleet.decode_urls)
    compared, mismatching = _check_signatures(config, console)
    found = {
        "outputs_equal": not outputs.different,
        "outputs_compared": outputs.compared,
        "prompt_tokens_recomputed": recomputed,
        "prompt_tokens_transferred": transferred,
        "signatures_compared": compared,
        "signature_mismatches": mismatching,
    }
    return _write_report(config, requests, results, found, console)


def page_path(config: DemoConfig, policy: str) -> Path:
    """Where a policy's operator page is written."""
    return config.out / f"operator-{policy}.html"


def make_requests(config: DemoConfig) -> list[DemoRequest]:
    """The held-out requests in a fixed shuffled order with fixed decode lengths.

    Raises:
        ValueError: more requests than held-out prompts.
    """
    prompts = load_prompts("serving")
    if config.requests > len(prompts):
        raise ValueError(f"{config.requests} requests asked, {len(prompts)} held-out prompts exist")
    rng = np.random.default_rng(config.seed)
    order = rng.permutation(len(prompts))[: config.requests]
    lengths = rng.integers(config.min_tokens, config.max_tokens + 1, config.requests)
    return [
        DemoRequest(i, prompts[p].prompt, prompts[p].domain, int(n), config.seed + i)
        for i, (p, n) in enumerate(zip(order, lengths, strict=True))
    ]


def _start_workers(config: DemoConfig, supervisor: Supervisor, console: Console) -> Fleet:
    count = 1 + config.decode_workers
    ports, side_channels = free_ports(count), free_ports(count)
    names = ["prefill", *(f"decode-{i}" for i in range(config.decode_workers))]
    console.say(f"starting {count} vLLM workers on this machine's CPU; logs in {config.out}/logs")
    children = [
        supervisor.start(
            name,
            worker_command("prefill" if name == "prefill" else "decode", port, MODEL_DIR),
            f"http://127.0.0.1:{port}",
            worker_env(side),
            # A prefill GPU does not wait for decode GPUs. Here all share a few cores, and decode
            # workers that compete with prefill starve themselves of requests to batch.
            niceness=0 if name == "prefill" else _DECODE_NICENESS,
        )
        for name, port, side in zip(names, ports, side_channels, strict=True)
    ]
    supervisor.wait_healthy(children, config.start_timeout)
    fleet = Fleet(children[0], tuple(children[1:]))
    console.say(f"{count} workers up, serving {MODEL_DIR.name}: {GEOMETRY}")
    return fleet


def _fit(config: DemoConfig, fleet: Fleet, console: Console) -> Path:
    """Records the calibration prompts' signatures and fits one centroid per decode worker."""
    recorded, partition = config.out / "calibration.npz", config.out / "partition.safetensors"
    eldr(
        "record", "--prefill", fleet.prefill.url, *split_prompts("calibration"), "-o", str(recorded)
    )
    fitted = eldr("fit", str(recorded), "--workers", str(len(fleet.decode)), "-o", str(partition))
    console.say(
        f"recorded {len(load_prompts('calibration'))} calibration signatures and fitted "
        f"{len(fleet.decode)} balanced centroids ({json.dumps(fitted)[:80]})"
    )
    # Also from the running prefill worker: compared at the end with vLLM's own capture.
    eldr(
        *("record", "--prefill", fleet.prefill.url, *split_prompts("reference")),
        *("-o", str(config.out / "reference-recorded.npz")),
    )
    return partition


def _check_outputs(
    config: DemoConfig, supervisor: Supervisor, fleet: Fleet, console: Console
) -> checks.OutputCheck:
    """Round robin visits every decode worker, so this also makes each NIXL handshake."""
    prompts = [p.prompt for p in load_prompts("reference")][: config.output_checks]
    router = _start_router(config, "outputs", "round_robin", None, supervisor, fleet)
    outputs = checks.compare_outputs(
        router.url,
        fleet.prefill.url,
        prompts,
        lambda n: console.progress(f"comparing outputs: {n} of {len(prompts)}"),
    )
    supervisor.stop(router)
    console.say(
        f"{outputs.compared - len(outputs.different)} of {outputs.compared} greedy outputs equal "
        "to undisaggregated serving"
    )
    return outputs


def _replay_policy(
    config: DemoConfig,
    policy: str,
    partition: Path,
    requests: Sequence[DemoRequest],
    supervisor: Supervisor,
    fleet: Fleet,
    console: Console,
) -> PolicyResult:
    for child in (fleet.prefill, *fleet.decode):
        post_json(f"{child.url}/reset_prefix_cache")
    log = config.out / f"decisions-{policy}.jsonl"
    log.unlink(missing_ok=True)  # of an earlier run
    router = _start_router(config, policy, policy, partition, supervisor, fleet, log)
    before = _decode_counters(fleet)

    def progress(done: int) -> None:
        console.progress(f"{policy}: {done} of {len(requests)} requests")
        for child in (router, fleet.prefill, *fleet.decode):
            supervisor.check_alive(child)

    timings = asyncio.run(replay(router.url, requests, config.concurrency, policy, progress))
    after = _decode_counters(fleet)
    decisions = get_json(f"{router.url}/eldr/decisions?limit={len(requests)}")["decisions"]
    supervisor.stop(router)
    eldr("report", str(log), "-o", str(page_path(config, policy)))
    deltas = [late.since(early) for late, early in zip(after, before, strict=True)]
    result = policy_result(policy, deltas, timings, decisions)
    console.say(
        f"{policy}: {len(timings)} requests in {result.wall_seconds:.0f} s, "
        f"{result.distinct_per_step:.2f} distinct experts per decode step"
    )
    return result


def _start_router(
    config: DemoConfig,
    name: str,
    policy: str,
    partition: Path | None,
    supervisor: Supervisor,
    fleet: Fleet,
    log: Path | None = None,
) -> Child:
    (port,) = free_ports(1)
    local = policy in _NEEDS_PARTITION
    command = router_command(
        port,
        fleet.prefill.url,
        fleet.decode_urls,
        policy,
        partition if local else None,
        config.tau if local else None,
        log,
    )
    router = supervisor.start(f"router-{name}", command, f"http://127.0.0.1:{port}")
    supervisor.wait_healthy([router], _ROUTER_START)
    return router


def _decode_counters(fleet: Fleet) -> list[DecodeCounters]:
    return [DecodeCounters.parse(get_json(f"{url}/eldr/decode")) for url in fleet.decode_urls]


def _check_signatures(config: DemoConfig, console: Console) -> tuple[int, int]:
    """Against a second engine that runs vLLM's own routed-experts capture on the same prompts."""
    console.progress("computing reference signatures with vLLM's own routed-experts capture")
    reference = config.out / "reference-vllm.npz"
    run(
        [
            *(sys.executable, "-m", "eldr.engine.reference", str(MODEL_DIR)),
            *(str(PROMPT_DIR / "reference.jsonl"), str(reference)),
        ],
        ENGINE_ENV,
    )
    compared, wrong = checks.signature_mismatches(config.out / "reference-recorded.npz", reference)
    console.say(f"{compared - wrong} of {compared} signatures equal to vLLM's own routed experts")
    return compared, wrong


def _write_report(
    config: DemoConfig,
    requests: Sequence[DemoRequest],
    results: Sequence[PolicyResult],
    found: dict[str, Any],
    console: Console,
) -> dict[str, Any]:
    summary = report.summary(GEOMETRY, vllm_version(), len(requests), results, found)
    summary["conclusion"] = report.conclusion(results, found)
    report.write_json(config.out / "summary.json", summary)
    plots.plot_distinct(results, GEOMETRY.experts, config.out / "distinct.png")
    plots.plot_heat_map(results, GEOMETRY.layers - 1, config.out / "heatmap.png")
    console.say(f"wrote {config.out}/summary.json, distinct.png and heatmap.png")
    console.say(f"operator page of the last policy: {page_path(config, config.policies[-1])}")
    return {**summary, "table": report.table(results)}
