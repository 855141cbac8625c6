"""Decode counters of workers (GET /eldr/decode): checked, subtracted, turned into figures."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

F64 = npt.NDArray[np.float64]
# A worker is not trusted with our memory.
LARGEST_CELLS = 1 << 18


@dataclass(frozen=True, slots=True, eq=False)
class Counters:
    """Sums over a worker's decode-only steps.

    Attributes:
        steps: how many.
        use: float64 [L, E], steps in which each expert was read.
        by_batch: int64 [B, 3]: batch size, steps, experts read over all layers.
    """

    steps: int
    use: F64
    by_batch: npt.NDArray[np.int64]

    @property
    def layers(self) -> int:
        """Layers that the counts are of."""
        return int(self.use.shape[0])

    def since(self, earlier: Counters | None) -> Counters:
        """What was added after `earlier`; all of it if the worker restarted in between."""
        if earlier is None or earlier.use.shape != self.use.shape or earlier.steps > self.steps:
            return self
        if (earlier.use > self.use).any():
            return self
        known = {int(b): (int(s), int(x)) for b, s, x in earlier.by_batch}
        rows = [
            (b, s - known.get(int(b), (0, 0))[0], x - known.get(int(b), (0, 0))[1])
            for b, s, x in self.by_batch
        ]
        by_batch = np.array(rows, np.int64).reshape(-1, 3)
        return Counters(self.steps - earlier.steps, self.use - earlier.use, by_batch)

    def plus(self, later: Counters) -> Counters:
        """Both together; `later` alone if it is of another model."""
        if later.use.shape != self.use.shape:
            return later
        sums: dict[int, list[int]] = {}
        for batch, steps, read in [*self.by_batch.tolist(), *later.by_batch.tolist()]:
            row = sums.setdefault(batch, [0, 0])
            row[0] += steps
            row[1] += read
        by_batch = np.array([(b, *row) for b, row in sorted(sums.items())], np.int64)
        return Counters(self.steps + later.steps, self.use + later.use, by_batch.reshape(-1, 3))

    def per_step(self) -> float | None:
        """Mean distinct experts per step and layer; None without steps."""
        return float(self.use.sum()) / self.steps / self.layers if self.steps else None

    def request_weight(self) -> tuple[float, float]:
        """(sum of batch x distinct experts per layer, sum of batch) over the steps.

        Their ratio is the distinct experts per layer of the step that a request is in.
        """
        batch, steps, read = self.by_batch.T.astype(np.float64)
        return float((batch * read).sum()) / self.layers, float((batch * steps).sum())


def parse(answer: Any) -> Counters:
    """Checks a worker's answer.

    Raises:
        ValueError: not counters of version 1, or inconsistent ones; the message says which.
    """
    try:
        if answer["v"] != 1:
            raise ValueError(f"version {answer['v']!r}, this eldr reads 1")
        steps = int(answer["steps"])
        use = np.array(answer["use"], np.float64)
        rows = [(int(b), int(s), int(x)) for b, (s, x) in answer["by_batch"].items()]
    except (KeyError, TypeError, ValueError, AttributeError, OverflowError) as error:
        raise ValueError(f"no decode counters: {type(error).__name__}: {error}") from error
    if use.ndim != 2 or not 0 < use.size <= LARGEST_CELLS:
        raise ValueError(f"no decode counters: `use` of shape {use.shape}")
    if steps < 0 or not ((use >= 0) & (use <= steps)).all():
        raise ValueError(f"no decode counters: `use` outside [0, {steps} steps]")
    return Counters(steps, use, np.array(sorted(rows), np.int64).reshape(-1, 3))


def realised(changes: list[Counters]) -> float | None:
    """Distinct experts per layer of the step that a request is in, over all workers."""
    parts = [change.request_weight() for change in changes]
    weight = sum(requests for _, requests in parts)
    return sum(read for read, _ in parts) / weight if weight else None
