"""Which launches happened inside which range, by correlation id."""

from __future__ import annotations

from array import array
from bisect import bisect_left
from collections.abc import Callable
from dataclasses import dataclass, field


@dataclass(slots=True)
class Launches:
    """Launches inside ranges of one process: parallel arrays, by correlation id.

    Millions of them must fit, so no dictionary. Correlation ids grow with time; should they come
    out of order, they are sorted before the first question.
    """

    ids: array[int] = field(default_factory=lambda: array("q"))
    names: list[str] = field(default_factory=list)
    which: array[int] = field(default_factory=lambda: array("h"))
    sorted: bool = True

    def add(self, correlation: int, name: str) -> None:
        """Notes a launch inside a range."""
        if name not in self.names:
            self.names.append(name)
        self.sorted = self.sorted and (not self.ids or self.ids[-1] <= correlation)
        self.ids.append(correlation)
        self.which.append(self.names.index(name))

    def lookup(self) -> Callable[[int], str | None]:
        """A function from correlation id to range name."""
        if not self.sorted:
            order = sorted(range(len(self.ids)), key=self.ids.__getitem__)
            self.which = array("h", (self.which[i] for i in order))
            self.ids = array("q", sorted(self.ids))
            self.sorted = True
        ids, which, names, count = self.ids, self.which, self.names, len(self.ids)

        def range_of(correlation: int) -> str | None:
            at = bisect_left(ids, correlation)
            return names[which[at]] if at < count and ids[at] == correlation else None

        return range_of
