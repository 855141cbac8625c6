"""Workers that join, leave or fail during a run, and the file that lists them."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path


class Kind(StrEnum):
    """join: a new, empty worker. leave: takes nothing new and finishes. fail: gone at once."""

    JOIN = "join"
    LEAVE = "leave"
    FAIL = "fail"


@dataclass(frozen=True, slots=True)
class FleetEvent:
    """At `time` (seconds), `worker` (a name; the first ones are w0, w1, ...) does `kind`."""

    time: float
    kind: Kind
    worker: str

    def __post_init__(self) -> None:
        if not (math.isfinite(self.time) and self.time >= 0):
            raise ValueError(f"event: time must be finite and >= 0, got {self.time}")
        if not self.worker:
            raise ValueError("event: the worker's name is empty")


def load_events(path: str | Path, workers: int) -> tuple[FleetEvent, ...]:
    """Reads JSON lines {"time": s, "event": "join"|"leave"|"fail", "worker": NAME}.

    Args:
        path: the file.
        workers: workers at the start, w0 .. w{workers - 1}.

    Raises:
        ValueError: malformed line, or an event that the fleet cannot have (a worker that joins
            twice, or leaves without being there); the message names file and line.
    """
    events = []
    with open(path, encoding="utf-8") as file:
        for number, line in enumerate(file, 1):
            if line.strip():
                try:
                    events.append(_event(json.loads(line)))
                except (ValueError, TypeError, KeyError) as error:
                    raise ValueError(f"{path}, line {number}: {error}") from error
    try:
        check_events(events, workers)
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from error
    return tuple(events)


def check_events(events: Iterable[FleetEvent], workers: int) -> None:
    """Replays the membership.

    Raises:
        ValueError: a worker joins while it is there or was there, or leaves without being there.
    """
    there = {f"w{i}" for i in range(workers)}
    seen = set(there)
    for event in sorted(events, key=lambda e: e.time):
        name = event.worker
        if event.kind is Kind.JOIN:
            if name in seen:
                raise ValueError(f"event at {event.time} s: the name {name!r} was used already")
            there.add(name)
            seen.add(name)
        elif name not in there:
            raise ValueError(f"event at {event.time} s: {name!r} is not there to {event.kind}")
        elif event.kind is Kind.FAIL:
            there.discard(name)


def _event(row: object) -> FleetEvent:
    keys = {"time", "event", "worker"}
    if not isinstance(row, dict) or set(row) != keys:
        raise ValueError(f"expected an object with the keys {sorted(keys)}, got {row!r}")
    if isinstance(row["time"], bool) or not isinstance(row["time"], int | float):
        raise ValueError(f"time must be a number, got {row['time']!r}")
    if not isinstance(row["worker"], str):
        raise ValueError(f"worker must be a string, got {row['worker']!r}")
    return FleetEvent(float(row["time"]), Kind(row["event"]), row["worker"])
