"""What one pass over a capture collects; no judgement here."""

from __future__ import annotations

from array import array
from collections import Counter, defaultdict
from dataclasses import dataclass, field

from profiling.ranges import Ranges
from profiling.steps import Steps


@dataclass(frozen=True, slots=True)
class Hit:
    """A device-to-host copy or a host wait inside a range.

    Attributes:
        kind: `copy`, `wait`, or `graph copy` (a copy node of a replayed graph).
        range: the innermost range around the call, or around the node's capture.
        api: the call.
        start, duration: of the call, ns.
        bytes, pinned, stream, blocking: of a copy; whether it reaches page-locked memory, its
            stream, and whether the call itself waits.
    """

    kind: str
    range: str
    api: str
    process: int
    start: int
    duration: int
    bytes: int = 0
    pinned: bool = False
    stream: int = -1
    blocking: bool = False


@dataclass(slots=True)
class KernelTime:
    """One kernel's launches: how many, how long (ns), and how many of them are ELDR's."""

    count: int = 0
    total: int = 0
    longest: int = 0
    eldr: int = 0
    eldr_total: int = 0


@dataclass(slots=True)
class Graphs:
    """CUDA graph replays.

    Attributes:
        launches: graph launches by the host.
        node_rows: activities that a replay caused, seen one by one.
        whole_rows: replays recorded as one block, their nodes invisible.
        unmapped: node rows without a creation event.
        unmapped_copies: those of them that copy to the host.
    """

    launches: int = 0
    node_rows: int = 0
    whole_rows: int = 0
    unmapped: int = 0
    unmapped_copies: int = 0


@dataclass(slots=True)
class Facts:
    """All that the rules and the report need.

    Times are ns. `process` numbers are globalPid >> 24.

    Attributes:
        ranges: the ranges that were audited.
        steps: engine steps by process.
        hits: copies to the host and host waits inside ranges.
        copies, waits: (process, step kind) -> how many in steps, wherever they were called.
        kernels_in_steps: (process, step kind) -> kernels launched by the engine itself.
        total_copies, total_waits: in the whole capture.
        orphan_copies, orphan_waits: (process, start) of those that no API call explains.
        kernels: by short name.
        range_gpu: device time of the kernels launched in a range, by name.
        engine_streams: streams on which the engine's kernels run, by process.
        eldr_starts, eldr_ends: ELDR's kernels and copies on the device.
        busy_starts, busy_ends: union of the engine's kernels, in time order.
    """

    ranges: Ranges
    steps: dict[int, Steps]
    hits: list[Hit] = field(default_factory=list)
    copies: Counter[tuple[int, str]] = field(default_factory=Counter)
    waits: Counter[tuple[int, str]] = field(default_factory=Counter)
    kernels_in_steps: Counter[tuple[int, str]] = field(default_factory=Counter)
    total_copies: int = 0
    total_waits: int = 0
    orphan_copies: list[tuple[int, int]] = field(default_factory=list)
    orphan_waits: list[tuple[int, int]] = field(default_factory=list)
    kernels: defaultdict[str, KernelTime] = field(default_factory=lambda: defaultdict(KernelTime))
    range_gpu: Counter[str] = field(default_factory=Counter)
    engine_streams: defaultdict[int, set[int]] = field(default_factory=lambda: defaultdict(set))
    eldr_starts: array[int] = field(default_factory=lambda: array("q"))
    eldr_ends: array[int] = field(default_factory=lambda: array("q"))
    busy_starts: array[int] = field(default_factory=lambda: array("q"))
    busy_ends: array[int] = field(default_factory=lambda: array("q"))
    graphs: Graphs = field(default_factory=Graphs)

    def add_eldr_span(self, start: int, end: int) -> None:
        """Device time of ELDR's own."""
        self.eldr_starts.append(start)
        self.eldr_ends.append(end)
