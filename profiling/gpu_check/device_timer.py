"""Times device work with CUDA events around a replayed CUDA graph."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from profiling.gpu_check.clock import Call, Prepared

_EAGER_CALLS = 3  # they are slow, and there are many rounds


def captured(run: Call) -> Call:
    """Captures `run`, which has run before, and returns the graph's replay.

    Raises:
        RuntimeError: `run` does what a capture forbids: it synchronises or reads back.
    """
    graph = torch.cuda.CUDAGraph()
    try:
        with torch.cuda.graph(graph):
            run()
    finally:
        torch.cuda.synchronize()
    return graph.replay


class DeviceTimer:
    """Calls that can be captured run as one graph, so that launch cost on the host is left out.

    Others (plain torch, which synchronises) are timed eagerly, host cost included; the sample says
    which of the two it was.
    """

    def prepare(self, calls: Sequence[Call]) -> Prepared:
        """Warms up on a side stream, as a capture asks for, then captures."""

        def run() -> None:
            for call in calls:
                call()

        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            run()
        torch.cuda.current_stream().wait_stream(stream)
        torch.cuda.synchronize()
        try:
            replay = captured(run)
        except RuntimeError:
            few = calls[:_EAGER_CALLS]
            return Prepared(lambda: self._timed(few) / len(few), "eager")
        replay()
        return Prepared(lambda: self._timed([replay]) / len(calls), "graph")

    def _timed(self, calls: Sequence[Call]) -> float:
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        for call in calls:
            call()
        end.record()
        end.synchronize()
        return float(start.elapsed_time(end)) * 1000


def copy_bandwidth(size: int = 1 << 30, rounds: int = 10) -> float:
    """Bytes per second, read and written, of a device-to-device copy: the roof of everything."""
    source = torch.empty(size, dtype=torch.uint8, device="cuda")
    target = torch.empty_like(source)
    prepared = DeviceTimer().prepare([lambda: target.copy_(source)])
    best = min(prepared.once() for _ in range(rounds))
    return 2 * size / (best * 1e-6)
