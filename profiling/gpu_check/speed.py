"""Timings of accumulate and decide at the models' shapes, backends interleaved."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from profiling.gpu_check.backends import Implementation
from profiling.gpu_check.clock import Call, Prepared, Sample, Timer, interleave
from profiling.gpu_check.host_capture import NAME as HOST_CAPTURE
from profiling.gpu_check.host_capture import HostCapture
from profiling.gpu_check.inputs import (
    Question,
    Step,
    accumulate_arguments,
    copied,
    decide_arguments,
)
from profiling.gpu_check.shapes import BLOCKS_PER_REQUEST, REQUESTS, TOKENS, WORKERS, Model

ROUNDS = 15
PEERS = (HOST_CAPTURE,)  # timed beside our backends, no backends themselves
_CALLS = 20  # in one graph
_CACHE = 100 << 20  # bytes of distinct inputs, beyond the L2 cache of any GPU we know


@dataclass(frozen=True, slots=True)
class Timing:
    """One case: microseconds of each backend and peer, and the bytes that have to move at least."""

    op: str
    model: str
    case: str
    bytes: int
    samples: dict[str, Sample]
    left_out: dict[str, str]

    def as_dict(self) -> dict[str, object]:
        """Plain data for JSON, with GB/s of the bytes that have to move."""
        rows = {
            name: {**sample.as_dict(), "gb_per_s": self.bytes / sample.median / 1000}
            for name, sample in self.samples.items()
        }
        return {
            "op": self.op, "model": self.model, "case": self.case, "bytes": self.bytes,
            "us": rows, "left_out": self.left_out,
        }  # fmt: skip


def _copies(size: int) -> int:
    """So many distinct inputs that none is found in the cache when its turn comes again."""
    return max(2, min(_CALLS, -(-_CACHE // max(size, 1))))


def _calls(implementation: Implementation, arguments: Sequence[list[object]]) -> list[Call]:
    return [partial(implementation, *a) for a in (list(arguments) * _CALLS)[:_CALLS]]


def time_case(
    timer: Timer,
    implementations: dict[str, Implementation],
    arguments: Sequence[list[object]],
    rounds: int = ROUNDS,
    peers: Mapping[str, Implementation] | None = None,
) -> tuple[dict[str, Sample], dict[str, str]]:
    """Samples by backend and peer, and why others are left out."""
    prepared: dict[str, Prepared] = {}
    left_out: dict[str, str] = {}
    for name, implementation in (implementations | dict(peers or {})).items():
        try:
            prepared[name] = timer.prepare(_calls(implementation, arguments))
        except NotImplementedError as error:
            left_out[name] = str(error)
    return interleave(prepared, rounds), left_out


def accumulate_bytes(step: Step) -> int:
    """Ids and slots read, rows written."""
    blocks = -(-step.tokens // step.block_size)
    row = step.layers * step.experts * step.histogram.itemsize
    ids = step.tokens * step.layers * step.top_k * step.ids.itemsize
    return ids + 8 * step.tokens + blocks * row


def time_accumulate(
    timer: Timer, model: Model, implementations: dict[str, Implementation], device: torch.device
) -> Timing:
    """One prefill step of TOKENS tokens, all layers."""
    step = Step(TOKENS, model.layers, model.experts, model.top_k, model.block_size)
    size = accumulate_bytes(step)
    first = accumulate_arguments(step, device, 0)
    arguments = [first] + [copied(first) for _ in range(_copies(size) - 1)]
    peers = {HOST_CAPTURE: _host_capture(step, first)}
    samples, left_out = time_case(timer, implementations, arguments, peers=peers)
    return Timing("accumulate_hits", model.name, step.name, size, samples, left_out)


def _host_capture(step: Step, arguments: Sequence[Any]) -> Implementation:
    """Takes the op's arguments, of which it needs the ids alone."""
    each = step.tokens // step.requests
    last = step.tokens - each * (step.requests - 1)
    capture = HostCapture(arguments[0], step.experts, [each] * (step.requests - 1) + [last])
    return lambda ids, *_: capture(ids)


def decide_bytes(question: Question) -> int:
    """Rows read once per request, vectors once."""
    cells = question.layers * question.experts
    return question.requests * question.blocks * cells + 4 * question.workers * cells


def time_decide(
    timer: Timer,
    model: Model,
    requests: int,
    implementations: dict[str, Implementation],
    device: torch.device,
) -> Timing:
    """Scores and assignment for `requests` prompts of BLOCKS_PER_REQUEST blocks each."""
    question = Question(
        requests, WORKERS, model.layers, model.experts, BLOCKS_PER_REQUEST, cached_blocks=16384
    )
    first: list[Any] = decide_arguments(question, device, 0)
    first[13] = None  # the counts stay on the chip
    size = decide_bytes(question)
    arguments = [first] + [_elsewhere(first, i) for i in range(1, _copies(size))]
    samples, left_out = time_case(timer, implementations, arguments)
    return Timing("decide", model.name, question.name, size, samples, left_out)


def _elsewhere(arguments: list[Any], turn: int) -> list[object]:
    """The same question about other blocks of the same cache."""
    rows, ids = arguments[0], arguments[1]
    assert isinstance(rows, Tensor)
    moved = (ids + turn * 997) % len(rows)
    return [rows, moved, *copied(arguments[2:])]


def cases(
    models: Sequence[Model],
) -> Iterator[
    tuple[str, Callable[[Timer, dict[str, dict[str, Implementation]], torch.device], Timing]]
]:
    """Every timing by name: first one model's all, then the next model's."""
    for model in models:
        yield f"accumulate {model.name}", partial(_accumulate_case, model)
        for requests in REQUESTS:
            yield f"decide R={requests} {model.name}", partial(_decide_case, model, requests)


def _accumulate_case(
    model: Model, timer: Timer, ops: dict[str, dict[str, Implementation]], device: torch.device
) -> Timing:
    return time_accumulate(timer, model, ops["accumulate_hits"], device)


def _decide_case(
    model: Model,
    requests: int,
    timer: Timer,
    ops: dict[str, dict[str, Implementation]],
    device: torch.device,
) -> Timing:
    return time_decide(timer, model, requests, ops["decide"], device)
