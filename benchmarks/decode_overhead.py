"""What the engine hook costs a decode step: its share of the step's CPU time.

    python -m benchmarks.decode_overhead --json

A real engine (the bundled model, model runner V1, one process, one thread) decodes with a fixed
batch; every call of the hook is timed inside the steps it belongs to. Times are the process's CPU
time, so that other processes do not count. On a CPU the hook's device work is host time as well.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import statistics
import sys
import time
from collections import Counter
from typing import Any

from benchmarks.nvtx import cpu_model
from eldr.engine.testing import inprocess
from eldr.engine.worker import PendingStep
from eldr.workload.tiny import MODEL_DIR

_CALLS = {"scheduler": ("build_metadata", "receive"), "worker": ("after_forward", "take_pending")}


class Stopwatch:
    """Adds up the time of wrapped calls."""

    def __init__(self) -> None:
        self.seconds = 0.0
        self.by_call: Counter[str] = Counter()

    def wrap(self, owner: Any, name: str) -> None:
        call = getattr(owner, name)

        def timed(*args: Any) -> Any:
            begin = time.process_time()
            result = call(*args)
            spent = time.process_time() - begin
            self.seconds += spent
            self.by_call[name] += spent
            return result

        setattr(owner, name, timed)


def measure(batch: int, steps: int, role: str) -> dict[str, Any]:
    """Median share of the hook in a decode step of `batch` requests, and both times."""
    from vllm import SamplingParams

    llm = inprocess.start(
        str(MODEL_DIR), max_num_seqs=batch, additional_config={"eldr": {"role": role}}
    )
    watch = Stopwatch()
    owners = {
        "scheduler": inprocess.scheduler(llm).eldr,
        "worker": inprocess.worker(llm).model_runner.eldr,
    }
    for name in ("enqueue_copy", "result"):
        watch.wrap(PendingStep, name)
    for owner, names in _CALLS.items():
        for name in names:
            watch.wrap(owners[owner], name)
    params = SamplingParams(temperature=0, max_tokens=steps + 10, ignore_eos=True)
    for index in range(batch):
        prompt = {"prompt_token_ids": [7 + index, 11, 13, 17]}
        llm.llm_engine.add_request(f"r{index}", prompt, params)
    for _ in range(5):  # prompts, and the first decode steps
        llm.llm_engine.step()
    hook, total = [], []
    watch.by_call.clear()
    for _ in range(steps):
        watch.seconds, begin = 0.0, time.process_time()
        llm.llm_engine.step()
        total.append(time.process_time() - begin)
        hook.append(watch.seconds)
    return {
        "role": role,
        "batch": batch,
        "steps": steps,
        "hook_us": 1e6 * statistics.median(hook),
        "hook_us_by_call": {n: round(1e6 * t / steps, 1) for n, t in watch.by_call.items()},
        "step_us": 1e6 * statistics.median(total),
        "share": statistics.median(h / t for h, t in zip(hook, total, strict=True)),
        "machine": {"cpu": cpu_model(), "cores": os.cpu_count(), "load": os.getloadavg()[0]},
        "date": datetime.date.today().isoformat(),
        "command": "python -m benchmarks.decode_overhead " + " ".join(sys.argv[1:]),
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--role", choices=("decode", "both"), default="decode")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    args = parser.parse_args()
    found = measure(args.batch, args.steps, args.role)
    print(json.dumps(found) if args.json else "\n".join(f"{k}: {v}" for k, v in found.items()))
    return 0


if __name__ == "__main__":
    sys.exit(main())
