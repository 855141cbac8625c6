"""What the page needs beside decisions, as rows of the decision log: one row per interval.

A row holds sums over its interval, so rows add up: counters of the decode workers, loads,
expectations of the live fleet and of the shadows, pairs of predicted and counted experts.
"""

from __future__ import annotations

import asyncio
import base64
import binascii
import logging
import time
import zlib
from collections import deque
from collections.abc import Mapping
from typing import Any

import numpy as np

from eldr.serving.decision_log import DecisionLog
from eldr.serving.page.counters import LARGEST_CELLS, Counters
from eldr.serving.page.look import TICK_SECONDS, Look
from eldr.serving.page.numbers import Pair
from eldr.serving.page.window import PAIRS, Weight, Window
from eldr.serving.state import Router

log = logging.getLogger(__name__)


async def write(router: Router, to: DecisionLog, period: float) -> None:
    """Looks at the router until cancelled; one row every `period` seconds, and one at the end."""
    look = Look(router)
    try:
        await look.poll(0.0)
        while True:
            end = time.monotonic() + period
            while time.monotonic() < end:
                look.tick()
                await asyncio.sleep(min(TICK_SECONDS, period))
            await _add(look, to)
    finally:
        await _add(look, to)


async def _add(look: Look, to: DecisionLog) -> None:
    begun = look.polled
    if begun == float("-inf"):
        return  # cancelled before there was a first look
    try:
        await look.poll(0.0)
        to.add_counters(row(look.window, look.polled - begun, look.measured()))
    except Exception:  # a row that cannot be made costs itself, never the router
        log.exception("the decision log goes without the workers' counters of this interval")
    look.window = look.window.successor()


def row(window: Window, seconds: float, measured: list[dict[str, Any]]) -> dict[str, Any]:
    """One interval as JSON values; `window` holds the polls at its two ends."""
    return {
        "time": time.time(),
        "seconds": round(seconds, 3),
        "layers": window.layers,
        "load": window.load(),
        "expected": window.expected_sums(),
        "pairs": list(window.pairs),
        "problems": window.problems,
        "measured": measured,
        "workers": {name: _pack(change) for name, change in window.changes().items()},
    }


def _pack(change: Counters) -> dict[str, Any]:
    use = np.ascontiguousarray(change.use, "<u4")
    return {
        "steps": change.steps,
        "by_batch": change.by_batch.tolist(),
        "shape": list(use.shape),
        "use": base64.b64encode(zlib.compress(use.tobytes(), 1)).decode(),
    }


def _unpack(packed: Mapping[str, Any]) -> Counters:
    layers, experts = (int(n) for n in packed["shape"])
    if not 0 < layers * experts <= LARGEST_CELLS:
        raise ValueError(f"counters of shape {packed['shape']}")
    raw = zlib.decompressobj().decompress(
        base64.b64decode(packed["use"], validate=True), 4 * layers * experts + 1
    )
    use = np.frombuffer(raw, "<u4").reshape(layers, experts).astype(np.float64)
    by_batch = np.array(packed["by_batch"], np.int64).reshape(-1, 3)
    return Counters(int(packed["steps"]), use, by_batch)


class Seen:
    """The sum of a log's rows, oldest first.

    Attributes:
        seconds: how long somebody looked.
        layers: of the served model.
        pairs: predicted and counted experts, the newest.
        measured: of an A/B experiment, as of the last row.
        problems: workers without counters, and why, as of the last row.
        changes: counters by worker.
        sums: expectations by fleet, see `Window.expected_sums`.
    """

    def __init__(self) -> None:
        self.seconds = 0.0
        self.layers = 1
        self.pairs: deque[Pair] = deque(maxlen=PAIRS)
        self.measured: list[dict[str, Any]] = []
        self.problems: dict[str, str] = {}
        self.changes: dict[str, Counters] = {}
        self.sums: dict[str, Weight] = {}
        self._load: dict[str, float] = {}

    def add(self, row: Mapping[str, Any]) -> None:
        """Takes the next row.

        Raises:
            ValueError: not a row of counters.
        """
        try:
            if row["layers"] != self.layers:  # another model: expectations do not add up
                self.layers, self.sums = int(row["layers"]), {}
            seconds = float(row["seconds"])
            self.seconds += seconds
            self.pairs.extend((float(p), float(r), str(w)) for p, r, w in row["pairs"])
            self.measured, self.problems = list(row["measured"]), dict(row["problems"])
            for name, (experts, requests) in row["expected"].items():
                before = self.sums.get(name, (0.0, 0.0))
                self.sums[name] = before[0] + float(experts), before[1] + float(requests)
            for name, mean in row["load"].items():
                self._load[name] = self._load.get(name, 0.0) + float(mean) * seconds
            for name, packed in row["workers"].items():
                change, known = _unpack(packed), self.changes.get(name)
                self.changes[name] = change if known is None else known.plus(change)
        except (KeyError, TypeError, AttributeError, binascii.Error, zlib.error) as error:
            raise ValueError(f"not a row of counters: {type(error).__name__} {error}") from error

    def load(self) -> dict[str, float]:
        """Mean running requests by worker."""
        return {name: sum_ / max(self.seconds, 1e-9) for name, sum_ in self._load.items()}
