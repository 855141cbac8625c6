"""Records things as Nsight Systems would: one method per thing that happens on host or device."""

from __future__ import annotations

import sqlite3
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from eldr import tracing
from profiling import schema

US, MS = 1_000, 1_000_000
COMPUTE, OUTPUT = 7, 20  # streams
_VM = 1 << 48  # the bits of a global id above the process id


def global_id(pid: int, thread: int = 0) -> int:
    """Nsight's serialized id: virtual machine, process, thread."""
    return _VM | pid << 24 | thread


_DEFAULTS = {
    table: {
        part.split()[0]: ("" if "TEXT!" in part else 0 if part.endswith("!") else None)
        for part in schema.parts(table)
    }
    for table in schema.tables()
}


@dataclass
class Recorder:
    """Rows by table, in memory or flushed to a database; times in ns.

    Attributes:
        pid, tid: the process and thread that acts.
        now: host time.
        domain: NVTX domain of ELDR's ranges; None writes `eldr:name` into the default one.
    """

    pid: int = 4242
    thread: int = 4242
    now: int = 10 * MS
    domain: int | None = 3
    rows: defaultdict[str, list[tuple[object, ...]]] = field(
        default_factory=lambda: defaultdict(list)
    )
    strings: dict[str, int] = field(default_factory=dict)
    correlation: int = 100
    device_free: dict[int, int] = field(default_factory=dict)

    @property
    def tid(self) -> int:
        """The acting thread's globalTid."""
        return global_id(self.pid, self.thread)

    def string(self, text: str) -> int:
        """The text's id in StringIds."""
        return self.strings.setdefault(text, len(self.strings))

    def add(self, table: str, **values: object) -> None:
        """A row; columns that are not given are NULL, or 0 where NULL is not allowed."""
        self.rows[table].append(tuple(values.get(c, _DEFAULTS[table][c]) for c in _DEFAULTS[table]))

    def api(self, name: str, duration: int = 2 * US, correlation: int | None = None) -> int:
        """A CUDA call by the acting thread; returns its correlation id."""
        if correlation is None:
            self.correlation += 1
            correlation = self.correlation
        self.add(
            "CUPTI_ACTIVITY_KIND_RUNTIME",
            start=self.now,
            end=self.now + duration,
            globalTid=self.tid,
            correlationId=correlation,
            nameId=self.string(name),
        )
        self.now += duration
        return correlation

    def kernel(
        self, name: str, duration: int, stream: int = COMPUTE, correlation: int = 0, node: int = 0
    ) -> None:
        """A kernel's run on the device, as soon as its stream is free."""
        start, end = self._run(stream, duration)
        text = self.string(name)
        self.add(
            "CUPTI_ACTIVITY_KIND_KERNEL",
            **self._activity(start, end, stream, correlation),
            demangledName=text,
            shortName=text,
            registersPerThread=32,
            graphNodeId=node or None,
        )

    def copy(
        self,
        size: int,
        kind: int = 2,
        target: int = schema.PINNED,
        stream: int = OUTPUT,
        correlation: int = 0,
        node: int = 0,
    ) -> None:
        """A copy's run on the device."""
        start, end = self._run(stream, 2 * US + size // 10)
        self.add(
            "CUPTI_ACTIVITY_KIND_MEMCPY",
            **self._activity(start, end, stream, correlation),
            bytes=size,
            copyKind=kind,
            srcKind=2,
            dstKind=target,
            graphNodeId=node or None,
            copyCount=1,
        )

    def launch(self, name: str, duration: int, stream: int = COMPUTE) -> None:
        """A kernel with its launch call."""
        self.kernel(name, duration, stream, self.api("cudaLaunchKernelExC_v11060"))

    def copy_async(self, size: int, kind: int = 2, target: int = schema.PINNED) -> None:
        """An asynchronous copy on the output stream with its call."""
        self.copy(size, kind, target, correlation=self.api("cudaMemcpyAsync_v3020"))

    def wait(self, name: str = "cudaStreamSynchronize_v3020", kind: int = 3) -> None:
        """A host wait with its synchronisation activity."""
        start = self.now
        correlation = self.api(name, 40 * US)
        self.add(
            "CUPTI_ACTIVITY_KIND_SYNCHRONIZATION",
            **self._activity(start, self.now, COMPUTE, correlation),
            syncType=kind,
        )

    def item(self) -> None:
        """What `.item()` does: a small copy, then a wait."""
        self.copy(4, stream=COMPUTE, correlation=self.api("cudaMemcpyAsync_v3020"))
        self.wait()

    @contextmanager
    def range(self, name: str, payload: int | None = None, domain: int = 0) -> Iterator[None]:
        """A push/pop range by the acting thread."""
        start = self.now
        self.now += 1 * US
        yield
        self.now += 1 * US
        self.add(
            "NVTX_EVENTS",
            start=start,
            end=self.now,
            eventType=schema.PUSH_POP,
            globalTid=self.tid,
            textId=self.string(name) if domain else None,
            text=None if domain else name,
            domainId=domain,
            int64Value=payload,
        )

    @contextmanager
    def eldr(self, name: str, payload: int = 0) -> Iterator[None]:
        """One of ELDR's ranges."""
        inside = self.range(name, payload, self.domain) if self.domain else None
        with inside or self.range(f"{tracing.DOMAIN}:{name}"):
            yield

    def make_node(self, node: int, source: int = 0) -> None:
        """A graph node comes into being, by capture or as a clone of `source`."""
        self.add(
            "CUDA_GRAPH_NODE_EVENTS",
            start=self.now,
            end=self.now + US,
            globalTid=self.tid,
            nameId=self.string("cudaGraphNode"),
            graphNodeId=node,
            originalGraphNodeId=source or None,
        )
        self.now += US

    def create_domain(self) -> None:
        """Announces ELDR's NVTX domain in the acting process."""
        if self.domain:
            self.add(
                "NVTX_EVENTS",
                start=self.now,
                eventType=schema.DOMAIN,
                text=tracing.DOMAIN,
                globalTid=self.tid,
                domainId=self.domain,
            )

    def _run(self, stream: int, duration: int) -> tuple[int, int]:
        start = max(self.now + 3 * US, self.device_free.get(stream, 0))
        self.device_free[stream] = start + duration
        return start, start + duration

    def _activity(self, start: int, end: int, stream: int, correlation: int) -> dict[str, object]:
        return {
            "start": start,
            "end": end,
            "deviceId": 0,
            "contextId": 1,
            "streamId": stream,
            "correlationId": correlation,
            "globalPid": global_id(self.pid),
        }

    def write(self, path: Path, meta: dict[str, str] | None = None) -> Path:
        """Creates the export; like Nsight, only tables that have rows."""
        path.unlink(missing_ok=True)
        db = sqlite3.connect(path)
        self.describe(meta)
        self.flush(db)
        db.executescript(schema.create_statement("StringIds"))
        db.executemany(
            "INSERT INTO StringIds VALUES (?, ?)", [(v, k) for k, v in self.strings.items()]
        )
        db.commit()
        db.close()
        return path

    def describe(self, meta: dict[str, str] | None = None) -> None:
        """Capture properties and the enumerations."""
        known = {"CUDA_GRAPH_TRACE_OPTIONS:MODE": "Node", "CUDA_SKIP_SOME_API_CALLS": "true"}
        for name, value in (known | (meta or {})).items():
            self.add("META_DATA_CAPTURE", name=name, value=value)
        if not self.rows["META_DATA_EXPORT"]:
            self.add("META_DATA_EXPORT", name="EXPORT_SCHEMA_VERSION", value="3.25.0")
        for table, labels in schema.ENUMS.items():
            for key, label in labels.items():
                self.add(table, id=key, name=label.upper(), label=label)
        self.diagnose("Profiling has started.", 1)

    def diagnose(self, text: str, severity: int) -> None:
        """A message of Nsight itself: severity 1 information, 2 warning, 3 error."""
        self.add(
            "DIAGNOSTIC_EVENT", timestamp=0, timestampType=1, source=1, severity=severity, text=text
        )

    def flush(self, db: sqlite3.Connection) -> None:
        """Moves the rows to a database."""
        for table, rows in self.rows.items():
            if rows:
                create = schema.create_statement(table).replace("TABLE", "TABLE IF NOT EXISTS")
                db.execute(create)
                marks = ", ".join("?" * len(rows[0]))
                db.executemany(f"INSERT INTO {table} VALUES ({marks})", rows)
        db.commit()
        self.rows.clear()
