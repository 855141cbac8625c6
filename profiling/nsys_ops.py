"""A step's device work inside ELDR's ranges, to be run under `nsys profile`; needs a CUDA device.

    ELDR_NVTX=1 nsys profile ... python -m profiling.nsys_ops BACKEND

Per step: accumulate, decide, and the output copy on a stream of its own, half of the steps as
replays of one CUDA graph. Matrix products beside them stand in for the engine.
"""

from __future__ import annotations

import sys
from collections.abc import Callable

import torch
from torch import Tensor

from eldr import tracing
from profiling.gpu_check.audit import QUESTION, STEP
from profiling.gpu_check.backends import OPS, Implementation, implementations
from profiling.gpu_check.inputs import accumulate_arguments, decide_arguments

STEPS = 256
_WARM = 3
_SCORES = 12  # decide's argument that holds the scores


def run(backend: str, device: torch.device) -> None:
    """All steps with one backend."""
    accumulate, decide = (implementations(op)[backend] for op in OPS)
    step, question = accumulate_arguments(STEP, device, 0), decide_arguments(QUESTION, device, 0)
    scores = question[_SCORES]
    assert isinstance(scores, Tensor)
    host = torch.empty(scores.shape, dtype=scores.dtype, pin_memory=True)
    engine = torch.randn(2048, 2048, device=device, dtype=torch.bfloat16)
    for _ in range(_WARM):  # compiles what must be compiled, outside all ranges
        accumulate(*step)
        decide(*question)
    graph = _captured(accumulate, step)
    make_stream: Callable[..., torch.cuda.Stream] = torch.cuda.Stream
    output = make_stream(device)
    for number in range(STEPS):
        engine @ engine
        with _Range(tracing.ACCUMULATE, STEP.tokens):
            if number % 2:
                graph.replay()
            else:
                accumulate(*step)
        with _Range(tracing.DECIDE, QUESTION.requests):
            decide(*question)
        output.wait_stream(torch.cuda.current_stream(device))
        with _Range(tracing.COPY, QUESTION.requests), torch.cuda.stream(output):
            host.copy_(scores, non_blocking=True)
        if tracing.ON:
            tracing.canary(scores)
    torch.cuda.synchronize()


def _captured(accumulate: Implementation, step: list[object]) -> torch.cuda.CUDAGraph:
    graph = torch.cuda.CUDAGraph()
    with _Range(tracing.CAPTURE, 0), torch.cuda.graph(graph):
        accumulate(*step)
    return graph


class _Range:
    """One of ELDR's ranges around a block."""

    def __init__(self, name: str, payload: int) -> None:
        self._name, self._payload = name, payload

    def __enter__(self) -> None:
        if tracing.ON:
            tracing.push(self._name, self._payload)

    def __exit__(self, *_: object) -> None:
        if tracing.ON:
            tracing.pop()


if __name__ == "__main__":
    run(sys.argv[1], torch.device("cuda"))
