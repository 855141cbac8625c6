"""Refits in a thread, for a program that routes by itself instead of running `eldr serve`."""

from __future__ import annotations

import logging
import threading

from eldr.routing.policies.locality import LocalityBand
from eldr.routing.refit import Drift, Window
from eldr.routing.refit_job import Job, propose

_log = logging.getLogger(__name__)


class Refitter:
    """Keeps a policy's partition fitted to a window, in its own thread or step by step.

    An attempt is the router's (`refit_job.propose`): nothing without drift, a refit that keeps the
    identity of workers, a fresh fit if that promises nothing, and load alone while the partition's
    estimated gain is negative. A thread shares the interpreter with whoever decides meanwhile;
    the router lets a process of low priority do it (`eldr.serving.refit`).

    Args:
        policy: has a partition, or is left alone until it has.
        window: the program adds the signatures that it routed.
        least: signatures before the first attempt.
        batch: mean running requests per worker.

    Attributes:
        refits, failures: how often an attempt replaced the partition, or failed and kept it.
        last: the last drift that was measured, None before.
    """

    def __init__(
        self, policy: LocalityBand, window: Window, *, least: int = 64, batch: float = 16.0
    ) -> None:
        self._policy, self._window = policy, window
        self._least, self._batch = least, batch
        self.refits = self.failures = 0
        self.last: Drift | None = None
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None

    def step(self) -> bool:
        """One attempt; whether it replaced the partition. One that fails is counted and logged."""
        old, held = self._policy.partition, self._window.signatures()
        if old is None or len(held) < max(self._least, old.workers):
            return False
        try:
            found = propose(Job(self._window.geometry, held, old.names, old, self._batch))
        except ValueError as error:
            self.failures += 1
            _log.warning("refit failed, the old partition stays: %s", error)
            return False
        if found.partition is not None:
            self._policy.use(found.partition)
            self.refits += 1
        self._policy.paused = found.pause
        self.last = found.drift
        return found.partition is not None

    def start(self, interval: float = 5.0) -> None:
        """Runs `step` every `interval` seconds in a daemon thread until `stop`.

        Raises:
            RuntimeError: it runs already.
        """
        if self._thread is not None:
            raise RuntimeError("refitter: started already")

        def loop() -> None:
            while not self._stop.wait(interval):
                self.step()

        self._thread = threading.Thread(target=loop, name="eldr-refit", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """Ends the thread and waits for a running step."""
        self._stop.set()
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        self._stop.clear()
