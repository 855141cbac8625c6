"""The questions an audit answers about one capture; a doubt is a CANNOT TELL with its reason."""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter

from eldr import tracing
from profiling.export import Export
from profiling.facts import Facts, Hit
from profiling.verdict import CANNOT_TELL, FAIL, Check, judge

SHARE_BAR = 0.01
_SHOWN = 10


def capture(export: Export, facts: Facts, expected: tuple[str, ...]) -> Check:
    """Is this a complete recording of what is to be judged?"""
    doubts = gaps(export)
    counts = facts.ranges.counts()
    if not counts:
        doubts.append("no NVTX ranges of the domain eldr (recorded without ELDR_NVTX=1?)")
    else:
        missing = [name for name in expected if not counts.get(name)]
        doubts += [f"no range `{name}`, which was expected" for name in missing]
    if facts.ranges.open > len(facts.ranges.threads):
        doubts.append(f"{facts.ranges.open} ranges never end")
    seen = ", ".join(f"{name} {number}" for name, number in sorted(counts.items()))
    return judge("capture", [], doubts, [f"ranges: {seen}"])


def canary(facts: Facts) -> Check:
    """Would a copy and a wait have been seen? One deliberate copy per 128 steps must be found."""
    ranges = facts.ranges.counts().get(tracing.CANARY, 0)
    kinds = Counter(hit.kind for hit in facts.hits if hit.range == tracing.CANARY)
    waits = kinds["wait"] + sum(h.blocking for h in facts.hits if h.range == tracing.CANARY)
    doubts = []
    if not ranges:
        doubts.append("no canary range: nothing shows that this capture could see a copy or a wait")
    elif kinds["copy"] < ranges or waits < ranges:
        doubts.append(
            f"{ranges} canaries, but {kinds['copy']} copies and {waits} waits found in them: the "
            "capture does not show every copy or wait"
        )
    proof = [f"{ranges} canaries, each with its copy and its wait"]
    return judge("canary", [], doubts, proof)


def gaps(export: Export) -> list[str]:
    """Why the recording may be incomplete, whatever it is asked."""
    doubts = list(export.gaps)
    version = export.version()
    if version is None:
        doubts.append("the export does not tell its schema version")
    elif version[0] != 3:
        doubts.append(f"schema version {version[0]}.{version[1]}, this audit knows 3.x")
    return doubts + [f"Nsight reports lost events: {text}" for text in export.losses()]


def everything(export: Export, facts: Facts) -> Check:
    """Copies and waits of ranges that are not ELDR's: none is excused."""
    check = copies_and_waits(facts, allow_output_copy=False)
    faults = list(check.reasons) if check.verdict == FAIL else []
    doubts = gaps(export) + (list(check.reasons) if check.verdict == CANNOT_TELL else [])
    return judge(check.name, faults, doubts, list(check.reasons))


def copies_and_waits(facts: Facts, allow_output_copy: bool = True) -> Check:
    """No device-to-host copy and no host wait inside the ranges, the output copy excepted."""
    audited = sum(n for name, n in facts.ranges.counts().items() if name != tracing.CANARY)
    faults = [
        _describe(hit)
        for hit in facts.hits
        if hit.range != tracing.CANARY
        and not (allow_output_copy and _is_output_copy(hit, facts.engine_streams[hit.process]))
    ]
    processes = facts.ranges.processes()
    doubts = [] if audited else ["there is no range to audit"]
    doubts += _orphan_doubts("copies to the host", facts.orphan_copies, processes)
    doubts += _orphan_doubts("waits", facts.orphan_waits, processes)
    if facts.graphs.unmapped_copies:
        doubts.append(
            f"{facts.graphs.unmapped_copies} copies to the host inside graph replays whose capture "
            "was not recorded; they may be ELDR's (record with --from-start)"
        )
    if len(faults) > _SHOWN:
        faults = [*faults[:_SHOWN], f"... and {len(faults) - _SHOWN} more"]
    allowed = sum(hit.range == tracing.COPY for hit in facts.hits)
    proof = [f"none in {audited} ranges, {allowed} output copies aside"]
    return judge("copies-and-waits", faults, doubts, proof)


def _is_output_copy(hit: Hit, compute: set[int]) -> bool:
    """Enqueued and left alone: page-locked target, and a stream on which no kernel waits for it."""
    free = hit.pinned and not hit.blocking and hit.stream not in compute
    return hit.kind == "copy" and hit.range == tracing.COPY and free


def _describe(hit: Hit) -> str:
    where = f"in range `{hit.range}`, process {hit.process & 0xFFFFFF}, at {hit.start / 1e6:.3f} ms"
    if hit.kind == "wait":
        return f"host waits {hit.duration / 1e3:.1f} us in {hit.api} {where}"
    if hit.kind == "graph copy":
        return f"{hit.bytes} bytes to the host by a graph node captured {where}"
    kind = "pinned" if hit.pinned else "pageable"
    return f"{hit.bytes} bytes to {kind} host memory by {hit.api} on stream {hit.stream} {where}"


def _orphan_doubts(what: str, orphans: list[tuple[int, int]], processes: set[int]) -> list[str]:
    count = sum(process in processes for process, _ in orphans)
    return [f"{count} {what} that no recorded API call explains"] if count else []


def graphs(export: Export, facts: Facts) -> Check:
    """Are replays seen node by node, and is each node's capture known?"""
    seen, doubts = facts.graphs, []
    mode = export.meta("CUDA_GRAPH_TRACE_OPTIONS:MODE")
    if not (seen.launches or seen.node_rows or seen.whole_rows):
        return judge("graphs", [], [], ["no graph replays in this capture"])
    if mode != "Node" or seen.whole_rows:
        doubts.append(
            f"graph trace mode is {mode}: what runs inside a replay is invisible "
            "(record with --cuda-graph-trace=node)"
        )
    elif not seen.node_rows:
        doubts.append(f"{seen.launches} graph launches, but no activity of any node")
    if seen.unmapped:
        doubts.append(
            f"{seen.unmapped} of {seen.node_rows} replayed activities have no creation event: "
            "their graphs were captured outside this recording (record with --from-start)"
        )
    proof = [f"{seen.node_rows} activities of {seen.launches} replays, all mapped to their capture"]
    return judge("graphs", [], doubts, proof)


def share(facts: Facts) -> Check:
    """ELDR's kernels take at most 1 % of all kernel time."""
    total = sum(kernel.total for kernel in facts.kernels.values())
    ours = sum(kernel.eldr_total for kernel in facts.kernels.values())
    ours -= facts.range_gpu[tracing.CANARY]
    if not total:
        return judge("kernel-share", [], ["no kernels in this capture"], [])
    if not ours:
        return judge("kernel-share", [], ["no kernel was launched inside a range"], [])
    seen = facts.graphs
    if seen.whole_rows or (seen.launches and not seen.node_rows):
        return judge("kernel-share", [], ["kernels inside graph replays are invisible"], [])
    text = f"{100 * ours / total:.3f} % of {total / 1e6:.1f} ms of kernel time"
    if ours > SHARE_BAR * total:
        return judge("kernel-share", [f"{text}, more than {100 * SHARE_BAR:.0f} %"], [], [])
    doubts = []
    if facts.graphs.unmapped:
        doubts.append(f"{text} outside graphs; kernels inside unmapped replays cannot be assigned")
    return judge("kernel-share", [], doubts, [text])


def overlap(facts: Facts) -> Check:
    """Output copies run beside the engine's kernels, not on their streams."""
    copies = [hit for hit in facts.hits if hit.kind == "copy" and hit.range == tracing.COPY]
    faults = sorted(
        {
            f"output copies run on stream {hit.stream}, on which the engine's kernels run"
            for hit in copies
            if hit.stream in facts.engine_streams[hit.process]
        }
    )
    doubts = [] if facts.eldr_starts else ["nothing of ELDR ran on the device in this capture"]
    text = f"{100 * overlapped(facts):.0f} % of ELDR's device time is beside engine kernels"
    proof = [text, f"{len(copies)} output copies, none on a compute stream"]
    return judge("overlap", faults, doubts, proof)


def overlapped(facts: Facts) -> float:
    """Share of ELDR's own device time during which an engine kernel runs, 0 if it has none."""
    total = beside = 0
    for start, end in zip(facts.eldr_starts, facts.eldr_ends, strict=True):
        total += end - start
        index = max(0, bisect_left(facts.busy_starts, start) - 1)
        while index < len(facts.busy_starts) and facts.busy_starts[index] < end:
            low = max(start, facts.busy_starts[index])
            beside += max(0, min(end, facts.busy_ends[index]) - low)
            index += 1
    return beside / total if total else 0.0
