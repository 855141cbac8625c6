"""What the engine hook costs a decode step: its share of the step's CPU time.

    python -m benchmarks.decode_overhead --batch 16 --json

A real engine (the bundled model, model runner V1, one process, one thread) decodes with a fixed
batch. Every call of the hook is timed inside the steps it belongs to, the capture of the ids
in every MoE layer included. The stopwatch costs as much as most of the calls, so what it reads for
calls that do nothing, at the same places of the same engine's steps, is taken off. Three kinds of
steps take turns: with the hook, with calls that do nothing in its place, and bare. `share` = all of
the hook's time / all of the bare steps' time, so that what is done only every so many steps
counts too. Times are the process's CPU time, so that other processes do not count (but what they
leave in the caches does). On a CPU the hook's device work is host time as well.

`--width 4096` widens the experts with zero-weight units, as `benchmarks.cpu_tpot` does: a step that
reading experts dominates, which is what ELDR is for. `--and-width 4096` measures that too, in a
process of its own, and adds it as `wide`.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks.machine import cpu_name
from eldr.engine.testing import inprocess
from eldr.engine.worker import PendingStep
from eldr.workload.tiny import MODEL_DIR

# Of the worker's hook, the scheduler's, and a pending step.
_CALLS = (
    ("after_forward", "take_pending"),
    ("build_metadata", "receive"),
    ("enqueue_copy", "result"),
)


class Stopwatch:
    """Adds up the CPU time of wrapped calls, nothing else."""

    def __init__(self) -> None:
        self.seconds: Counter[str] = Counter()
        self.calls: Counter[str] = Counter()

    def wrapped(self, name: str, call: Callable[..., Any]) -> Callable[..., Any]:
        clock, seconds, calls = time.process_time_ns, self.seconds, self.calls

        def timed(*args: Any) -> Any:
            begin = clock()
            result = call(*args)
            seconds[name] += clock() - begin
            calls[name] += 1
            return result

        return timed

    def wrap(self, owner: Any, name: str) -> None:
        setattr(owner, name, self.wrapped(name, getattr(owner, name)))

    def clear(self) -> None:
        self.seconds.clear()
        self.calls.clear()


class Nothing:
    """A hook that does nothing, at the places of the real one."""

    def __init__(self, watch: Stopwatch) -> None:
        for name in ("build_metadata", "receive", "after_forward", "enqueue_copy", "result"):
            setattr(self, name, watch.wrapped(name, lambda *args: None))
        self.take_pending = watch.wrapped("take_pending", lambda *args: self)
        self.capture = watch.wrapped("capture", lambda *args: None)

    @staticmethod
    def finish(request: Any, kv_transfer_params: Any) -> Any:
        return kv_transfer_params


class Engine:
    """A real engine whose hook can be left out of a step."""

    def __init__(self, model: str, batch: int, role: str) -> None:
        self.llm = inprocess.start(
            model, max_num_seqs=batch, additional_config={"eldr": {"role": role}}
        )
        self.watches = {"hook": Stopwatch(), "nothing": Stopwatch()}
        self._runner = inprocess.worker(self.llm).model_runner
        self._scheduler = inprocess.scheduler(self.llm)
        watch = self.watches["hook"]
        hooks: tuple[Any, Any] = (self._runner.eldr, self._scheduler.eldr)
        for owner, names in zip([*hooks, PendingStep], _CALLS, strict=True):
            for name in names:
                watch.wrap(owner, name)
        nothing = Nothing(self.watches["nothing"])
        routers = [
            module.router
            for module in self._runner.model.modules()
            if getattr(getattr(module, "router", None), "capture_fn", None) is not None
        ]
        real = [watch.wrapped("capture", router.capture_fn) for router in routers]
        self._kinds: dict[str, tuple[tuple[Any, Any], list[Any]]] = {
            "hook": (hooks, real),
            "nothing": ((nothing, nothing), [nothing.capture] * len(routers)),
            "bare": ((None, None), [None] * len(routers)),
        }
        self._routers = routers

    def fill(self, batch: int, tokens: int) -> None:
        """Starts `batch` requests and runs their prompts."""
        from vllm import SamplingParams

        params = SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True)
        for index in range(batch):
            prompt = {"prompt_token_ids": [7 + index, 11, 13, 17]}
            self.llm.llm_engine.add_request(f"r{index}", prompt, params)
        for _ in range(5):
            self.llm.llm_engine.step()
        for watch in self.watches.values():
            watch.clear()

    def step_us(self, kind: str) -> float:
        """Runs one step; its CPU time."""
        (self._runner.eldr, self._scheduler.eldr), captures = self._kinds[kind]
        for router, capture in zip(self._routers, captures, strict=True):
            router.capture_fn = capture
        begin = time.process_time_ns()
        self.llm.llm_engine.step()
        return (time.process_time_ns() - begin) / 1e3


def measure(model: str, batch: int, steps: int, role: str) -> dict[str, Any]:
    """The hook's time per decode step of `batch` requests, by call, and the step's."""
    engine = Engine(model, batch, role)
    engine.fill(batch, 3 * steps + 20)
    taken: dict[str, list[float]] = {"hook": [], "nothing": [], "bare": []}
    for _ in range(steps):
        for kind, found in taken.items():
            found.append(engine.step_us(kind))
    real, empty = (engine.watches[kind].seconds for kind in ("hook", "nothing"))
    calls = {name: (spent - empty[name]) / 1e3 / steps for name, spent in real.items()}
    hook, step = sum(calls.values()), statistics.fmean(taken["bare"])
    return {
        "role": role,
        "batch": batch,
        "steps": steps,
        "hook_us": hook,
        "hook_us_by_call": {name: round(us, 2) for name, us in calls.items()},
        "stopwatch_us": sum(empty.values()) / 1e3 / steps,
        "step_us": step,
        "step_us_median": {kind: statistics.median(us) for kind, us in taken.items()},
        "share": hook / step,
    }


def conditions() -> dict[str, Any]:
    """Where, when and under what load the figures came about."""
    return {
        "machine": {"cpu": cpu_name(), "cores": os.cpu_count(), "load": os.getloadavg()[0]},
        "date": datetime.date.today().isoformat(),
        "command": "python -m benchmarks.decode_overhead " + " ".join(sys.argv[1:]),
    }


def wide(args: argparse.Namespace) -> dict[str, Any]:
    """The same with wider experts; fewer steps, as they take several times as long."""
    options = {"batch": args.batch, "steps": args.steps // 4, "role": args.role}
    words = [word for name, value in options.items() for word in (f"--{name}", str(value))]
    command = [sys.executable, "-m", "benchmarks.decode_overhead", *words, "--json"]
    command += ["--width", str(args.and_width)]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
    found: dict[str, Any] = json.loads(done.stdout.strip().splitlines()[-1])
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--role", choices=("decode", "both"), default="decode")
    parser.add_argument("--width", type=int, help="units of an expert; default: the model's own")
    parser.add_argument("--and-width", type=int, help="measure this width as well")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    args = parser.parse_args()
    os.environ.setdefault("VLLM_LOGGING_STREAM", "ext://sys.stderr")  # stdout is the report's
    with tempfile.TemporaryDirectory() as folder:
        model = MODEL_DIR
        if args.width is not None:
            from eldr.workload.widen import widen_experts

            model = widen_experts(MODEL_DIR, Path(folder) / "wide", args.width).path
        found = {**measure(str(model), args.batch, args.steps, args.role), **conditions()}
    if args.and_width is not None:
        found["wide"] = wide(args)
    print(json.dumps(found) if args.json else "\n".join(f"{k}: {v}" for k, v in found.items()))
    return 0


if __name__ == "__main__":
    sys.exit(main())
