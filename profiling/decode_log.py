"""Distinct experts against step time, from snapshots of a decode worker's counters.

The log has one JSON object per line, as the worker's route /eldr/decode answers; record.sh polls
it. Counters are cumulative, so each pair of neighbours gives one point.
"""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from pathlib import Path


class DecodeLogError(Exception):
    """A log that cannot be used; names the line."""


@dataclass(frozen=True, slots=True)
class Point:
    """One interval: distinct experts per layer and step, ms per step, tokens per step, steps."""

    distinct: float
    milliseconds: float
    tokens: float
    steps: int


@dataclass(frozen=True, slots=True)
class Fit:
    """Least squares, weighted by steps: ms = base + slope * distinct; and the correlation."""

    base: float
    slope: float
    correlation: float


def read(path: Path) -> list[Point]:
    """Points of a log; intervals without a decode step give none.

    Raises:
        DecodeLogError: unreadable, not JSON, another format version, or counters that shrink
            (the worker restarted).
    """
    try:
        lines = [line for line in path.read_text("utf-8").splitlines() if line.strip()]
    except OSError as error:
        raise DecodeLogError(f"{path}: {error.strerror}") from error
    points, last = list[Point](), None
    for number, line in enumerate(lines, 1):
        now = _snapshot(path, number, line)
        if last is not None:
            steps = now[0] - last[0]
            if steps < 0 or now[1] < last[1]:
                raise DecodeLogError(f"{path}, line {number}: counters went back: a restart?")
            if steps:
                per_step = [(a - b) / steps for a, b in zip(now, last, strict=True)]
                points.append(Point(per_step[2], 1e3 * per_step[3], per_step[1], int(steps)))
        last = now
    return points


def _snapshot(path: Path, number: int, line: str) -> tuple[float, float, float, float]:
    try:
        data = json.loads(line)
        if data["v"] != 1:
            raise DecodeLogError(f"{path}, line {number}: format {data['v']}, expected 1")
        distinct = sum(data["distinct"]) / len(data["distinct"])
        values = (data["steps"], data["tokens"], distinct, data["seconds"])
        return tuple(float(value) for value in values)  # type: ignore[return-value]
    except (ValueError, KeyError, TypeError, ZeroDivisionError) as error:
        raise DecodeLogError(f"{path}, line {number}: not a decode snapshot ({error})") from error


def fit(points: list[Point]) -> Fit | None:
    """The line through the points; None with fewer than three or no spread."""
    weight = sum(p.steps for p in points)
    if len(points) < 3 or not weight:
        return None
    mean_x = sum(p.steps * p.distinct for p in points) / weight
    mean_y = sum(p.steps * p.milliseconds for p in points) / weight
    xx = sum(p.steps * (p.distinct - mean_x) ** 2 for p in points)
    yy = sum(p.steps * (p.milliseconds - mean_y) ** 2 for p in points)
    xy = sum(p.steps * (p.distinct - mean_x) * (p.milliseconds - mean_y) for p in points)
    if xx <= 0 or yy <= 0:
        return None
    slope = xy / xx
    return Fit(mean_y - slope * mean_x, slope, xy / math.sqrt(xx * yy))
