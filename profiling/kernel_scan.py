"""Every kernel of a capture, once: whose it is, in which step it ran, when the engine was busy."""

from __future__ import annotations

from bisect import bisect_right
from collections import Counter
from collections.abc import Container, Mapping

from profiling.export import Export
from profiling.facts import Facts
from profiling.launches import Launches
from profiling.steps import Steps


def scan_kernels(
    export: Export,
    facts: Facts,
    known: Container[int],
    captured: Mapping[int, str],
    launched: Mapping[int, Launches],
) -> None:
    """Fills in all that Facts says about kernels.

    Totals by name are SQLite's work; the loop sees every kernel once, in start order.

    Args:
        export: from where.
        facts: to where.
        known: graph nodes whose creation is on record.
        captured: those of them that were captured inside a range.
        launched: per process, launches inside ranges.
    """
    _totals(export, facts)
    wanted = ("start", "end", "streamId", "correlationId", "globalPid", "graphNodeId", "shortName")
    unmapped = node_rows = 0
    launches = {process: found.lookup() for process, found in launched.items()}
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
            _eldr_kernel(facts, inside, export.strings.get(name, "?"), start, end)
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


def _totals(export: Export, facts: Facts) -> None:
    for name, count, total, longest in export.totals("CUPTI_ACTIVITY_KIND_KERNEL", "shortName"):
        kernel = facts.kernels[export.strings.get(name, "?")]
        kernel.count += count
        kernel.total += total
        kernel.longest = max(kernel.longest, longest)


def _eldr_kernel(facts: Facts, inside: str, name: str, start: int, end: int) -> None:
    kernel = facts.kernels[name]
    kernel.eldr += 1
    kernel.eldr_total += end - start
    facts.range_gpu[inside] += end - start
    facts.add_eldr_span(start, end)


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
