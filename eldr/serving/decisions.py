"""The last decisions, for people and tools who ask why a request went where it went."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import islice
from typing import Any

from eldr.routing.decision import Decision
from eldr.serving.errors import ClientError

MOST_FOLLOWERS = 16


@dataclass(slots=True)
class Record:
    """One decision and the time it took.

    Attributes:
        time: seconds since the epoch.
        request_id: the client's X-Request-Id, or ours.
        decision_us: from the raw signature to the reserved worker, microseconds.
        prompt_tokens: length of the prompt in tokens, 0 if no leg said.
        coverage: of the signature, None without one.
    """

    time: float
    request_id: str
    prefill_worker: str
    decision: Decision
    decision_us: float
    prompt_tokens: int
    coverage: float | None

    def explain(self) -> dict[str, Any]:
        """Plain JSON values."""
        out = {f: getattr(self, f) for f in ("time", "request_id", "prefill_worker")}
        out.update(self.decision.explain())
        del out["request"]
        out["decision_us"] = round(self.decision_us, 1)
        out["prompt_tokens"] = self.prompt_tokens
        out["coverage"] = self.coverage
        return out


class DecisionBuffer:
    """A ring of the last decisions; explaining is left to the reader, recording is one append."""

    def __init__(self, size: int) -> None:
        self._ring: deque[Record] = deque(maxlen=size)
        self._followers: set[asyncio.Event] = set()
        self.total = 0

    def add(self, record: Record) -> None:
        """Keeps a decision, dropping the oldest."""
        self._ring.append(record)
        self.total += 1
        for news in self._followers:
            news.set()

    def newest(self, limit: int) -> Iterator[Record]:
        """Up to `limit` decisions, newest first."""
        return islice(reversed(self._ring), limit)

    @contextmanager
    def follower(self) -> Iterator[asyncio.Event]:
        """An event that is set at every new decision, while the block runs.

        Raises:
            ClientError: 503, too many follow.
        """
        if len(self._followers) >= MOST_FOLLOWERS:
            raise ClientError(503, "too_many_followers", f"{MOST_FOLLOWERS} follow already")
        news = asyncio.Event()
        self._followers.add(news)
        try:
            yield news
        finally:
            self._followers.discard(news)

    def since(self, seen: int) -> tuple[list[Record], int]:
        """Decisions after the first `seen`, oldest first, and how many of them are gone."""
        new = self.total - seen
        kept = list(self.newest(new))[::-1]
        return kept, new - len(kept)
