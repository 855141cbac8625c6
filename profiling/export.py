"""Opens an Nsight Systems sqlite export, read-only, and says what it lacks."""

from __future__ import annotations

import re
import sqlite3
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from profiling import schema

# Without these nothing can be said; the others appear only when something happened.
_REQUIRED = {
    "StringIds": ("id", "value"),
    "CUPTI_ACTIVITY_KIND_RUNTIME": ("start", "end", "globalTid", "correlationId", "nameId"),
}
_NEEDED_IF_THERE = {
    "NVTX_EVENTS": ("start", "end", "eventType", "text", "textId", "globalTid", "domainId"),
    "CUPTI_ACTIVITY_KIND_KERNEL": (
        *("start", "end", "streamId", "correlationId", "globalPid", "shortName", "graphNodeId"),
    ),
    "CUPTI_ACTIVITY_KIND_MEMCPY": (
        *("start", "end", "streamId", "correlationId", "globalPid", "bytes", "copyKind"),
        *("dstKind", "graphNodeId"),
    ),
    "CUPTI_ACTIVITY_KIND_SYNCHRONIZATION": ("start", "end", "correlationId", "globalPid"),
    "CUDA_GRAPH_NODE_EVENTS": ("start", "globalTid", "graphNodeId", "originalGraphNodeId"),
}
_LOSS = re.compile(r"\b(dropp?ed|lost|overflow\w*|discarded|incomplete|truncated)\b", re.I)


class ExportError(Exception):
    """Not an export that can be read at all; the message says why."""


class Export:
    """One export, with the strings resolved and its gaps known."""

    def __init__(self, path: Path) -> None:
        if not path.is_file():
            raise ExportError(f"{path}: no such file")
        self.path = path
        try:
            self._db = sqlite3.connect(f"{path.resolve().as_uri()}?mode=ro&immutable=1", uri=True)
            self._columns = self._read_columns()
        except sqlite3.DatabaseError as error:
            raise ExportError(f"{path}: not an sqlite export ({error})") from error
        self.gaps = self._find_gaps()
        self.strings: dict[int, str] = (
            dict(self.rows("StringIds", "id", "value")) if "StringIds" in self._columns else {}
        )

    def close(self) -> None:
        """Releases the file."""
        self._db.close()

    def _read_columns(self) -> dict[str, set[str]]:
        names = [row[0] for row in self._db.execute("SELECT name FROM sqlite_master")]
        return {
            name: {row[1] for row in self._db.execute(f'PRAGMA table_info("{name}")')}
            for name in names
            if name in schema.tables()
        }

    def _find_gaps(self) -> list[str]:
        gaps = [f"table {t} is missing" for t in _REQUIRED if t not in self._columns]
        for table, wanted in {**_REQUIRED, **_NEEDED_IF_THERE}.items():
            lacking = [c for c in wanted if c not in self._columns.get(table, wanted)]
            if lacking:
                gaps.append(f"{table} has no column {', '.join(lacking)} (an older schema?)")
        return gaps

    def has(self, table: str) -> bool:
        """Whether the table is there with every column that is read from it."""
        wanted = {**_REQUIRED, **_NEEDED_IF_THERE}.get(table, ())
        return table in self._columns and set(wanted) <= self._columns[table]

    def rows(self, table: str, *columns: str, where: str = "", order: str = "") -> Iterator[Any]:
        """Rows of a table as tuples; none if the table or a column is not there."""
        if table not in self._columns or not set(columns) <= self._columns[table]:
            return iter(())
        names = ", ".join(f'"{column}"' for column in columns)
        query = f'SELECT {names} FROM "{table}"'
        query += f" WHERE {where}" if where else ""
        query += f" ORDER BY {order}" if order else ""
        return self._db.execute(query)

    def totals(self, table: str, key: str) -> Iterator[Any]:
        """Per value of a column: the value, rows, sum and maximum of their durations."""
        if not self.has(table):
            return iter(())
        return self._db.execute(
            f'SELECT "{key}", count(*), sum("end" - start), max("end" - start) '
            f'FROM "{table}" GROUP BY "{key}"'
        )

    def count(self, table: str, where: str = "") -> int:
        """Number of rows; 0 if the table is not there."""
        if table not in self._columns:
            return 0
        query = f'SELECT count(*) FROM "{table}"' + (f" WHERE {where}" if where else "")
        return int(self._db.execute(query).fetchone()[0])

    def meta(self, name: str) -> str | None:
        """A capture or export property. Environment variables are never read out."""
        quoted = name.replace("'", "''")
        for table in ("META_DATA_CAPTURE", "META_DATA_EXPORT"):
            for (value,) in self.rows(table, "value", where=f"name = '{quoted}'"):
                return str(value)
        return None

    def version(self) -> tuple[int, int] | None:
        """(major, minor) of the schema, if the export tells."""
        match = re.match(r"(\d+)\.(\d+)", self.meta("EXPORT_SCHEMA_VERSION") or "")
        return (int(match[1]), int(match[2])) if match else None

    def losses(self) -> list[str]:
        """Nsight's own messages that events were lost."""
        texts: Iterable[Any] = self.rows("DIAGNOSTIC_EVENT", "text")
        return [text for (text,) in texts if _LOSS.search(text) and not _harmless(text)]


def _harmless(text: str) -> bool:
    """`dropped: 0` and the like."""
    return re.search(r"(dropp?ed|lost|discarded)\D{0,20}\b0\b", text, re.I) is not None


def pid_of(global_id: int) -> int:
    """The process bits that globalTid and globalPid share (hardware and VM bits included)."""
    return global_id >> 24
