"""One pass per table over a capture, in bounded memory: from rows to Facts.

Rows of different tables belong together only if correlation id *and* process agree: correlation
ids repeat from process to process. All the activities of a graph replay carry the correlation id
of its launch, so nodes are attributed by where they were captured, never by that id.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field

from eldr import tracing
from profiling import api, schema
from profiling.export import Export, pid_of
from profiling.facts import Facts, Hit
from profiling.kernel_scan import scan_kernels
from profiling.launches import Launches
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
class _Scan:
    """The state that one table's rows leave for the next."""

    export: Export
    facts: Facts
    capture_range: dict[int, str] = field(default_factory=dict)  # node -> range of its capture
    known_nodes: set[int] = field(default_factory=set)
    copies: dict[tuple[int, int], _Copy] = field(default_factory=dict)
    waited: set[tuple[int, int]] = field(default_factory=set)
    launches: defaultdict[int, Launches] = field(default_factory=lambda: defaultdict(Launches))


def scan(export: Export, ranges: Ranges, steps: dict[int, Steps]) -> Facts:
    """Reads every table once."""
    state = _Scan(export, Facts(ranges, steps))
    _graph_nodes(state)
    _copies(state)
    _calls(state)
    _orphans(state)
    scan_kernels(export, state.facts, state.known_nodes, state.capture_range, state.launches)
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
        if (copy is None or copy.explained) and name not in waits:
            continue
        inside = at(tid, start)
        kind = steps.kind_at(start) if (steps := facts.steps.get(key[0])) else None
        if copy is not None and not copy.explained:
            _copy_call(state, copy, key, (start, end, strings.get(name, "?")), inside, kind)
        # A blocking copy to the host is one finding, not two: it is reported as the copy. And a
        # runtime call may be recorded together with the driver call that it makes.
        if name in waits and key not in state.waited:
            state.waited.add(key)
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
