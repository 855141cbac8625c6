"""NVTX ranges of interest, per thread, with the question: which one encloses this moment?"""

from __future__ import annotations

import fnmatch
from array import array
from bisect import bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from eldr import tracing
from profiling import schema
from profiling.export import Export, pid_of


@dataclass(slots=True)
class Thread:
    """Ranges of one thread; parallel arrays, times in ns.

    `edges` and `owners` cut time at every start and end: between two edges the innermost range is
    `owners[i]`, an index into the arrays, or -1.
    """

    starts: array[int] = field(default_factory=lambda: array("q"))
    ends: array[int] = field(default_factory=lambda: array("q"))
    names: array[int] = field(default_factory=lambda: array("h"))
    edges: array[int] = field(default_factory=lambda: array("q"))
    owners: array[int] = field(default_factory=lambda: array("l"))

    def at(self, time: int) -> int:
        """Index of the innermost range at a moment, -1 if there is none."""
        edge = bisect_right(self.edges, time) - 1
        return self.owners[edge] if edge >= 0 else -1

    def index(self) -> None:
        """Builds the edges; call once all ranges are in."""
        stack = list[int]()
        for i in self._outer_first():
            while stack and self.ends[stack[-1]] <= self.starts[i]:
                self._close(stack)
            stack.append(i)
            self._edge(self.starts[i], i)
        while stack:
            self._close(stack)

    def _outer_first(self) -> Sequence[int]:
        """Indices by start; of two that start together, the longer one is the outer one."""
        starts, order = self.starts, range(len(self.starts))
        if all(starts[i] < starts[i + 1] for i in order[:-1]):
            return order
        by_end = sorted(order, key=self.ends.__getitem__, reverse=True)
        return sorted(by_end, key=starts.__getitem__)

    def _close(self, stack: list[int]) -> None:
        ended = stack.pop()
        self._edge(self.ends[ended], stack[-1] if stack else -1)

    def _edge(self, time: int, owner: int) -> None:
        self.edges.append(time)
        self.owners.append(owner)


@dataclass(slots=True)
class Ranges:
    """All ranges of interest.

    Attributes:
        names: range names; a thread's `names` index into it.
        threads: by globalTid.
        open: ranges that never end in the capture.
    """

    names: list[str]
    threads: dict[int, Thread]
    open: int = 0

    def at(self, tid: int, time: int) -> str | None:
        """Name of the innermost range, None outside."""
        thread = self.threads.get(tid)
        if thread is None:
            return None
        found = thread.at(time)
        return self.names[thread.names[found]] if found >= 0 else None

    def processes(self) -> set[int]:
        """Processes that have any."""
        return {pid_of(tid) for tid in self.threads}

    def counts(self) -> dict[str, int]:
        """Ranges by name."""
        total = dict.fromkeys(self.names, 0)
        for thread in self.threads.values():
            for name in thread.names:
                total[self.names[name]] += 1
        return total


def eldr_ranges(export: Export) -> Ranges:
    """The ranges of NVTX domain `eldr`, and those named `eldr:...` that torch wrote without one."""
    domains = {
        (pid_of(tid), domain)
        for tid, domain, text, text_id in export.rows(
            *("NVTX_EVENTS", "globalTid", "domainId", "text", "textId"),
            where=f"eventType = {schema.DOMAIN}",
        )
        if (text or export.strings.get(text_id)) == tracing.DOMAIN
    }
    prefix = f"{tracing.DOMAIN}:"

    def name(text: str, pid: int, domain: int) -> str | None:
        if (pid, domain) in domains:
            return text
        return text.removeprefix(prefix) if text.startswith(prefix) else None

    return _collect(export, name)


def matching_ranges(export: Export, pattern: str) -> Ranges:
    """Ranges of any domain whose name fits a glob pattern."""
    return _collect(export, lambda text, *_: text if fnmatch.fnmatchcase(text, pattern) else None)


def whole_capture(export: Export) -> Ranges:
    """One range per thread, over everything: what does the whole capture contain?"""
    ranges = Ranges(["capture of everything"], {})
    for (tid,) in set(export.rows("CUPTI_ACTIVITY_KIND_RUNTIME", "globalTid")):
        thread = ranges.threads[tid] = Thread()
        thread.starts.append(-(2**62))
        thread.ends.append(2**62)
        thread.names.append(0)
        thread.index()
    return ranges


def _collect(export: Export, name_of: Callable[[str, int, int], str | None]) -> Ranges:
    ranges, known = Ranges([], {}), dict[str, int]()
    wanted = ("start", "end", "text", "textId", "globalTid", "domainId")
    cache = dict[tuple[object, ...], str | None]()
    push_pop = f"eventType = {schema.PUSH_POP}"
    for start, end, text, text_id, tid, domain in export.rows(
        "NVTX_EVENTS", *wanted, where=push_pop
    ):
        key = (text or text_id, pid_of(tid), domain)
        if key not in cache:
            if len(cache) > 100_000:  # names that carry numbers must not fill the memory
                cache.clear()
            cache[key] = name_of(text or export.strings.get(text_id, ""), key[1], domain)
        name = cache[key]
        if name is None:
            continue
        if end is None:
            ranges.open += 1
            continue
        thread = ranges.threads.setdefault(tid, Thread())
        thread.starts.append(start)
        thread.ends.append(end)
        thread.names.append(known.setdefault(name, len(known)))
    ranges.names = list(known)
    for thread in ranges.threads.values():
        thread.index()
    return ranges
