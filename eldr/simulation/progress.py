"""A progress bar on standard error; plain lines where `rich` is missing or nobody watches."""

from __future__ import annotations

import sys
import time
from types import TracebackType
from typing import Any

_EVERY = 10.0  # seconds between plain lines


class Progress:
    """Call it with (done, total); silent for work shorter than a plain line's period."""

    def __init__(self, label: str) -> None:
        self._label, self._bar, self._task = label, None, None
        self._last = time.monotonic()

    def __enter__(self) -> Progress:
        if sys.stderr.isatty():
            self._bar = _rich_bar()
            if self._bar is not None:
                self._bar.start()
                self._task = self._bar.add_task(self._label, total=None)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._bar is not None:
            self._bar.stop()

    def __call__(self, done: int, total: int) -> None:
        """Shows how far it is."""
        if self._bar is not None:
            self._bar.update(self._task, completed=done, total=total)
        elif time.monotonic() - self._last >= _EVERY:
            self._last = time.monotonic()
            print(f"{self._label}: {done} of {total}", file=sys.stderr, flush=True)


def _rich_bar() -> Any:
    try:
        from rich.console import Console
        from rich.progress import Progress as Bar
    except ImportError:
        return None
    return Bar(console=Console(stderr=True), transient=True)
