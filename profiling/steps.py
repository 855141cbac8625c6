"""Engine steps in a capture: vLLM's own NVTX range per step, the same with and without ELDR."""

from __future__ import annotations

import re
from array import array
from bisect import bisect_right
from collections import Counter
from dataclasses import dataclass, field

from profiling.export import Export
from profiling.ranges import matching_ranges

# vLLM names a profiled step execute_context_<requests>(<tokens>)_generation_<requests>(<tokens>).
PATTERN = "execute_context_*"
_NAME = re.compile(r"execute_context_(\d+)\(\d+\)_generation_(\d+)\(\d+\)")
DECODE, MIXED = "decode", "prefill"


@dataclass(slots=True)
class Steps:
    """Steps of one process, in time order; parallel arrays.

    Attributes:
        starts: ns. A step lasts until the next one starts; the last one only marks an end.
        decode: whether no request was in its prefill.
        requests: generating requests.
    """

    starts: array[int] = field(default_factory=lambda: array("q"))
    decode: array[int] = field(default_factory=lambda: array("b"))
    requests: array[int] = field(default_factory=lambda: array("l"))

    def __len__(self) -> int:
        return max(0, len(self.starts) - 1)

    def kind_at(self, time: int) -> str | None:
        """Kind of the step under way at a moment; None before the first and after the last."""
        index = bisect_right(self.starts, time) - 1
        return self.kind(index) if 0 <= index < len(self) else None

    def kind(self, index: int) -> str:
        """`decode` or `prefill` (which includes mixed steps)."""
        return DECODE if self.decode[index] else MIXED

    def counts(self) -> Counter[str]:
        """Steps by kind."""
        return Counter(self.kind(i) for i in range(len(self)))

    def durations(self, kind: str) -> list[int]:
        """Start-to-start times of a kind, ns."""
        return [
            self.starts[i + 1] - self.starts[i] for i in range(len(self)) if self.kind(i) == kind
        ]


def find(export: Export, pattern: str = PATTERN) -> dict[int, Steps]:
    """Steps by process, from the thread that has most of them.

    A range whose name does not tell its batch counts as a decode step.
    """
    ranges = matching_ranges(export, pattern)
    by_process = dict[int, Steps]()
    for tid, thread in ranges.threads.items():
        steps = Steps()
        for index in sorted(range(len(thread.starts)), key=thread.starts.__getitem__):
            match = _NAME.match(ranges.names[thread.names[index]])
            steps.starts.append(thread.starts[index])
            steps.decode.append(match is None or int(match[1]) == 0)
            steps.requests.append(int(match[2]) if match else 0)
        other = by_process.get(tid >> 24)
        if other is None or len(other) < len(steps):
            by_process[tid >> 24] = steps
    return by_process
