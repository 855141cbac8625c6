"""Progress on stderr: one line that is rewritten on a terminal, plain lines elsewhere."""

from __future__ import annotations

import sys
import time
from typing import TextIO

_PLAIN_INTERVAL = 15.0  # seconds between progress lines where a line cannot be rewritten


class Console:
    """Prints steps and progress with the seconds since it was made."""

    def __init__(self, stream: TextIO | None = None) -> None:
        self._stream = stream if stream is not None else sys.stderr
        self._tty = self._stream.isatty()
        self._start = time.monotonic()
        self._last_plain = -_PLAIN_INTERVAL
        self._dirty = False

    @property
    def elapsed(self) -> float:
        """Seconds since this console was made."""
        return time.monotonic() - self._start

    def say(self, text: str) -> None:
        """A finished step: stays on the screen."""
        self._finish_line()
        self._stream.write(f"[{self.elapsed:5.0f} s] {text}\n")
        self._stream.flush()

    def progress(self, text: str) -> None:
        """A state that the next one replaces; off a terminal at most every 15 seconds."""
        if self._tty:
            self._stream.write(f"\r\x1b[K[{self.elapsed:5.0f} s] {text[:110]}")
            self._dirty = True
        elif self.elapsed - self._last_plain >= _PLAIN_INTERVAL:
            self._last_plain = self.elapsed
            self._stream.write(f"[{self.elapsed:5.0f} s] {text}\n")
        self._stream.flush()

    def _finish_line(self) -> None:
        if self._dirty:
            self._stream.write("\r\x1b[K")
            self._dirty = False
