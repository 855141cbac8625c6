"""The demo's sequence: start, record, fit, replay once per policy, check, report."""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import numpy as np

from eldr.demo import checks, plots, report
from eldr.demo.commands import eldr, run, split_prompts, vllm_version
from eldr.demo.config import DemoConfig
from eldr.demo.console import Console
from eldr.demo.fleet import RECOMPUTED, TRANSFERRED, Fleet, process_fleet
from eldr.demo.http import get_json
from eldr.demo.load import DemoRequest, replay
from eldr.demo.measure import PolicyResult, policy_result
from eldr.demo.processes import Supervisor
from eldr.demo.workers import ENGINE_ENV
from eldr.workload.tiny import GEOMETRY, MODEL_DIR, PROMPT_DIR, load_prompts

# Policies that choose by signature need the fitted partition.
_NEEDS_PARTITION = frozenset({"locality_band"})

OpenFleet = Callable[[DemoConfig, Supervisor, Console], AbstractContextManager[Fleet]]


def run_demo(
    config: DemoConfig, console: Console, open_fleet: OpenFleet = process_fleet
) -> dict[str, Any]:
    """Runs everything and returns the object written to summary.json, with the table.

    Args:
        config: sizes and paths.
        console: for the steps and their progress.
        open_fleet: starts engines and whatever routes to them.

    Raises:
        ProcessFailed: a worker or the router died or did not come up.
        RuntimeError: a request failed or a measurement is missing.
    """
    config.out.mkdir(parents=True, exist_ok=True)
    requests = make_requests(config)
    with (
        Supervisor(config.out / "logs", console) as supervisor,
        open_fleet(config, supervisor, console) as fleet,
    ):
        console.say(f"{1 + config.decode_workers} engines serve {MODEL_DIR.name}: {GEOMETRY}")
        partition = _fit(config, fleet, console)
        outputs = _check_outputs(config, fleet, console)
        results = [
            _replay_policy(config, policy, partition, requests, fleet, console)
            for policy in config.policies
        ]
        recomputed = fleet.prompt_tokens(RECOMPUTED)
        transferred = fleet.prompt_tokens(TRANSFERRED)
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


def _fit(config: DemoConfig, fleet: Fleet, console: Console) -> Path:
    """Records the calibration prompts' signatures and fits one centroid per decode worker."""
    recorded, partition = config.out / "calibration.npz", config.out / "partition.safetensors"
    console.progress("recording calibration signatures")
    eldr("record", "--prefill", fleet.prefill, *split_prompts("calibration"), "-o", str(recorded))
    count = str(config.decode_workers)
    fitted = eldr("fit", str(recorded), "--workers", count, "-o", str(partition))
    console.say(
        f"recorded {len(load_prompts('calibration'))} calibration signatures and fitted "
        f"{count} balanced centroids ({json.dumps(fitted)[:80]})"
    )
    # Also from the running prefill worker: compared at the end with vLLM's own capture.
    eldr(
        *("record", "--prefill", fleet.prefill, *split_prompts("reference")),
        *("-o", str(config.out / "reference-recorded.npz")),
    )
    return partition


def _check_outputs(config: DemoConfig, fleet: Fleet, console: Console) -> checks.OutputCheck:
    """Round robin visits every decode worker, so this also makes each NIXL handshake."""
    prompts = [p.prompt for p in load_prompts("reference")][: config.output_checks]
    with fleet.route("outputs", "round_robin", None) as url:
        outputs = checks.compare_outputs(
            url,
            fleet.prefill,
            prompts,
            lambda n: console.progress(f"comparing outputs: {n} of {len(prompts)}"),
        )
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
    fleet: Fleet,
    console: Console,
) -> PolicyResult:
    def progress(done: int) -> None:
        console.progress(f"{policy}: {done} of {len(requests)} requests")
        fleet.check_alive()

    with fleet.route(policy, policy, partition if policy in _NEEDS_PARTITION else None) as url:
        fleet.reset_prefix_caches()
        before = fleet.counters()
        timings = asyncio.run(replay(url, requests, config.concurrency, policy, progress))
        after = fleet.counters()
        decisions = get_json(f"{url}/eldr/decisions?limit={len(requests)}")["decisions"]
    deltas = [late.since(early) for late, early in zip(after, before, strict=True)]
    result = policy_result(policy, deltas, timings, decisions)
    console.say(
        f"{policy}: {len(timings)} requests in {result.wall_seconds:.0f} s, "
        f"{result.distinct_per_step:.2f} distinct experts per decode step"
    )
    return result


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
    pages = sorted(path.name for path in config.out.glob("operator-*.html"))
    if pages:
        console.say(f"operator pages of the routers: {', '.join(pages)} in {config.out}")
    return {**summary, "table": report.table(results)}
