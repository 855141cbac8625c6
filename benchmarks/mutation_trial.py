"""Runs tests on mutants: one collected pytest session, forked for every mutant.

Most mutants change the inside of a function. For them a child of the process that has collected the
tests takes over the changed code objects and runs the tests that reach the changed statement, the
quickest first, until one fails. What runs while modules are imported (tables, defaults of
arguments, class bodies) needs a process that has not imported them: `fresh_verdict`.
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import importlib.util
import json
import os
import resource
import signal
import sys
import threading
import time
import types
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.mutants import Mutant

_SURVIVED, _KILLED, _CANNOT = 0, 1, 77
QUIET = ("-q", "-s", "-p", "no:cacheprovider", "--tb=native", "--hypothesis-seed=0")
Lines = set[tuple[str, int]]


@dataclass
class Baseline:
    """What the tests do without a mutant.

    Attributes:
        seconds: CPU time of every test, by node id, while it was traced.
        lines: (path, line) of the core that every test ran.
        imported: lines that ran while the tests were collected.
    """

    seconds: dict[str, float] = field(default_factory=dict)
    lines: dict[str, Lines] = field(default_factory=dict)
    imported: Lines = field(default_factory=set)

    def tests(self, mutant: Mutant) -> list[str]:
        """Tests that can notice it, the quickest first."""
        span = _lines(mutant)
        reached = [name for name, lines in self.lines.items() if lines & span]
        return sorted(reached, key=self.seconds.__getitem__)

    def needs_import(self, mutant: Mutant) -> bool:
        """Whether the changed statement runs while modules are imported."""
        return bool(self.imported & _lines(mutant))


def _lines(mutant: Mutant) -> Lines:
    return {(mutant.path, line) for line in range(mutant.span[0], mutant.span[1] + 1)}


class Trace:
    """Records which lines of some files run, in every thread, between `start` and `stop`."""

    def __init__(self, root: Path, paths: Sequence[str]) -> None:
        self._names = {str(root / path): path for path in paths}
        self._lines: Lines = set()

    def start(self) -> None:
        """Begins with no line."""
        self._lines = set()
        threading.settrace(self._called)
        sys.settrace(self._called)

    def stop(self) -> Lines:
        """The lines since `start`."""
        sys.settrace(None)
        threading.settrace(None)
        return self._lines

    def _called(self, frame: types.FrameType, event: str, arg: Any) -> Any:
        path = self._names.get(frame.f_code.co_filename)
        if path is None:
            return None
        lines = self._lines

        def line(frame: types.FrameType, event: str, arg: Any) -> Any:
            lines.add((path, frame.f_lineno))
            return line

        return line


def take_over(source: str, module: types.ModuleType) -> None:
    """Gives the functions of an imported module the code that they have in `source`.

    Raises:
        ValueError: a function has other free variables there.
    """
    changed = types.ModuleType(module.__name__)
    changed.__file__ = module.__file__
    sys.modules[module.__name__], kept = changed, module  # dataclasses look their module up
    exec(compile(source, str(module.__file__), "exec"), changed.__dict__)
    sys.modules[module.__name__] = kept
    new = dict(_functions(changed))
    for name, function in _functions(module):
        if function.__code__ != new[name].__code__:
            function.__code__ = new[name].__code__


def _functions(module: types.ModuleType) -> Iterator[tuple[str, types.FunctionType]]:
    """The functions and methods that a module defines, by qualified name."""
    for value in list(vars(module).values()):
        members = vars(value).values() if isinstance(value, type) else [value]
        for member in members:
            member = member.fget if isinstance(member, property) else member
            member = getattr(member, "__func__", member)
            if isinstance(member, types.FunctionType) and member.__module__ == module.__name__:
                yield member.__qualname__, member


class Session:
    """A pytest plugin that tries mutants in place of running the tests once.

    Args:
        root: of the tree.
        core: paths of the files whose lines are traced.
        plan: the mutants.
        found: is told every mutant's verdict, or None for one that needs a fresh process; its
            first call, with None for the mutant too, follows the run without any.
    """

    def __init__(
        self,
        root: Path,
        core: Sequence[str],
        plan: Sequence[Mutant],
        found: Callable[[Mutant | None, str | None, Baseline], None],
    ) -> None:
        self._trace = Trace(root, core)
        self._plan, self._found = plan, found
        self._items: dict[str, Any] = {}
        self._trace.start()

    def pytest_runtestloop(self, session: Any) -> bool:
        """Everything that this process does with the collected tests."""
        baseline = Baseline(imported=self._trace.stop())
        self._items = {item.nodeid: item for item in session.items}
        self._measure(baseline)
        self._found(None, None, baseline)
        for mutant in self._plan:
            self._found(mutant, self._verdict(mutant, baseline), baseline)
        return True

    def _measure(self, baseline: Baseline) -> None:
        """Fills the baseline in a child, so that this process stays as it was collected."""
        read, write = os.pipe()
        child = os.fork()
        if not child:
            _alone(lambda: self._report(write))
        os.close(write)
        with os.fdopen(read) as pipe:
            text = pipe.read()
        if os.waitpid(child, 0)[1] != 0:
            raise RuntimeError(f"without any mutant the tests do not pass: {text[-500:]}")
        for name, (seconds, lines) in json.loads(text).items():
            baseline.seconds[name] = seconds
            baseline.lines[name] = {(path, line) for path, line in lines}

    def _report(self, write: int) -> int:
        told: dict[str, Any] = {}
        failed = []
        for name, item in self._items.items():
            started = time.process_time()
            self._trace.start()
            if _fails(item):
                failed.append(name)
            told[name] = time.process_time() - started, sorted(self._trace.stop())
        with os.fdopen(write, "w") as pipe:
            pipe.write(" ".join(failed) if failed else json.dumps(told))
        return _KILLED if failed else _SURVIVED

    def _verdict(self, mutant: Mutant, baseline: Baseline) -> str | None:
        if baseline.needs_import(mutant):
            return None
        tests = baseline.tests(mutant)
        if not tests:
            return "unreached"
        limit = 10 * sum(baseline.seconds[name] for name in tests) + 5
        child = os.fork()
        if not child:
            _alone(lambda: self._try(mutant, tests), limit)
        return waited(child, limit)

    def _try(self, mutant: Mutant, tests: Sequence[str]) -> int:
        try:
            take_over(mutant.source, sys.modules[mutant.path[:-3].replace("/", ".")])
        except ValueError:
            return _CANNOT
        return _KILLED if any(_fails(self._items[name]) for name in tests) else _SURVIVED


def _fails(item: Any) -> bool:
    """Runs one test with its fixtures."""
    from _pytest.runner import runtestprotocol

    return any(report.failed for report in runtestprotocol(item, log=False))


def _alone(run: Callable[[], int], cpu_seconds: float = 0.0) -> None:
    """Ends a forked child with what `run` returns, in silence, within a limit of CPU time."""
    try:
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, 1)
        os.dup2(nowhere, 2)
        if cpu_seconds:
            whole = int(cpu_seconds) + 1 + int(time.process_time())
            resource.setrlimit(resource.RLIMIT_CPU, (whole, whole))
        os._exit(run())
    finally:
        os._exit(99)


def waited(child: int, limit: float) -> str | None:
    """`survived`, `killed` or `timeout`; None where the mutant needs a fresh process.

    Args:
        child: its process.
        limit: seconds of CPU time it got; waiting ends after twenty times as many, for a child that
            waits for ever needs none.
    """
    end = time.monotonic() + 20 * limit
    while time.monotonic() < end:
        done, status = os.waitpid(child, os.WNOHANG)
        if done:
            if os.WIFSIGNALED(status) and os.WTERMSIG(status) in (signal.SIGXCPU, signal.SIGKILL):
                return "timeout"
            code = os.waitstatus_to_exitcode(status)
            return {_SURVIVED: "survived", _CANNOT: None}.get(code, "killed")
        time.sleep(0.005)  # waitpid knows no time limit; a mutant takes tens of milliseconds
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    return "timeout"


class _Instead(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Imports a mutant in place of its file."""

    def __init__(self, root: Path, mutant: Mutant) -> None:
        self._name = mutant.path[:-3].replace("/", ".")
        self._file, self._mutant = root / mutant.path, mutant

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: types.ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        """Only the mutant's module is ours."""
        if name != self._name:
            return None
        return importlib.util.spec_from_file_location(name, self._file, loader=self)

    def exec_module(self, module: types.ModuleType) -> None:
        """Runs the mutant."""
        exec(compile(self._mutant.source, self._mutant.path, "exec"), module.__dict__)


class _QuickFirst:
    """A pytest plugin: the order of the tests."""

    def __init__(self, seconds: Mapping[str, float]) -> None:
        self._seconds = seconds

    def pytest_collection_modifyitems(self, items: list[Any]) -> None:
        """Sorts them."""
        items.sort(key=lambda item: self._seconds.get(item.nodeid, 0.0))


def fresh_verdict(
    root: Path, mutant: Mutant | None, tests: Sequence[str], seconds: Mapping[str, float]
) -> str | None:
    """Like `waited`, for a mutant that is imported instead of its file; None: no mutant.

    Args:
        root: of the tree; this process has not imported the core from it.
        mutant: the one to try.
        tests: files.
        seconds: CPU time of every test.
    """

    def run() -> int:
        import pytest

        if mutant is not None:
            sys.meta_path.insert(0, _Instead(root, mutant))
        return int(pytest.main(["-x", *QUIET, *tests], plugins=[_QuickFirst(seconds)]))

    limit = 10 * sum(seconds.values()) + 30
    child = os.fork()
    if not child:
        _alone(run, limit)
    return waited(child, limit)
