"""One engine step as lanes: what the host threads and the device streams did, and when."""

from __future__ import annotations

from array import array
from bisect import bisect_left
from dataclasses import dataclass, field

from profiling import api, schema
from profiling.export import Export, pid_of
from profiling.facts import Facts
from profiling.ranges import Ranges
from profiling.steps import Steps

ENGINE, ELDR, TO_HOST, COPY, WAIT = "engine", "eldr", "to-host", "copy", "wait"


@dataclass(frozen=True, slots=True)
class Bar:
    """A thing on a lane: ns from the step's start, its kind and name."""

    start: int
    end: int
    kind: str
    name: str


@dataclass(slots=True)
class Lane:
    """A host thread or a device stream."""

    title: str
    host: bool
    bars: list[Bar] = field(default_factory=list)


@dataclass(slots=True)
class Strip:
    """The lanes of one step.

    Attributes:
        title: which step.
        length: shown time, ns.
    """

    title: str
    length: int
    lanes: list[Lane] = field(default_factory=list)


def strip(export: Export, facts: Facts) -> Strip | None:
    """The step of typical length in which most of ELDR's ranges occur; None without steps."""
    chosen = _choose(facts)
    if chosen is None:
        return None
    process, steps, index = chosen
    start, end = steps.starts[index], steps.starts[index + 1]
    title = f"{steps.kind(index)} step {index + 1} of {len(steps)}, process {process & 0xFFFFFF}"
    made = Strip(title, end - start)
    made.lanes += _host_lanes(export, facts.ranges, process, start, end)
    made.lanes += _device_lanes(export, facts, process, start, end)
    return made


def _choose(facts: Facts) -> tuple[int, Steps, int] | None:
    best, choice = (-1, 0.0), None
    for process, steps in facts.steps.items():
        threads = [t for tid, t in facts.ranges.threads.items() if pid_of(tid) == process]
        typical = sorted(steps.durations("decode") + steps.durations("prefill"))
        for index in range(len(steps)):
            if len(steps) > 4000 and index % (len(steps) // 4000):
                continue  # a few thousand candidates are enough
            start, end = steps.starts[index], steps.starts[index + 1]
            names = set[int]()
            for thread in threads:
                low, high = _within(thread.edges, start, end)
                owners = {thread.owners[i] for i in range(low, high)} - {-1}
                names |= {thread.names[i] for i in owners}
            off = abs((end - start) - typical[len(typical) // 2])
            rank = (len(names), -float(off))
            if rank > best:
                best, choice = rank, (process, steps, index)
    return choice


def _within(edges: array[int], start: int, end: int) -> tuple[int, int]:
    return bisect_left(edges, start), bisect_left(edges, end)


def zoom(made: Strip) -> Strip | None:
    """The part with ELDR's host ranges, enlarged; None if that is most of the step anyway."""
    ranges = [bar for lane in made.lanes if lane.host for bar in lane.bars if bar.kind == ELDR]
    if not ranges:
        return None
    low, high = min(bar.start for bar in ranges), max(bar.end for bar in ranges)
    pad = (high - low) // 8 + 1
    low, high = max(0, low - pad), min(made.length, high + pad)
    if 3 * (high - low) > made.length:
        return None
    closer = Strip(f"{made.title}, around ELDR's ranges on the host", high - low)
    for lane in made.lanes:
        bars = [
            Bar(max(0, bar.start - low), min(high, bar.end) - low, bar.kind, bar.name)
            for bar in lane.bars
            if bar.start < high and bar.end > low
        ]
        if bars:
            closer.lanes.append(Lane(lane.title, lane.host, bars))
    return closer


def _host_lanes(export: Export, ranges: Ranges, process: int, start: int, end: int) -> list[Lane]:
    """Per thread one lane of ELDR's ranges and one of CUDA calls."""
    lanes = dict[tuple[int, str], Lane]()

    def add(tid: int, what: str, bar: Bar) -> None:
        title = f"thread {tid & 0xFFFFFF} {what}"
        lanes.setdefault((tid, what), Lane(title, True)).bars.append(bar)

    for tid, thread in ranges.threads.items():
        if pid_of(tid) != process:
            continue
        for i in range(len(thread.starts)):
            begin = thread.starts[i]
            if start <= begin < end:
                stop = min(thread.ends[i], end)
                name = ranges.names[thread.names[i]]
                add(tid, "ranges", Bar(begin - start, stop - start, ELDR, name))
    wanted = ("start", "end", "globalTid", "nameId")
    inside = f"start >= {start} AND start < {end}"
    for begin, stop, tid, key in export.rows("CUPTI_ACTIVITY_KIND_RUNTIME", *wanted, where=inside):
        call = export.strings.get(key, "?")
        if pid_of(tid) == process:
            kind = WAIT if api.waits(call) else ENGINE
            add(tid, "calls", Bar(begin - start, min(stop, end) - start, kind, call))
    return [lanes[key] for key in sorted(lanes, key=lambda key: (key[0], key[1] == "calls"))]


def _device_lanes(export: Export, facts: Facts, process: int, start: int, end: int) -> list[Lane]:
    lanes = dict[int, Lane]()
    inside = f'start < {end} AND "end" > {start}'
    ours = set(zip(facts.eldr_starts, facts.eldr_ends, strict=True))
    wanted = ("start", "end", "streamId", "globalPid")
    for begin, stop, stream, pid, name in export.rows(
        "CUPTI_ACTIVITY_KIND_KERNEL", *wanted, "shortName", where=inside
    ):
        if pid_of(pid) == process:
            kind = ELDR if (begin, stop) in ours else ENGINE
            bar = Bar(begin - start, stop - start, kind, export.strings.get(name, "?"))
            lanes.setdefault(stream, Lane(f"stream {stream}", False)).bars.append(bar)
    for begin, stop, stream, pid, kind, size in export.rows(
        "CUPTI_ACTIVITY_KIND_MEMCPY", *wanted, "copyKind", "bytes", where=inside
    ):
        if pid_of(pid) == process:
            what = TO_HOST if kind in schema.TO_HOST else COPY
            bar = Bar(begin - start, stop - start, what, f"copy of {size} bytes")
            lanes.setdefault(stream, Lane(f"stream {stream}", False)).bars.append(bar)
    return [lanes[stream] for stream in sorted(lanes)]
