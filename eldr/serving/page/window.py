"""What was seen while somebody looked: loads and expectations by tick, counters by poll."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from typing import Any

from eldr.serving.page.counters import Counters, realised
from eldr.serving.page.numbers import Pair

TICKS = 240
POLLS = 31
PAIRS = 400

Status = Sequence[Mapping[str, Any]]
Weight = tuple[float, float]
# The live fleet among the shadows' names; no policy has it.
LIVE = ""


class Window:
    """Bounded history of one router, newest last.

    Args:
        layers: of the served model; expectations are given per layer.
    """

    def __init__(self, layers: int = 1) -> None:
        self.layers = layers
        self.pairs: deque[Pair] = deque(maxlen=PAIRS)
        self.problems: dict[str, str] = {}
        # By tick: running requests by worker; weights of the live fleet ("") and of shadows.
        self._loads: deque[dict[str, float]] = deque(maxlen=TICKS)
        self._weights: deque[dict[str, Weight | None]] = deque(maxlen=TICKS)
        self._fresh: list[Status] = []
        self._polls: deque[tuple[float, dict[str, Counters]]] = deque(maxlen=POLLS)

    def successor(self) -> Window:
        """An empty window that begins with this one's last poll."""
        out = Window(self.layers)
        out._polls.extend(list(self._polls)[-1:])
        return out

    def tick(self, live: Status, shadows: Mapping[str, Status]) -> None:
        """Takes `Fleet.status()` of the live fleet and of every shadow's."""
        self._loads.append({row["name"]: row["requests"] for row in live})
        weights = {LIVE: _weight(live)} | {name: _weight(s) for name, s in shadows.items()}
        self._weights.append(weights)
        self._fresh.append(live)
        del self._fresh[:-TICKS]

    def poll(self, now: float, answers: Mapping[str, Counters | str]) -> None:
        """Takes each worker's counters, or why there are none."""
        counters = {name: c for name, c in answers.items() if isinstance(c, Counters)}
        self.problems = {name: c for name, c in answers.items() if isinstance(c, str)}
        if self._polls:
            self._pair(self._polls[-1][1], counters)
        self._fresh.clear()
        self._polls.append((now, counters))

    def _pair(self, before: Mapping[str, Counters], after: Mapping[str, Counters]) -> None:
        predicted: dict[str, list[float]] = {}
        for status in self._fresh:
            for row in status:
                if row["requests"] and row["experts"] is not None:
                    predicted.setdefault(row["name"], []).append(row["experts"] / self.layers)
        for name, counters in after.items():
            if name not in before or name not in predicted:
                continue
            counted = counters.since(before[name]).per_step()
            if counted is not None:
                mean = sum(predicted[name]) / len(predicted[name])
                self.pairs.append((mean, counted, name))

    def changes(self) -> dict[str, Counters]:
        """Counters' growth over the window; since the worker's start if there is one poll only."""
        if not self._polls:
            return {}
        first, last = self._polls[0][1], self._polls[-1][1]
        if len(self._polls) == 1:
            return dict(last)
        return {name: c.since(first.get(name)) for name, c in last.items()}

    def span(self) -> str:
        """The time that `changes` is about, for the reader."""
        if len(self._polls) < 2:
            return "since the workers' start"
        return f"over the last {self._polls[-1][0] - self._polls[0][0]:.0f} s"

    def realised(self) -> float | None:
        """Counted distinct experts per layer of the step that a request is in."""
        return realised(list(self.changes().values()))

    def load(self) -> dict[str, float]:
        """Mean running requests of the workers that are in the fleet now."""
        if not self._loads:
            return {}
        total = dict.fromkeys(self._loads[-1], 0.0)
        for loads in self._loads:
            for name in total.keys() & loads.keys():
                total[name] += loads[name]
        return {name: sum_ / len(self._loads) for name, sum_ in total.items()}

    def expected_sums(self) -> dict[str, Weight]:
        """By fleet (the live one is LIVE): sums of requests x expected experts, and of requests.

        Over the same ticks, those in which requests ran in every fleet; experts of all layers.
        """
        sums: dict[str, Weight] = {}
        for weights in self._weights:
            known = {name: weight for name, weight in weights.items() if weight is not None}
            if len(known) < len(weights):
                continue
            for name, (experts, requests) in known.items():
                before = sums.get(name, (0.0, 0.0))
                sums[name] = before[0] + experts, before[1] + requests
        return sums

    def expected(self) -> tuple[float | None, dict[str, float]]:
        """Expected distinct experts per layer of a request's step: live, and by shadow policy."""
        return expected_means(self.expected_sums(), self.layers)


def expected_means(
    sums: Mapping[str, Weight], layers: int
) -> tuple[float | None, dict[str, float]]:
    """The means that `Window.expected_sums` are of, per layer: live, and by shadow policy."""
    means = {name: experts / requests / layers for name, (experts, requests) in sums.items()}
    return means.pop(LIVE, None), means


def _weight(status: Status) -> Weight | None:
    """(sum of requests x expected experts, requests); None if nothing runs or is expected."""
    running = float(sum(row["requests"] for row in status))
    if not running or any(row["experts"] is None for row in status):
        return None
    return sum(row["requests"] * row["experts"] for row in status), running
