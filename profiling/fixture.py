"""Exports of a played vLLM worker, for tests and for trying the tools without a GPU.

    python -m profiling.fixture OUT.sqlite [--steps N] [--baseline] [--role decode|prefill]

The worker has ELDR's ranges, graph replays and output copies, and beside it runs a second process
whose correlation ids collide with the first's.
"""

from __future__ import annotations

import argparse
from dataclasses import dataclass
from pathlib import Path

from eldr import tracing
from profiling.recorder import MS, US, Recorder


@dataclass(frozen=True, slots=True)
class Scenario:
    """A worker's run.

    Attributes:
        steps: engine steps.
        eldr: with ELDR's ranges and kernels; without, a baseline.
        graphs: steps replay a CUDA graph, captured at the start.
        prefill: every step has requests in prefill, and every fourth ends a prompt.
        canary_every, canaries: steps between canaries; whether there are any.
        layers: engine kernels per step.
    """

    steps: int = 64
    eldr: bool = True
    graphs: bool = True
    prefill: bool = True
    canary_every: int = 32
    canaries: bool = True
    layers: int = 19


CAPTURED = 500  # the graph node that ELDR's capture adds
CLONE = 1000  # what instantiation adds to a node's id


class Engine:
    """Plays a scenario on a recorder; tests override a method to plant a fault."""

    def __init__(self, recorder: Recorder, scenario: Scenario) -> None:
        self.r = recorder
        self.scenario = scenario

    def run(self) -> None:
        """The whole capture."""
        if self.scenario.eldr:
            self.r.create_domain()
        if self.scenario.graphs:
            self.capture_graph()
        for number in range(self.scenario.steps):
            self.step(number)
        self.another_process()

    def capture_graph(self) -> None:
        """Nodes are created while the graph is captured, then cloned by the instantiation."""
        for node in range(1, self.scenario.layers + 1):
            self.r.make_node(node)
        if self.scenario.eldr:
            with self.r.eldr(tracing.CAPTURE):
                self.r.make_node(CAPTURED)
        for node in self.nodes():
            self.r.make_node(node + CLONE, node)

    def nodes(self) -> list[int]:
        """Nodes of the graph."""
        engine = list(range(1, self.scenario.layers + 1))
        return [*engine, CAPTURED] if self.scenario.eldr else engine

    def step(self, number: int) -> None:
        """One engine step of about 10 ms."""
        begin, r = self.r.now, self.r
        context = (1, 512) if self.scenario.prefill else (0, 0)
        with r.range(f"execute_context_{context[0]}({context[1]})_generation_8(8)"):
            r.api("cudaStreamWaitEvent_v3020")
            self.forward()
            if self.scenario.eldr:
                self.after_forward(number)
        self.output(number)
        r.now = begin + 10 * MS

    def forward(self) -> None:
        """The model: one graph replay, or eager launches."""
        r = self.r
        if self.scenario.graphs:
            launch = r.api("cudaGraphLaunch_v10000", 20 * US)
            for node in self.nodes():
                ours = node == CAPTURED
                name, duration = ("copy_ids", 2 * US) if ours else ("fused_moe_kernel", 300 * US)
                r.kernel(name, duration, correlation=launch, node=node + CLONE)
            return
        for _ in range(self.scenario.layers):
            r.launch("fused_moe_kernel", 300 * US)
            if self.scenario.eldr:
                with r.eldr(tracing.CAPTURE):
                    r.launch("copy_ids", US)

    def after_forward(self, number: int) -> None:
        """ELDR's own part of a step."""
        with self.r.eldr(tracing.ACCUMULATE, 8):
            self.accumulate(number)
        if self.scenario.prefill and number % 4 == 3:
            with self.r.eldr(tracing.DECIDE, 1):
                self.decide(number)
        if number % self.scenario.canary_every == 1 and self.scenario.canaries:
            with self.r.eldr(tracing.CANARY, number):
                self.canary()

    def accumulate(self, number: int) -> None:
        """The step's hits."""
        self.r.launch("eldr_accumulate", 6 * US)

    def decide(self, number: int) -> None:
        """Gather and score."""
        self.r.launch("eldr_gather_score", 9 * US)

    def canary(self) -> None:
        """The deliberate copy."""
        self.r.item()

    def output(self, number: int) -> None:
        """The engine's own copy of the sampled tokens, ELDR's beside it, and the engine's wait."""
        r = self.r
        r.copy_async(64)
        if self.scenario.eldr and self.scenario.prefill and number % 4 == 3:
            with r.eldr(tracing.COPY, 1):
                self.copy(number)
        r.wait("cudaEventSynchronize_v3020", 1)
        if self.scenario.eldr and self.scenario.prefill and number % 4 == 3:
            with r.eldr(tracing.MERGE, 1):
                self.merge(number)

    def copy(self, number: int) -> None:
        """The output copy."""
        self.r.copy_async(4096)

    def merge(self, number: int) -> None:
        """Host work only."""
        self.r.now += 20 * US

    def another_process(self) -> None:
        """Copies and waits with the same correlation ids, at the same times, elsewhere."""
        r = self.r
        launches = [row[4] for row in r.rows["CUPTI_ACTIVITY_KIND_RUNTIME"]][:200]
        mine, now = (r.pid, r.thread), r.now
        r.pid = r.thread = 777
        r.now = 10 * MS
        for correlation in launches:
            call = r.api("cudaMemcpyAsync_v3020", correlation=int(str(correlation)))
            r.copy(1 << 10, stream=99, correlation=call)
            r.wait()
        (r.pid, r.thread), r.now = mine, now


def record_engine(path: Path, scenario: Scenario, engine: type[Engine] = Engine) -> Path:
    """Writes one export of a scenario."""
    recorder = Recorder()
    engine(recorder, scenario).run()
    return recorder.write(path)


def main(argv: list[str] | None = None) -> int:
    """Writes a synthetic export."""
    parser = argparse.ArgumentParser(prog="python -m profiling.fixture", description=__doc__)
    parser.add_argument("out", type=Path)
    parser.add_argument("--steps", type=int, default=64)
    parser.add_argument("--role", choices=("prefill", "decode"), default="prefill")
    parser.add_argument("--baseline", action="store_true", help="the engine without ELDR")
    args = parser.parse_args(argv)
    scenario = Scenario(args.steps, eldr=not args.baseline, prefill=args.role == "prefill")
    print(record_engine(args.out, scenario))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
