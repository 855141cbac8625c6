"""The files of another upstream release: from a folder, a git tag, or a package index."""

from __future__ import annotations

import io
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from eldr.engine.patching import git
from eldr.engine.patching.errors import CannotTell
from eldr.engine.patching.manifest import Upstream
from eldr.engine.patching.target import locate


@dataclass(frozen=True, slots=True)
class Release:
    """Another release's copies of the touched files.

    Attributes:
        name: how the user named it.
        version: its version, empty if a bare folder does not tell.
        files: contents by path; None for a file that does not exist there.
        revision: git's name for it when it came from a repository, else empty.
    """

    name: str
    version: str
    files: dict[str, bytes | None]
    revision: str = ""


def fetch(
    upstream: Upstream,
    onto: str,
    paths: Iterable[str],
    repo: Path | None = None,
    version: str | None = None,
) -> Release:
    """Reads the touched files of a release.

    Args:
        upstream: whose release.
        onto: a folder, or a version.
        paths: the files of interest.
        repo: a clone of upstream to take a version from, instead of asking pip.
        version: what a folder is, if it does not tell itself.

    Raises:
        CannotTell: no such tag, nothing that pip can download, or no package in the folder.
    """
    paths = list(paths)
    if repo is None and Path(onto).is_dir():
        target = locate(upstream, Path(onto))
        told = version or target.version.split("+", 1)[0]
        return Release(onto, told, {path: target.read(path) for path in paths})
    version = onto.removeprefix("v")
    if repo is not None:
        revision = git.resolve(repo, f"v{version}", onto)
        return Release(onto, version, git.read_files(repo, revision, paths), revision)
    return Release(onto, version, _downloaded(upstream, version, paths))


def _downloaded(upstream: Upstream, version: str, paths: list[str]) -> dict[str, bytes | None]:
    said = ""
    with tempfile.TemporaryDirectory(prefix="eldr-patch-") as folder:
        for distribution in upstream.distributions:
            words = ["download", "--quiet", "--no-deps", "--only-binary=:all:", "-d", folder]
            command = [sys.executable, "-m", "pip", *words, f"{distribution}=={version}"]
            done = subprocess.run(command, capture_output=True, text=True, check=False)
            found = next(Path(folder).iterdir(), None)
            if done.returncode == 0 and found is not None:
                return _unpacked(found.read_bytes(), paths)
            said = done.stderr.strip().rpartition("\n")[2]
    names = " or ".join(f"{name}=={version}" for name in upstream.distributions)
    raise CannotTell(
        f"pip found no wheel for {names} ({said}); name a folder, or a clone by --repo"
    )


def _unpacked(raw: bytes, paths: list[str]) -> dict[str, bytes | None]:
    with zipfile.ZipFile(io.BytesIO(raw)) as wheel:
        names = set(wheel.namelist())
        return {path: wheel.read(path) if path in names else None for path in paths}
