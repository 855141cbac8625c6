"""One pass per table over a capture, in bounded memory: from rows to Facts.

Rows of different tables belong together only if correlation id *and* process agree: correlation
ids repeat from process to process. All the activities of a graph replay carry the correlation id
of its launch, so nodes are attributed by where they were captured, never by that id.
"""

from __future__ import annotations

from array import array
from bisect import bisect_left, bisect_right
from collections import Counter, defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field

from eldr import tracing
from profiling import api, schema
from profiling.export import Export, pid_of
from profiling.facts import Facts, Hit
from profiling.ranges import Ranges
from profiling.steps import Steps


@dataclass(slots=True)
class _Copy:
    """Copies to the host under one correlation id."""

    bytes: int
    pinned: bool
    stream: int
    spans: list[tuple[int, int]]
    explained: bool = False


@dataclass(slots=True)
class _Launches:
    """Launches inside ranges of one process: parallel arrays, by correlation id.

    Millions of them must fit, so no dictionary. Correlation ids grow with time; should they come
    out of order, they are sorted before the first question.
    """

    ids: array[int] = field(default_factory=lambda: array("q"))
    names: list[str] = field(default_factory=list)
    which: array[int] = field(default_factory=lambda: array("h"))
    sorted: bool = True

    def add(self, correlation: int, name: str) -> None:
        if name not in self.names:
            self.names.append(name)
        self.sorted = self.sorted and (not self.ids or self.ids[-1] <= correlation)
        self.ids.append(correlation)
        self.which.append(self.names.index(name))

    def lookup(self) -> Callable[[int], str | None]:
        """A function from correlation id to range name."""
        if not self.sorted:
            order = sorted(range(len(self.ids)), key=self.ids.__getitem__)
            self.which = array("h", (self.which[i] for i in order))
            self.ids = array("q", sorted(self.ids))
            self.sorted = True
        ids, which, names, count = self.ids, self.which, self.names, len(self.ids)

        def range_of(correlation: int) -> str | None:
            at = bisect_left(ids, correlation)
            return names[which[at]] if at < count and ids[at] == correlation else None

        return range_of


@dataclass(slots=True)
class _Scan:
    """The state that one table's rows leave for the next."""

    export: Export
    facts: Facts
    capture_range: dict[int, str] = field(default_factory=dict)  # node -> range of its capture
    known_nodes: set[int] = field(default_factory=set)
    copies: dict[tuple[int, int], _Copy] = field(default_factory=dict)
    launches: defaultdict[int, _Launches] = field(default_factory=lambda: defaultdict(_Launches))


def scan(export: Export, ranges: Ranges, steps: dict[int, Steps]) -> Facts:
    """Reads every table once."""
    state = _Scan(export, Facts(ranges, steps))
    _graph_nodes(state)
    _copies(state)
    _calls(state)
    _orphans(state)
    _kernels(state)
    state.facts.graphs.whole_rows = export.count("CUPTI_ACTIVITY_KIND_GRAPH_TRACE")
    return state.facts


def _graph_nodes(state: _Scan) -> None:
    """Which replayed node was captured inside which range; clones point to their original."""
    created, original = dict[int, str | None](), dict[int, int]()
    wanted = ("start", "globalTid", "graphNodeId", "originalGraphNodeId")
    for start, tid, node, source in state.export.rows("CUDA_GRAPH_NODE_EVENTS", *wanted):
        state.known_nodes.add(node)
        if source and source != node:
            original[node] = source
        name = state.facts.ranges.at(tid, start)
        if name is not None or node not in created:
            created[node] = name
    for node in state.known_nodes:
        root, seen = node, {node}
        while root in original and original[root] not in seen:
            root = original[root]
            seen.add(root)
        name = created.get(root) or created.get(node)
        if name is not None:
            state.capture_range[node] = name


def _copies(state: _Scan) -> None:
    facts, kinds = state.facts, ", ".join(map(str, schema.TO_HOST))
    wanted = ("start", "end", "streamId", "correlationId", "globalPid", "bytes", "dstKind")
    for start, end, stream, correlation, pid, size, kind, node in state.export.rows(
        *("CUPTI_ACTIVITY_KIND_MEMCPY", *wanted, "graphNodeId"), where=f"copyKind IN ({kinds})"
    ):
        facts.total_copies += 1
        process, pinned = pid_of(pid), kind == schema.PINNED
        if node:
            _graph_copy(state, Hit("graph copy", "", "", process, start, end - start, size), node)
            continue
        copy = state.copies.get((process, correlation))
        if copy is None:
            copy = state.copies[process, correlation] = _Copy(0, pinned, stream, [])
        copy.bytes += size
        copy.pinned = copy.pinned and pinned
        copy.spans.append((start, end))


def _graph_copy(state: _Scan, seen: Hit, node: int) -> None:
    graphs = state.facts.graphs
    graphs.node_rows += 1
    if node not in state.known_nodes:
        graphs.unmapped += 1
        graphs.unmapped_copies += 1
    elif (name := state.capture_range.get(node)) is not None:
        hit = Hit("graph copy", name, "replay", seen.process, seen.start, seen.duration, seen.bytes)
        state.facts.hits.append(hit)


def _calls(state: _Scan) -> None:
    facts, strings = state.facts, state.export.strings
    waits = {key for key, name in strings.items() if api.waits(name)}
    launches = {key for key, name in strings.items() if api.launches(name)}
    replays = {key for key, name in strings.items() if api.launches_graph(name)}
    copies, at = state.copies, facts.ranges.at
    wanted = ("start", "end", "globalTid", "correlationId", "nameId")
    for start, end, tid, correlation, name in state.export.rows(
        "CUPTI_ACTIVITY_KIND_RUNTIME", *wanted
    ):
        key = (tid >> 24, correlation)
        copy = copies.get(key)
        if name in launches:
            facts.graphs.launches += name in replays
            if (inside := at(tid, start)) is not None:
                state.launches[key[0]].add(correlation, inside)
        if copy is None and name not in waits:
            continue
        inside = at(tid, start)
        kind = steps.kind_at(start) if (steps := facts.steps.get(key[0])) else None
        if copy is not None:
            _copy_call(state, copy, key, (start, end, strings.get(name, "?")), inside, kind)
        # A blocking copy to the host is one finding, not two: it is reported as the copy.
        if name in waits:
            facts.total_waits += 1
            facts.waits[key[0], kind or ""] += 1
            if inside is not None and copy is None:
                call = strings.get(name, "?")
                facts.hits.append(Hit("wait", inside, call, key[0], start, end - start))


def _copy_call(
    state: _Scan,
    copy: _Copy,
    key: tuple[int, int],
    call: tuple[int, int, str],
    inside: str | None,
    kind: str | None,
) -> None:
    start, end, name = call
    copy.explained = True
    state.facts.copies[key[0], kind or ""] += len(copy.spans)
    if inside is None:
        return
    if inside != tracing.CANARY:
        for span in copy.spans:
            state.facts.add_eldr_span(*span)
    state.facts.hits.append(
        Hit(
            *("copy", inside, name, key[0], start, end - start),
            bytes=copy.bytes,
            pinned=copy.pinned,
            stream=copy.stream,
            blocking=api.waits(name),
        )
    )


def _orphans(state: _Scan) -> None:
    """Activities that no recorded API call explains: Nsight may skip calls, or have lost some."""
    for (process, _), copy in state.copies.items():
        if not copy.explained:
            state.facts.orphan_copies += [(process, start) for start, _ in copy.spans]
    calls = {(tid >> 24, correlation) for tid, correlation in _calls_of_syncs(state)}
    wanted = ("start", "correlationId", "globalPid")
    for start, correlation, pid in state.export.rows(
        "CUPTI_ACTIVITY_KIND_SYNCHRONIZATION", *wanted
    ):
        if (pid_of(pid), correlation) not in calls:
            state.facts.orphan_waits.append((pid_of(pid), start))


def _calls_of_syncs(state: _Scan) -> list[tuple[int, int]]:
    """(globalTid, correlation id) of every call that can cause a synchronisation activity.

    The activity's own type is not asked: real exports label a stream synchronisation as a wait of
    one stream for another.
    """
    names = [
        str(key)
        for key, name in state.export.strings.items()
        if api.waits(name) or "WaitEvent" in name or "Synchronize" in name
    ]
    rows = state.export.rows(
        *("CUPTI_ACTIVITY_KIND_RUNTIME", "globalTid", "correlationId"),
        where=f"nameId IN ({', '.join(names)})",
    )
    return [(tid, correlation) for tid, correlation in rows]


def _kernels(state: _Scan) -> None:
    """Totals by name are SQLite's work; this loop sees every kernel once, in start order."""
    facts, export = state.facts, state.export
    _kernel_totals(state)
    wanted = ("start", "end", "streamId", "correlationId", "globalPid", "graphNodeId", "shortName")
    known, captured, unmapped, node_rows = state.known_nodes, state.capture_range, 0, 0
    launches = {process: found.lookup() for process, found in state.launches.items()}
    busy, engine_streams = _Busy(facts), set[tuple[int, int]]()
    cursors = {process: _Cursor(steps) for process, steps in facts.steps.items()}
    for start, end, stream, correlation, pid, node, name in export.rows(
        "CUPTI_ACTIVITY_KIND_KERNEL", *wanted, order="start"
    ):
        process, inside = pid >> 24, None
        if node:
            node_rows += 1
            if node in captured:
                inside = captured[node]
            elif node not in known:
                unmapped += 1
        elif process in launches:
            inside = launches[process](correlation)
        if inside is not None:
            _eldr_kernel(state, inside, name, start, end)
            continue
        engine_streams.add((process, stream))
        if start > busy.end:
            busy.cut(start)
        if end > busy.end:
            busy.end = end
        if process in cursors:
            cursor = cursors[process]
            if start >= cursor.next:
                cursor.advance(start)
            cursor.kernels += 1
    busy.cut(0)
    facts.graphs.node_rows += node_rows
    facts.graphs.unmapped += unmapped
    for process, stream in engine_streams:
        facts.engine_streams[process].add(stream)
    for process, cursor in cursors.items():
        for kind, count in cursor.finished().items():
            facts.kernels_in_steps[process, kind] += count


def _kernel_totals(state: _Scan) -> None:
    totals = state.export.totals("CUPTI_ACTIVITY_KIND_KERNEL", "shortName")
    for name, count, total, longest in totals:
        kernel = state.facts.kernels[state.export.strings.get(name, "?")]
        kernel.count += count
        kernel.total += total
        kernel.longest = max(kernel.longest, longest)


def _eldr_kernel(state: _Scan, inside: str, name: int, start: int, end: int) -> None:
    kernel = state.facts.kernels[state.export.strings.get(name, "?")]
    kernel.eldr += 1
    kernel.eldr_total += end - start
    state.facts.range_gpu[inside] += end - start
    state.facts.add_eldr_span(start, end)


class _Busy:
    """The union of intervals that come in start order."""

    def __init__(self, facts: Facts) -> None:
        self.end = -1
        self._facts = facts
        self._start = -1

    def cut(self, start: int) -> None:
        """A gap: the interval so far is done, the next begins at `start`."""
        if self._start >= 0:
            self._facts.busy_starts.append(self._start)
            self._facts.busy_ends.append(self.end)
        self._start = start


class _Cursor:
    """Counts kernels per kind of step, for kernels that come in start order."""

    def __init__(self, steps: Steps) -> None:
        self.kernels = 0
        self.next = steps.starts[0] if steps.starts else 2**62
        self._steps, self._index = steps, -1
        self._counts = Counter[str]()

    def advance(self, time: int) -> None:
        """Moves to the step under way at a moment."""
        self._settle()
        self._index = bisect_right(self._steps.starts, time) - 1
        later = self._index + 1
        self.next = self._steps.starts[later] if later < len(self._steps.starts) else 2**62

    def _settle(self) -> None:
        if 0 <= self._index < len(self._steps):
            self._counts[self._steps.kind(self._index)] += self.kernels
        self.kernels = 0

    def finished(self) -> Counter[str]:
        """Kernels by kind of step."""
        self._settle()
        return self._counts
