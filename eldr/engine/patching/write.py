"""Replaces several files of a tree so that a reader, an error or a kill never sees half a file.

Everything is staged beside its destination first, so that a full disk or a read-only folder stops
the work before it starts; then each file is renamed into place, which gives hard-linked or
symlinked installs their own copy. An error on the way puts the earlier files back.
"""

from __future__ import annotations

import fcntl
import os
import stat
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from eldr.engine.patching.errors import PatchError

_STAGED = ".eldr-staged"


@contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Holds the tree against a second patch tool; leaves no file behind.

    Raises:
        PatchError: another one is at work.
    """
    handle = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        yield
    except BlockingIOError as error:
        raise PatchError(
            f"{folder}: another `eldr patch` is at work; nothing was changed"
        ) from error
    finally:
        os.close(handle)


def replace_files(root: Path, changes: Mapping[str, bytes | None]) -> None:
    """Gives each path its new content (None: removes it), in the mapping's order.

    Raises:
        PatchError: nothing was changed, or everything was put back; the message says which.
    """
    staged = _stage(root, changes)
    undo = list[tuple[Path, bytes | None]]()
    try:
        for path, raw in changes.items():
            file = root / path
            undo.append((file, file.read_bytes() if file.exists() else None))
            if raw is None:
                file.unlink(missing_ok=True)
            else:
                staged.pop(file).replace(file)
            _drop_bytecode(file)
    except BaseException as error:
        _put_back(undo)
        _discard(staged)
        if isinstance(error, OSError):
            raise PatchError(f"{error}; every file was put back as it was") from error
        raise


def _stage(root: Path, changes: Mapping[str, bytes | None]) -> dict[Path, Path]:
    staged = dict[Path, Path]()
    try:
        for path, raw in changes.items():
            if raw is not None:
                file = root / path
                staged[file] = file.with_name(f".{file.name}{_STAGED}")
                _write(staged[file], raw, _mode(file))
    except OSError as error:
        _discard(staged)
        raise PatchError(f"{error}; nothing was changed") from error
    return staged


def _write(file: Path, raw: bytes, mode: int) -> None:
    file.unlink(missing_ok=True)  # left over from a run that was killed
    with file.open("xb") as out:
        out.write(raw)
        out.flush()
        os.fsync(out.fileno())
    file.chmod(mode)


def _mode(file: Path) -> int:
    """The file's own permissions; for a new one, those of its folder without execute bits."""
    source = file if file.exists() else file.parent
    return stat.S_IMODE(source.stat().st_mode) & (0o777 if source == file else 0o666)


def _drop_bytecode(file: Path) -> None:
    """Python trusts bytecode by time and size, which a replacement within a second may keep."""
    for cached in (file.parent / "__pycache__").glob(f"{file.stem}.*.pyc"):
        cached.unlink(missing_ok=True)


def _put_back(undo: list[tuple[Path, bytes | None]]) -> None:
    for file, raw in reversed(undo):
        if raw is None:
            file.unlink(missing_ok=True)
        else:
            spare = file.with_name(f".{file.name}{_STAGED}")
            _write(spare, raw, _mode(file))
            spare.replace(file)


def _discard(staged: Mapping[Path, Path]) -> None:
    for spare in staged.values():
        spare.unlink(missing_ok=True)
