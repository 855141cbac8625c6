"""Planted faults: a played capture with one thing wrong, and what an audit must say about it."""

from __future__ import annotations

import sqlite3
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from eldr import tracing
from profiling import schema
from profiling.fixture import CAPTURED, CLONE, Engine, Scenario
from profiling.recorder import COMPUTE, US, Recorder
from profiling.verdict import CANNOT_TELL, FAIL

_CLEAN = Scenario()
RUNTIME = "CUPTI_ACTIVITY_KIND_RUNTIME"


@dataclass(frozen=True, slots=True)
class Fault:
    """One fault.

    Attributes:
        name: what was planted.
        check, verdict, says: the check that must find it, its verdict, and words of its reason.
        engine: plays the worker that has it.
        after: does it to the finished database instead.
        meta: capture properties that differ.
        scenario: of the run.
        baseline: audit against a clean baseline, too.
    """

    name: str
    check: str
    verdict: str
    says: str
    engine: type[Engine] = Engine
    after: Callable[[sqlite3.Connection], object] | None = None
    meta: tuple[tuple[str, str], ...] = ()
    scenario: Scenario = _CLEAN
    baseline: Scenario | None = None

    def write(self, path: Path) -> Path:
        """The export with the fault in it."""
        recorder = Recorder()
        self.engine(recorder, self.scenario).run()
        recorder.write(path, dict(self.meta))
        if self.after is not None:
            with sqlite3.connect(path) as db:
                self.after(db)
            db.close()
        return path


def _inside(method: str, act: Callable[[Recorder], object], at: int = 11) -> type[Engine]:
    """A worker that also does `act` in one step's call of a method, e.g. inside that range."""

    class Faulty(Engine):
        pass

    def call(self: Engine, number: int) -> None:
        getattr(Engine, method)(self, number)
        if number == at:
            act(self.r)

    setattr(Faulty, method, call)
    return Faulty


def _blocking_copy(recorder: Recorder, name: str = "cudaMemcpy_v3020") -> None:
    recorder.copy(64, stream=COMPUTE, correlation=recorder.api(name, 30 * US))


def _copy(
    stream: int = 20, target: int = schema.PINNED, kind: int = 2
) -> Callable[[Recorder], None]:
    def act(recorder: Recorder) -> None:
        call = recorder.api("cudaMemcpyAsync_v3020")
        recorder.copy(4096, kind, target, stream, call)

    return act


def _replay_and_wait(recorder: Recorder) -> None:
    call = recorder.api("cudaGraphLaunch_v10000", 20 * US)
    recorder.kernel("fused_moe_kernel", 100 * US, correlation=call, node=1 + CLONE)
    recorder.wait()


class _CopyNode(Engine):
    """A graph with a node that copies to the host."""

    node = CAPTURED + CLONE

    def forward(self) -> None:
        super().forward()
        self.r.copy(256, stream=COMPUTE, correlation=self.r.correlation, node=self.node)


class _UnknownCopyNode(_CopyNode):
    node = 9999


class _SlowKernel(Engine):
    def accumulate(self, number: int) -> None:
        self.r.launch("eldr_accumulate", 200 * US)


class _EagerCapture(Engine):
    def after_forward(self, number: int) -> None:
        super().after_forward(number)
        if number == 11:
            with self.r.eldr(tracing.CAPTURE):
                _replay_and_wait(self.r)


class _HiddenPerStep(Engine):
    """Something more in every step, outside all ranges."""

    def act(self) -> None:
        raise NotImplementedError

    def after_forward(self, number: int) -> None:
        super().after_forward(number)
        self.act()


class _HiddenWait(_HiddenPerStep):
    def act(self) -> None:
        self.r.wait()


class _HiddenCopy(_HiddenPerStep):
    def act(self) -> None:
        self.r.copy_async(512)


class _BlindCanary(Engine):
    def canary(self) -> None:
        self.r.copy(4, stream=COMPUTE)


class _NeverEnds(Engine):
    def accumulate(self, number: int) -> None:
        super().accumulate(number)
        domain, thread = self.r.domain, self.r.tid
        values = {"eventType": schema.PUSH_POP, "globalTid": thread, "domainId": domain}
        name = self.r.string(tracing.DECIDE)
        self.r.add("NVTX_EVENTS", start=self.r.now, textId=name, **values)


def _sql(*statements: str) -> Callable[[sqlite3.Connection], object]:
    return lambda db: db.executescript(";".join(statements))


def _without_column(table: str, column: str) -> Callable[[sqlite3.Connection], object]:
    return _sql(f'ALTER TABLE {table} DROP COLUMN "{column}"')


def _diagnose(text: str) -> Callable[[sqlite3.Connection], object]:
    return _sql(f"INSERT INTO DIAGNOSTIC_EVENT VALUES (0, 1, 1, 2, '{text}', NULL)")


_ONLY_CALLS = (
    f"DELETE FROM {RUNTIME} WHERE correlationId IN (SELECT correlationId FROM "
    "CUPTI_ACTIVITY_KIND_MEMCPY WHERE bytes = 4096) AND globalTid >> 24 = (SELECT max(globalPid) "
    ">> 24 FROM CUPTI_ACTIVITY_KIND_MEMCPY WHERE bytes = 4096)"
)
_COPIES, _GRAPHS, _BASE = "copies-and-waits", "graphs", "against-baseline"
_NO_WAIT_CALL = _sql(
    f"DELETE FROM {RUNTIME} WHERE nameId = (SELECT id FROM StringIds WHERE value = "
    "'cudaEventSynchronize_v3020')"
)


def _faults() -> list[Fault]:
    fails: list[tuple[str, str, type[Engine]]] = [
        ("hidden .item()", "cudaMemcpyAsync", _inside("accumulate", Recorder.item)),
        ("stream wait", "cudaStreamSynchronize", _inside("accumulate", Recorder.wait)),
        (
            "device wait",
            "cudaDeviceSynchronize",
            _inside("decide", lambda r: r.wait("cudaDeviceSynchronize_v3020", 4)),
        ),
        (
            "event wait in merge",
            "cudaEventSynchronize",
            _inside("merge", lambda r: r.wait("cudaEventSynchronize_v3020", 1)),
        ),
        (
            "wait whose activity is mislabelled",
            "cudaStreamSynchronize",
            _inside("decide", lambda r: r.wait(kind=2)),
        ),
        ("blocking copy", "cudaMemcpy_v3020", _inside("decide", _blocking_copy)),
        (
            "driver call",
            "cuMemcpyDtoH_v2",
            _inside("decide", lambda r: _blocking_copy(r, "cuMemcpyDtoH_v2")),
        ),
        ("free", "cudaFree", _inside("accumulate", lambda r: r.wait("cudaFree_v3020", 4))),
        ("copy outside the copy range", "4096 bytes", _inside("decide", _copy())),
        ("unified memory to host", "4096 bytes", _inside("decide", _copy(kind=12))),
        ("pageable output copy", "pageable", _inside("copy", _copy(target=0))),
        ("wait around a graph replay", "cudaStreamSynchronize", _EagerCapture),
        ("copy node captured by ELDR", "graph node", _CopyNode),
    ]
    found = [Fault(name, _COPIES, FAIL, says, engine) for name, says, engine in fails]
    found += [
        Fault(
            *("output copy on the compute stream", "overlap", FAIL, "stream 7"),
            _inside("copy", _copy(stream=COMPUTE)),
        ),
        Fault("slow kernel", "kernel-share", FAIL, "more than 1 %", _SlowKernel),
        Fault(
            *("hidden wait outside all ranges", _BASE, FAIL, "waits per step", _HiddenWait),
            baseline=Scenario(eldr=False),
        ),
        Fault(
            *("hidden copy outside all ranges", _BASE, FAIL, "copies per step", _HiddenCopy),
            baseline=Scenario(eldr=False),
        ),
    ]
    return found + _doubts()


def _doubts() -> list[Fault]:
    whole_graphs = _sql(
        schema.create_statement("CUPTI_ACTIVITY_KIND_GRAPH_TRACE"),
        "INSERT INTO CUPTI_ACTIVITY_KIND_GRAPH_TRACE VALUES (0, 9, 0, 1, 0, 7, 1, 1, 1, 1)",
    )
    edits: list[tuple[str, str, str, Callable[[sqlite3.Connection], object]]] = [
        ("no NVTX table", "capture", "no NVTX ranges", _sql("DROP TABLE NVTX_EVENTS")),
        ("no API table", "capture", f"{RUNTIME} is missing", _sql(f"DROP TABLE {RUNTIME}")),
        ("no strings", "capture", "StringIds is missing", _sql("DROP TABLE StringIds")),
        (
            *("no copy table", "canary", "canaries"),
            _sql("DROP TABLE CUPTI_ACTIVITY_KIND_MEMCPY"),
        ),
        ("older NVTX", "capture", "textId", _without_column("NVTX_EVENTS", "textId")),
        (
            *("older kernels", "capture", "graphNodeId"),
            _without_column("CUPTI_ACTIVITY_KIND_KERNEL", "graphNodeId"),
        ),
        ("other schema", "capture", "4.0", _sql("UPDATE META_DATA_EXPORT SET value = '4.0.1'")),
        ("no version", "capture", "schema version", _sql("DROP TABLE META_DATA_EXPORT")),
        ("dropped events", "capture", "lost events", _diagnose("1337 CUDA events were dropped.")),
        ("graphs as blocks", _GRAPHS, "invisible", whole_graphs),
        (
            *("graphs captured earlier", _GRAPHS, "no creation event"),
            _sql("DELETE FROM CUDA_GRAPH_NODE_EVENTS"),
        ),
        (
            *("replays without nodes", _GRAPHS, "no activity of any node"),
            _sql("DELETE FROM CUPTI_ACTIVITY_KIND_KERNEL WHERE graphNodeId > 0"),
        ),
        ("copy without its call", _COPIES, "no recorded API call", _sql(_ONLY_CALLS)),
        ("wait without its call", _COPIES, "waits that no recorded API call", _NO_WAIT_CALL),
    ]
    found = [Fault(n, check, CANNOT_TELL, says, after=edit) for n, check, says, edit in edits]
    mode = (("CUDA_GRAPH_TRACE_OPTIONS:MODE", "Graph"),)
    return [
        *found,
        Fault("graph mode", _GRAPHS, CANNOT_TELL, "cuda-graph-trace=node", meta=mode),
        Fault("copy node of unknown origin", _COPIES, CANNOT_TELL, "replays", _UnknownCopyNode),
        Fault("blind canary", "canary", CANNOT_TELL, "does not show", _BlindCanary),
        Fault("ranges that never end", "capture", CANNOT_TELL, "never end", _NeverEnds),
        Fault(
            *("no canary", "canary", CANNOT_TELL, "no canary range"),
            scenario=Scenario(canaries=False),
        ),
        Fault(
            *("another load", _BASE, CANNOT_TELL, "not comparable"),
            baseline=Scenario(eldr=False, graphs=False, layers=12),
        ),
        Fault("short baseline", _BASE, CANNOT_TELL, "20 times", baseline=Scenario(9, eldr=False)),
        Fault("baseline with ELDR", _BASE, CANNOT_TELL, "is not one", baseline=Scenario()),
    ]


FAULTS = _faults()
