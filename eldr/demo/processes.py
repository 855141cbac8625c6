"""Owner of the child processes: starts them with logs, awaits health, stops all it started."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Self

from eldr.demo.console import Console

_ERROR_LINE = re.compile(r"error|exception|traceback|cannot|refused", re.IGNORECASE)
_STOP_GRACE = 20.0  # seconds between SIGTERM and SIGKILL
_PAUSE = 0.5  # seconds between two looks at what is waited for
_LOG_TAIL = 64_000  # bytes of a log that are searched for its last error


class ProcessFailed(RuntimeError):
    """A child that died or did not come up; the message names its log and last error."""


@dataclass(frozen=True, slots=True)
class Child:
    """One started process: its own session, its log, and the URL it serves."""

    name: str
    process: subprocess.Popen[bytes]
    log: Path
    url: str

    def last_error(self) -> str:
        """The last log line that looks like an error, or the last line at all."""
        with self.log.open("rb") as file:
            file.seek(max(0, self.log.stat().st_size - _LOG_TAIL))
            lines = [x.strip() for x in file.read().decode(errors="replace").splitlines()]
        lines = [line for line in lines if line]
        errors = [line for line in lines if _ERROR_LINE.search(line)]
        return (errors or lines or ["(the log is empty)"])[-1]


class Supervisor:
    """Context manager: whatever was started inside is stopped on the way out, always."""

    def __init__(self, logs: Path, console: Console) -> None:
        self._logs = logs
        self._console = console
        self._children: list[Child] = []
        logs.mkdir(parents=True, exist_ok=True)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        with uninterrupted():
            self.stop(*self._children)

    def start(
        self,
        name: str,
        command: Sequence[str],
        url: str,
        env: Mapping[str, str] | None = None,
        niceness: int = 0,
    ) -> Child:
        """Starts `command` in a session of its own, so that its descendants can be stopped too.

        Args:
            name: for messages and the log file.
            command: program and arguments.
            url: where it will answer GET /health.
            env: added to this process's environment.
            niceness: 0 to 19, how readily it and its descendants give way to other processes.
        """
        log = self._logs / f"{name}.log"
        with log.open("wb") as file:
            process = subprocess.Popen(
                list(command),
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=subprocess.STDOUT,
                env={**os.environ, **(env or {})},
                start_new_session=True,
            )
        child = Child(name, process, log, url)
        self._children.append(child)
        if niceness:
            _give_way(process.pid, niceness)
        return child

    def wait_healthy(self, children: Sequence[Child], timeout: float) -> None:
        """Returns when each answers GET /health with 200.

        Raises:
            ProcessFailed: one of them ended, or `timeout` seconds passed.
        """
        self.wait(
            children,
            lambda child: None if _healthy(child.url) else f"answer {child.url}/health",
            timeout,
        )

    def wait(
        self, children: Sequence[Child], missing: Callable[[Child], str | None], timeout: float
    ) -> None:
        """Returns when nothing is missing any more.

        Args:
            children: that are waited for.
            missing: what a child has yet to do, as words after "did not"; None once it has.
            timeout: seconds.

        Raises:
            ProcessFailed: one of them ended, or `timeout` seconds passed.
        """
        deadline = time.monotonic() + timeout
        waiting = list(children)
        while True:
            for child in children:
                self.check_alive(child)
            words = {child.name: said for child in waiting if (said := missing(child))}
            waiting = [child for child in waiting if child.name in words]
            if not waiting:
                return
            if time.monotonic() > deadline:
                child = waiting[0]
                raise ProcessFailed(
                    f"{child.name} did not {words[child.name]} within {timeout:.0f} s\n"
                    f"  log:  {child.log}\n  last: {child.last_error()}"
                )
            up = len(children) - len(waiting)
            self._console.progress(f"waiting for {', '.join(words)} ({up} of {len(children)} up)")
            time.sleep(_PAUSE)

    def check_alive(self, child: Child) -> None:
        """Raises `ProcessFailed` if the process has ended."""
        code = child.process.poll()
        if code is not None:
            raise ProcessFailed(
                f"{child.name} ended with exit code {code}\n"
                f"  log:  {child.log}\n  last: {child.last_error()}"
            )

    def stop(self, *children: Child) -> None:
        """Stops these and their descendants: SIGTERM, then SIGKILL after a grace period."""
        for child in children:
            _signal_group(child, signal.SIGTERM)
        deadline = time.monotonic() + _STOP_GRACE
        for child in children:
            try:
                child.process.wait(max(0.0, deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                self._console.say(f"{child.name} ignored SIGTERM for {_STOP_GRACE:.0f} s: killed")
            # The leader may be gone while a descendant still runs in its process group.
            _signal_group(child, signal.SIGKILL)
            child.process.wait()
        self._children = [child for child in self._children if child not in children]


@contextmanager
def uninterrupted() -> Iterator[None]:
    """For the end of processes: a second Ctrl-C must not leave half of them running."""
    previous = {n: signal.signal(n, signal.SIG_IGN) for n in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)


def _give_way(pid: int, niceness: int) -> None:
    os.setpriority(os.PRIO_PROCESS, pid, niceness)
    # Where the kernel groups processes by session, only the group's niceness counts.
    group = Path(f"/proc/{pid}/autogroup")
    if group.exists():
        group.write_text(str(niceness))


def _signal_group(child: Child, number: signal.Signals) -> None:
    try:
        os.killpg(child.process.pid, number)
    except ProcessLookupError:
        return  # the whole group has ended already


def _healthy(url: str) -> bool:
    try:
        with urllib.request.urlopen(f"{url}/health", timeout=5) as answer:
            return bool(answer.status == 200)
    except (urllib.error.URLError, OSError):
        return False
