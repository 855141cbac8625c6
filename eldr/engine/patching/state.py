"""Compares a tree with a series, file by file, by hash: what may be touched and what may not."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from eldr.engine.patching import record as records
from eldr.engine.patching.manifest import ABSENT
from eldr.engine.patching.place import unplace
from eldr.engine.patching.record import Record
from eldr.engine.patching.series import Series
from eldr.engine.patching.target import Target, digest

# States of a file. Only the last three stand in the way of an apply.
PRISTINE, PATCHED, OLDER = "pristine", "patched", "older"
OTHER, MISSING, DRIFTED = "other-upstream", "missing", "drifted"
PARTIAL = "partial"  # of a tree: an interrupted apply or revert
SOUND = (PRISTINE, PATCHED, OLDER)


@dataclass(frozen=True, slots=True)
class FileState:
    """One file: its state, and its hash now."""

    path: str
    state: str
    sha256: str


@dataclass(frozen=True, slots=True)
class Survey:
    """A tree's state with respect to a series.

    Attributes:
        files: every file that the series, or the series recorded in the tree, touches.
        record: what an earlier apply left there.
        state: `pristine`, `patched` (with this series), `older` (with another one, untouched
            since), `partial`, `other-upstream`, `missing` or `drifted`.
    """

    series: Series
    target: Target
    files: tuple[FileState, ...]
    record: Record | None

    @property
    def state(self) -> str:
        """The worst file's state; a mixture of sound ones is `older` or `partial`."""
        states = {file.state for file in self.files}
        for bad in (DRIFTED, MISSING, OTHER, OLDER):
            if bad in states:
                return bad
        return states.pop() if len(states) == 1 else PARTIAL if states else PATCHED

    @property
    def version_fits(self) -> bool:
        """Whether the installed release is the series' own; a checkout is judged by hash alone."""
        version = self.target.version
        return not version or self.series.upstream.matches(version)

    def obstacles(self) -> tuple[FileState, ...]:
        """The files that are in no state an apply may start from."""
        return tuple(file for file in self.files if file.state not in SOUND)


def survey(series: Series, target: Target) -> Survey:
    """Reads and hashes every touched file; changes nothing."""
    record = records.load(records.path_in(target.root, series.upstream.name))
    paths = set(series.paths) | (record.files.keys() if record else set())
    states = tuple(_state(path, series, target, record) for path in sorted(paths))
    return Survey(series, target, states, record)


def _state(path: str, series: Series, target: Target, record: Record | None) -> FileState:
    now = digest(target.read(path))
    pin = series.upstream.files.get(path)
    entry = record.files.get(path) if record else None
    same = record is not None and record.series == series.digest
    if (pin and now == pin.after) or (entry and same and now == entry.after):
        state = PATCHED
    elif now == (pin.before if pin else entry.before if entry else ABSENT):
        state = PRISTINE
    elif pin is None and now == target.recorded.get(path):
        state = PRISTINE  # the record is from before a reinstall
    elif entry and entry.explains(now):
        state = OLDER
    elif now == target.recorded.get(path) or (entry and now == entry.before):
        state = OTHER
    else:
        state = MISSING if now == ABSENT else DRIFTED
    return FileState(path, state, now)


def originals(found: Survey, accept: Callable[[FileState], bool]) -> dict[str, bytes | None] | None:
    """Content of every file before any patching, or None if that cannot be known.

    Args:
        found: the tree's survey.
        accept: whether a file that is in no sound state may count as original as it stands.
    """
    before = dict[str, bytes | None]()
    patched = dict[str, bytes | None]()
    for file in found.files:
        raw = found.target.read(file.path)
        entry = found.record.files.get(file.path) if found.record else None
        if file.state == PRISTINE or (file.state not in SOUND and accept(file)):
            before[file.path] = raw
        elif entry and entry.explains(file.sha256) and digest(entry.original) == entry.before:
            before[file.path] = entry.original
        elif file.state == PATCHED:
            patched[file.path] = raw
        else:
            return None
    undone = unplace(found.series.patches, patched)
    if undone is None:
        return None
    pins = found.series.upstream.files
    proven = all(digest(raw) == pins[path].before for path, raw in undone.items())
    return before | undone if proven else None
