"""`make demo-ray`: the demo through Ray Serve instead of `eldr serve`.

    python -m eldr.demo.ray_run [--requests 120] [--policies A,B] [--out DIR]

The same engines, prompts, checks and figures as `eldr demo`; the application is one Ray with a
proxy, a prefill pool and a decode pool. A policy is changed by deploying the application again,
which replaces the proxy and leaves the engines running.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from eldr.demo import checks, report
from eldr.demo.commands import eldr, split_prompts, vllm_version
from eldr.demo.config import DemoConfig
from eldr.demo.console import Console
from eldr.demo.http import get_json, post_json, samples
from eldr.demo.load import DemoRequest, replay
from eldr.demo.measure import DecodeCounters, PolicyResult, policy_result
from eldr.demo.ports import free_ports
from eldr.demo.processes import Child, ProcessFailed, Supervisor
from eldr.demo.ray_workers import application, serve_command
from eldr.demo.run import make_requests
from eldr.workload.tiny import GEOMETRY, load_prompts

_POLICIES = "least_requests,locality_band,marginal_cost"
_STOP = 120.0  # seconds; Serve lets engines drain
_SOURCES = "vllm:prompt_tokens_by_source_total"


class RayApplication:
    """The running application and the file it is configured by."""

    def __init__(self, config: DemoConfig, supervisor: Supervisor, console: Console) -> None:
        self._config, self._supervisor, self._console = config, supervisor, console
        self._file = config.out / "ray-app.json"
        self._write("round_robin", None)
        # Ray's socket paths may have 107 bytes: not below the output folder.
        self._temp = Path(tempfile.mkdtemp(prefix="eldr-ray-"))
        (port,) = free_ports(1)
        self.url = f"http://127.0.0.1:{port}"
        command = serve_command(self._file, port, self._temp)
        self.child: Child = supervisor.start("ray", command, self.url)
        self._deployed = 0

    def _write(self, policy: str, partition: Path | None) -> None:
        config = self._config
        values = application(config.decode_workers, policy, partition, config.tau)
        self._file.write_text(json.dumps(values, indent=1))

    def wait(self) -> None:
        """Until the configuration as it is now is deployed."""
        self._deployed += 1
        end = time.monotonic() + self._config.start_timeout
        while self.child.log.read_bytes().count(b'{"ready"') < self._deployed:
            self._supervisor.check_alive(self.child)
            if time.monotonic() > end:
                raise ProcessFailed(f"ray: not ready in time, see {self.child.log}")
            self._console.progress("waiting for Ray Serve")
            time.sleep(0.5)

    def use(self, policy: str, partition: Path | None) -> None:
        """Deploys another policy; the engines go on."""
        self._write(policy, partition)
        self.child.process.send_signal(signal.SIGHUP)
        self.wait()

    def every(self, pool: str, path: str, *, post: bool = False) -> list[dict[str, Any]]:
        """All replicas' answers, by rank."""
        url = f"{self.url}/eldr/every/{pool}{path}"
        rows: list[dict[str, Any]] = post_json(url) if post else get_json(url)
        bad = [row for row in rows if row.get("status") != 200]
        if bad:
            raise RuntimeError(f"{url}: {bad[0]}")
        return sorted(rows, key=lambda row: int(row["rank"]))

    def counters(self) -> list[DecodeCounters]:
        """The decode replicas' counters."""
        rows = self.every("decode", "/eldr/decode")
        return [DecodeCounters.parse(json.loads(row["body"])) for row in rows]

    def prompt_tokens(self, source: str) -> int:
        """Prompt tokens that the decode replicas got from a source."""
        texts = [row["body"] for row in self.every("decode", "/metrics")]
        return int(sum(samples(text, _SOURCES, source=source) for text in texts))

    def stop(self) -> None:
        """Serve and Ray first, in their own order; what is left then goes with its session."""
        self.child.process.terminate()
        try:
            self.child.process.wait(_STOP)
        finally:
            self._supervisor.stop(self.child)
            shutil.rmtree(self._temp, ignore_errors=True)


def run(config: DemoConfig, console: Console) -> dict[str, Any]:
    """Runs everything and returns the object written to summary.json.

    Raises:
        ProcessFailed: Ray or an engine did not come up.
        RuntimeError: a request failed or a measurement is missing.
    """
    config.out.mkdir(parents=True, exist_ok=True)
    requests = make_requests(config)
    with Supervisor(config.out / "logs", console) as supervisor:
        console.say("starting Ray with one prefill and several decode engines on this CPU")
        app = RayApplication(config, supervisor, console)
        try:
            app.wait()
            console.say(f"application up on {app.url}: {GEOMETRY}")
            partition = _fit(config, app, console)
            found = _check_outputs(config, app, console)
            results = [_replay(config, policy, partition, requests, app, console)
                       for policy in config.policies]  # fmt: skip
            found["prompt_tokens_recomputed"] = app.prompt_tokens("local_compute")
            found["prompt_tokens_transferred"] = app.prompt_tokens("external_kv_transfer")
        finally:
            app.stop()
    summary = report.summary(GEOMETRY, vllm_version(), len(requests), results, found)
    summary["conclusion"] = report.conclusion(results, found)
    report.write_json(config.out / "summary.json", summary)
    return {**summary, "table": report.table(results)}


def _fit(config: DemoConfig, app: RayApplication, console: Console) -> Path:
    recorded, partition = config.out / "calibration.npz", config.out / "partition.safetensors"
    prefill, prompts = f"{app.url}/eldr/prefill", split_prompts("calibration")
    eldr("record", "--prefill", prefill, *prompts, "-o", str(recorded))
    count = str(config.decode_workers)
    eldr("fit", str(recorded), "--workers", count, "-o", str(partition))
    console.say(f"recorded calibration signatures through the proxy and fitted {count} centroids")
    return partition


def _check_outputs(config: DemoConfig, app: RayApplication, console: Console) -> dict[str, Any]:
    prompts = [p.prompt for p in load_prompts("reference")][: config.output_checks]
    outputs = checks.compare_outputs(
        app.url,
        f"{app.url}/eldr/prefill",
        prompts,
        lambda n: console.progress(f"comparing outputs: {n} of {len(prompts)}"),
    )
    same = outputs.compared - len(outputs.different)
    console.say(f"{same} of {outputs.compared} greedy outputs equal to undisaggregated serving")
    return {"outputs_equal": not outputs.different, "outputs_compared": outputs.compared}


def _replay(
    config: DemoConfig,
    policy: str,
    partition: Path,
    requests: Sequence[DemoRequest],
    app: RayApplication,
    console: Console,
) -> PolicyResult:
    app.use(policy, partition if policy == "locality_band" else None)
    for pool in ("prefill", "decode"):
        app.every(pool, "/reset_prefix_cache", post=True)
    before = app.counters()
    timings = asyncio.run(
        replay(
            app.url,
            requests,
            config.concurrency,
            policy,
            lambda done: console.progress(f"{policy}: {done} of {len(requests)} requests"),
        )
    )
    after = app.counters()
    decisions = get_json(f"{app.url}/eldr/decisions")["decisions"]
    deltas = [late.since(early) for late, early in zip(after, before, strict=True)]
    result = policy_result(policy, deltas, timings, decisions)
    console.say(
        f"{policy}: {len(timings)} requests in {result.wall_seconds:.0f} s, "
        f"{result.distinct_per_step:.2f} distinct experts per decode step"
    )
    return result


def main(argv: Sequence[str] | None = None) -> int:
    """0 done, 1 a check or a process failed, 2 usage."""
    parser = argparse.ArgumentParser(prog="python -m eldr.demo.ray_run", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--out", type=Path, default=Path("demo-out/ray"), help="output folder")
    parser.add_argument("--requests", type=int, default=120, help="requests per policy")
    parser.add_argument("--concurrency", type=int, default=48, help="requests in flight")
    parser.add_argument("--decode", type=int, default=3, help="decode replicas")
    parser.add_argument("--policies", default=_POLICIES, help="comma-separated, in order")
    parser.add_argument("--json", action="store_true", help="print summary.json, not a table")
    args = parser.parse_args(argv)
    try:
        config = DemoConfig(
            out=args.out,
            requests=args.requests,
            concurrency=args.concurrency,
            decode_workers=args.decode,
            policies=tuple(args.policies.split(",")),
        )
    except ValueError as error:
        print(f"demo-ray: {error}", file=sys.stderr)
        return 2
    console = Console()
    try:
        result = run(config, console)
    except (ProcessFailed, RuntimeError, ValueError, OSError) as error:
        console.say(f"failed: {error}")
        return 1
    table, held = result.pop("table"), result["checks"]
    print(json.dumps(result) if args.json else f"\n{table}\n\n{result['conclusion']}")
    right = held["outputs_equal"] and held["prompt_tokens_recomputed"] == 0
    return 0 if right and held["prompt_tokens_transferred"] > 0 else 1


if __name__ == "__main__":
    sys.exit(main())
