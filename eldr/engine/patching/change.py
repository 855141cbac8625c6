"""Apply and revert: all of it, or nothing, and only from states that are known by hash."""

from __future__ import annotations

from dataclasses import dataclass

from eldr.engine.patching import record as records
from eldr.engine.patching.errors import PatchError
from eldr.engine.patching.place import Placement, Result, place
from eldr.engine.patching.record import Entry, Record
from eldr.engine.patching.series import Series
from eldr.engine.patching.state import (
    DRIFTED,
    MISSING,
    OTHER,
    PATCHED,
    FileState,
    Survey,
    originals,
    survey,
)
from eldr.engine.patching.target import Target, digest
from eldr.engine.patching.write import locked, replace_files

_REASONS = {
    DRIFTED: "was edited: neither upstream's content nor a patched one",
    MISSING: "does not exist",
    OTHER: "is unmodified, but of another upstream release or build",
}


@dataclass(frozen=True, slots=True)
class Outcome:
    """What a change did: the tree's state before, and the files written or removed."""

    before: str
    changed: tuple[str, ...]


def check(series: Series, target: Target) -> tuple[Survey, tuple[Placement, ...]]:
    """Where every hunk of the whole series would go; changes nothing.

    A patched tree is judged by its originals, a drifted one by what is there now.
    """
    found = survey(series, target)
    tree = originals(found, accept=lambda file: True)
    if tree is None:
        tree = {path: target.read(path) for path in series.paths}
    return found, place(series.patches, tree).placements


def apply(series: Series, target: Target, *, force_version: bool = False) -> Outcome:
    """Patches the tree, or moves it from the series recorded in it to this one.

    An interrupted apply is completed. A tree that is patched already is left alone: the outcome
    then has no changed files.

    Args:
        series: what to apply.
        target: where.
        force_version: accept another release if its files are unmodified and every hunk has
            exactly one place.

    Raises:
        PatchError: another release, a drifted file, a conflict or an unwritable tree; nothing was
            changed.
    """
    with locked(target.root / series.upstream.name):
        found = survey(series, target)
        if found.state == PATCHED and (found.record is None or _recorded(found)):
            return Outcome(PATCHED, ())
        if not found.version_fits and not force_version:
            raise PatchError(
                f"{target}: the series is for {series.upstream.name} {series.upstream.version}; "
                "nothing was changed. `eldr patch check` shows which hunks fit; --force-version "
                "applies them if all do"
            )
        before = _originals(found, force_version)
        result = place(series.patches, before)
        _reject(result, series, strict=not force_version)
        return _write(found, before, result)


def _recorded(found: Survey) -> bool:
    return found.record is not None and found.record.series == found.series.digest


def _originals(found: Survey, force_version: bool) -> dict[str, bytes | None]:
    def accept(file: FileState) -> bool:
        return force_version and file.state == OTHER

    before = originals(found, accept)
    if before is None:
        raise PatchError(f"{found.target}: nothing was changed, because\n" + explain(found))
    return before


def explain(found: Survey) -> str:
    """One line per file that stands in the way, and what to do."""
    lines = [f"  {file.path} {_REASONS[file.state]}" for file in found.obstacles()]
    upstream = found.series.upstream
    name = found.target.distribution or upstream.name
    return "\n".join(
        [*lines, f"restore it, e.g. reinstall {name} {upstream.version}, then run apply again"]
    )


def _reject(result: Result, series: Series, *, strict: bool) -> None:
    """Refuses conflicts, unpinned results, and Python that does not compile."""
    if result.conflicts:
        first = result.conflicts[0]
        raise PatchError(
            f"{len(result.conflicts)} of {len(result.placements)} hunks do not fit, the first is "
            f"{first.patch}, {first.path} hunk {first.number}: {first.problem}; nothing was "
            "changed. `eldr patch check` shows them all"
        )
    for path, raw in result.contents.items():
        if strict and digest(raw) != series.upstream.files[path].after:
            raise PatchError(
                f"{path}: the patches do not make the file that {series.directory} pins; nothing "
                "was changed. If the patches were edited, run `eldr patch pin`"
            )
        if path.endswith(".py"):
            _compiles(path, raw)


def _compiles(path: str, raw: bytes) -> None:
    try:
        compile(raw, path, "exec", dont_inherit=True)
    except (SyntaxError, ValueError) as error:
        raise PatchError(
            f"{path}: does not compile once patched: {error}; nothing was changed"
        ) from error


def _write(found: Survey, before: dict[str, bytes | None], result: Result) -> Outcome:
    series, root = found.series, found.target.root
    # Files that only an older series touched go back to their originals.
    wanted: dict[str, bytes | None] = {**before, **result.contents}
    now = {file.path: file.sha256 for file in found.files}
    entries = {
        path: Entry(digest(before[path]), digest(raw), now[path], before[path])
        for path, raw in wanted.items()
    }
    record = Record(series.digest, found.target.version or series.upstream.version, entries)
    changes = {path: raw for path, raw in wanted.items() if raw != found.target.read(path)}
    note = records.path_in(root, series.upstream.name).relative_to(root).as_posix()
    # The record goes first: after a kill between two renames, every file is known by hash.
    replace_files(root, {note: records.dump(record), **changes})
    return Outcome(found.state, tuple(sorted(changes)))


def revert(series: Series, target: Target) -> Outcome:
    """Puts every original back; also for a series other than this one, if the tree records it.

    Raises:
        PatchError: a file was edited since; nothing was changed.
    """
    with locked(target.root / series.upstream.name):
        found = survey(series, target)
        note = records.path_in(target.root, series.upstream.name)
        before = originals(found, lambda file: _foreign_original(file, found.record))
        if before is None:
            raise PatchError(f"{target}: nothing was changed, because\n" + explain(found))
        changes = {path: raw for path, raw in before.items() if raw != target.read(path)}
        if changes or note.exists():
            gone: dict[str, bytes | None] = {note.relative_to(target.root).as_posix(): None}
            replace_files(target.root, {**changes, **gone})
        return Outcome(found.state, tuple(sorted(changes)))


def _foreign_original(file: FileState, record: Record | None) -> bool:
    """An unmodified file of a release that was patched by force, or that no record mentions."""
    entry = record.files.get(file.path) if record else None
    return file.state == OTHER or (entry is not None and file.sha256 == entry.before)
