"""One real vLLM engine that decodes given batches, step by step; for `benchmarks.cpu_tpot`."""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from eldr.routing.step_fit import StepSample
from eldr.workload.traces import ExpertTrace

CLOCKS = ("wall", "cpu")


@dataclass(frozen=True, slots=True)
class Batch:
    """What one worker ran at one moment under one policy: requests, as rows of the trace."""

    moment: int
    worker: int
    policy: str
    rows: tuple[int, ...]


@dataclass(slots=True)
class Measured:
    """The timed steps of a batch, over all its turns: ms by clock, distinct experts per layer."""

    batch: Batch
    wall: list[float] = field(default_factory=list)
    cpu: list[float] = field(default_factory=list)
    distinct: list[float] = field(default_factory=list)

    @property
    def requests(self) -> int:
        """Batch size."""
        return len(self.batch.rows)

    def ms(self, clock: str) -> float:
        """The median step: a page fault or a context switch is not the policy's."""
        return float(np.median(getattr(self, clock)))

    def sample(self, clock: str, layers: int) -> StepSample:
        """As a worker's counters would report these steps, at their median time.

        Without KV tokens: every request here holds about as many, so they go with the batch size,
        and a coefficient of their own would say nothing of other lengths.
        """
        n = len(self.distinct)
        return StepSample(
            steps=n,
            seconds=n * self.ms(clock) / 1e3,
            requests=float(n * self.requests),
            distinct=float(sum(self.distinct)) * layers,
            kv_tokens=0.0,
        )


class Engine:
    """The engine, in this process, on one thread, counting the experts that its steps read."""

    def __init__(self, model: Path, most: int, trace: ExpertTrace) -> None:
        from eldr.engine.testing import inprocess

        self._llm = inprocess.start(
            str(model),
            max_num_seqs=most,
            max_model_len=512,
            enable_prefix_caching=True,
            additional_config={"eldr": {"role": "decode"}},
        )
        self._hook = inprocess.worker(self._llm).model_runner.eldr
        self._trace, self._sent = trace, 0

    def decode(self, into: Measured, steps: int) -> None:
        """Decodes the batch's requests together until `steps` steps held all of them.

        A request starts as a decode worker gets it, with the prompt and the first token. The prefix
        cache holds whole blocks and never the last token: a recorded prompt that ends with a block
        is computed once, in the first batch that holds it, and afterwards that one token is.
        """
        from vllm import SamplingParams

        engine, rows, names = self._llm.llm_engine, into.batch.rows, []
        for row in rows:
            start = self._trace.offsets[row]
            prompt = self._trace.tokens[start : self._trace.cuts[row] + 1].tolist()
            self._sent += 1
            names.append(f"r{self._sent}")
            # No seed of its own: vLLM 0.32 cannot rewind a CPU generator after a chunk of a prompt.
            params = SamplingParams(
                temperature=0.8, max_tokens=256, ignore_eos=True, detokenize=False
            )
            engine.add_request(names[-1], {"prompt_token_ids": prompt}, params)
        left = steps
        while left:
            before, wall, cpu = self._hook.decode(), time.perf_counter(), time.process_time()
            engine.step()
            wall, cpu = time.perf_counter() - wall, time.process_time() - cpu
            after = self._hook.decode()
            tokens = after["tokens"] - before["tokens"]
            if after["steps"] - before["steps"] != 1 or tokens != len(rows):
                continue  # prompts, or not all of the requests
            left -= 1
            distinct = sum(after["distinct"]) - sum(before["distinct"])
            into.wall.append(wall * 1e3)
            into.cpu.append(cpu * 1e3)
            into.distinct.append(distinct / len(after["distinct"]))
        engine.abort_request(names)
        while engine.has_unfinished_requests():
            engine.step()


def measure(
    engine: Engine, work: Iterable[Sequence[Batch]], steps: int, say: str
) -> list[Measured]:
    """Every round of `work` in its order; the same batch of several rounds is one result."""
    import sys

    found: dict[Batch, Measured] = {}
    for number, turn in enumerate(work, 1):
        for i, batch in enumerate(turn, 1):
            engine.decode(found.setdefault(batch, Measured(batch)), steps)
            if i % 20 == 0 or i == len(turn):
                print(f"{say}: round {number}, batch {i} of {len(turn)}", file=sys.stderr,
                      flush=True)  # fmt: skip
    return list(found.values())
