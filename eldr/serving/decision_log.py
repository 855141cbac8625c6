"""Decisions and their outcomes as JSON lines: sampled, rotating, written off the event loop.

One line per decided request (version 1), when it ends: all that GET /eldr/decisions says, what the
shadow policies would have chosen, times, and, if asked for, the signature as it came from the
engine. Between them, one line per interval (version 2, kind `counters`) with what the decode
workers counted meanwhile; `eldr.serving.page.snapshots` makes and reads these.
"""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import orjson

log = logging.getLogger(__name__)

VERSION = 1
COUNTERS_VERSION = 2
COUNTERS = "counters"
_FLUSH_SECONDS = 0.5
# Lines that a disk which does not keep up may hold back.
_MOST_PENDING = 100_000


class DecisionLog:
    """Appends lines to a file; when it is full, older ones move to FILE.1, FILE.2 and so on.

    Attributes:
        signatures: whether lines hold the signature.
        dropped: lines lost because the disk did not keep up or failed.
    """

    def __init__(
        self, path: str, *, sample: float, size: int, files: int, signatures: bool, seed: int = 0
    ) -> None:
        self.signatures = signatures
        self.dropped = 0
        self._path = Path(path)
        self._sample = sample
        self._size = size
        self._files = files
        self._random = random.Random(seed)
        self._pending: list[bytes] = []

    def wanted(self) -> bool:
        """Draws whether the next line is part of the sample."""
        return self._sample >= 1.0 or self._random.random() < self._sample

    def add(self, row: dict[str, Any]) -> None:
        """Takes a line; it is on disk within a second."""
        self._append({"v": VERSION, **row})

    def add_counters(self, row: dict[str, Any]) -> None:
        """Takes a line of counters, whatever the sample."""
        self._append({"v": COUNTERS_VERSION, "kind": COUNTERS, **row})

    def _append(self, row: dict[str, Any]) -> None:
        if len(self._pending) >= _MOST_PENDING:
            self.dropped += 1
            return
        self._pending.append(orjson.dumps(row) + b"\n")

    async def run(self) -> None:
        """Writes until cancelled, then once more."""
        try:
            while True:
                await asyncio.sleep(_FLUSH_SECONDS)
                await asyncio.to_thread(self.flush)
        finally:
            self.flush()

    def flush(self) -> None:
        """Writes what is pending; a failure is logged and costs these lines, nothing else."""
        lines, self._pending = self._pending, []
        if not lines:
            return
        try:
            if self._path.exists() and self._path.stat().st_size >= self._size:
                self._rotate()
            with self._path.open("ab") as file:
                file.write(b"".join(lines))
        except OSError as error:
            self.dropped += len(lines)
            log.error("decision log %s: %s; %d lines lost", self._path, error, len(lines))

    def _rotate(self) -> None:
        for number in range(self._files - 1, 0, -1):
            source = self._numbered(number - 1)
            if source.exists():
                source.replace(self._numbered(number))
        if self._files == 1:
            self._path.unlink()

    def _numbered(self, number: int) -> Path:
        return self._path if number == 0 else Path(f"{self._path}.{number}")


def files_of(path: str) -> list[str]:
    """The files of a log, oldest first: those that were full, and FILE itself."""
    older: list[str] = []
    while (name := Path(f"{path}.{len(older) + 1}")).exists():
        older.append(str(name))
    return [*reversed(older), path]


def read_decisions(path: str) -> Iterator[dict[str, Any]]:
    """The decisions of one file, oldest first.

    Raises:
        ValueError: a line is no decision of a known version; names file and line.
    """
    return (row for row in read_log(path) if row["v"] == VERSION)


def read_log(path: str) -> Iterator[dict[str, Any]]:
    """All rows of one file, oldest first; `v` tells decisions from counters.

    Raises:
        ValueError: a line is of no known version; names file and line.
    """
    with Path(path).open("rb") as file:
        for number, line in enumerate(file, 1):
            try:
                row = orjson.loads(line)
                known = row["v"], row.get("kind")
            except (orjson.JSONDecodeError, KeyError, TypeError, AttributeError) as error:
                raise ValueError(f"{path}:{number}: not a decision: {error}") from error
            if known not in ((VERSION, None), (COUNTERS_VERSION, COUNTERS)):
                raise ValueError(
                    f"{path}:{number}: version {known[0]}, this eldr reads {VERSION} and "
                    f"{COUNTERS_VERSION} ({COUNTERS})"
                )
            yield row
