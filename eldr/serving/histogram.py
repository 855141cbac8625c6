"""A histogram and a counter for one thread: an observation is a bisection and two additions.

The client library's own take a lock each time, and a histogram walks its buckets, which a request
pays several times; the exposition is still the library's.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import defaultdict
from collections.abc import Iterable, Sequence

from prometheus_client import CollectorRegistry
from prometheus_client.core import CounterMetricFamily, HistogramMetricFamily


class Histogram:
    """Counts per bucket and the sum, per value of at most one label."""

    def __init__(
        self,
        name: str,
        text: str,
        buckets: Sequence[float],
        labels: Sequence[str],
        registry: CollectorRegistry,
    ) -> None:
        self._name, self._text, self._labels = name, text, labels
        self._bounds = list(buckets)
        self._counts: dict[str, list[int]] = {} if labels else {"": [0] * (len(buckets) + 1)}
        self._sums: dict[str, float] = dict.fromkeys(self._counts, 0.0)
        registry.register(self)

    def observe(self, value: float, label: str = "") -> None:
        """Takes in a value."""
        counts = self._counts.get(label)
        if counts is None:
            counts = self._counts[label] = [0] * (len(self._bounds) + 1)
            self._sums[label] = 0.0
        counts[bisect_left(self._bounds, value)] += 1
        self._sums[label] += value

    def collect(self) -> Iterable[HistogramMetricFamily]:
        """Called by the registry."""
        family = HistogramMetricFamily(self._name, self._text, labels=self._labels)
        for label, counts in self._counts.items():
            total, buckets = 0, []
            for bound, n in zip([*map(str, self._bounds), "+Inf"], counts, strict=True):
                total += n
                buckets.append((bound, total))
            family.add_metric([label] if self._labels else [], buckets, self._sums[label])
        yield family


class Tally:
    """Counts per tuple of label values."""

    def __init__(
        self, name: str, text: str, labels: Sequence[str], registry: CollectorRegistry
    ) -> None:
        self._name, self._text, self._labels = name, text, labels
        self.counts: defaultdict[tuple[str, ...], int] = defaultdict(int)
        if not labels:
            self.counts[()] = 0
        registry.register(self)

    def add(self, *labels: str, count: int = 1) -> None:
        """Counts one, or several."""
        self.counts[labels] += count

    def collect(self) -> Iterable[CounterMetricFamily]:
        """Called by the registry."""
        family = CounterMetricFamily(self._name, self._text, labels=self._labels)
        for labels, count in self.counts.items():
            family.add_metric(labels, count)
        yield family
