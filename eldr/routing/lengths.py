"""How long a request is expected to decode, relative to the others."""

from __future__ import annotations

# When this many lengths were seen, all weigh half.
WINDOW = 2048
# Below this many a mean says little.
ENOUGH = 16
# A factor between these bounds: lengths are predictions, and spread over three decades.
LEAST, MOST = 0.5, 2.0


class Lengths:
    """Mean of the predicted decode lengths of the requests placed; old ones fade."""

    def __init__(self) -> None:
        self._sum = self._count = 0

    def add(self, tokens: int | None) -> None:
        """Takes one request's prediction; None or less than 1 token = unknown, ignored."""
        if tokens is None or tokens < 1:
            return
        self._sum += tokens
        self._count += 1
        if self._count >= WINDOW:
            self._sum //= 2
            self._count //= 2

    def relative(self, tokens: int | None) -> float:
        """What share of the mean `tokens` is, in [LEAST, MOST]; 1 while either is unknown."""
        if tokens is None or tokens < 1 or self._count < ENOUGH:
            return 1.0
        return min(MOST, max(LEAST, tokens * self._count / self._sum))
