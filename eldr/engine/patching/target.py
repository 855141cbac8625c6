"""The tree to patch: an installed wheel, or a checkout; found without importing what is in it."""

from __future__ import annotations

import base64
import hashlib
import importlib.util
from dataclasses import dataclass, field
from importlib import metadata
from pathlib import Path

from eldr.engine.patching.errors import CannotTell, UsageError
from eldr.engine.patching.manifest import ABSENT, Upstream


@dataclass(frozen=True, slots=True)
class Target:
    """A folder that holds the package.

    Attributes:
        root: the folder; paths of a series are relative to it.
        distribution: name of the installed distribution that owns the package, or empty.
        version: that distribution's version, or empty for a checkout.
        recorded: sha256 (hex) by path from the wheel's RECORD; empty for a checkout.
    """

    root: Path
    distribution: str = ""
    version: str = ""
    recorded: dict[str, str] = field(default_factory=dict)

    def read(self, path: str) -> bytes | None:
        """Content of a file, or None if it does not exist."""
        try:
            return (self.root / path).read_bytes()
        except FileNotFoundError:
            return None

    def __str__(self) -> str:
        what = f"{self.distribution} {self.version}" if self.distribution else "source tree"
        return f"{what} in {self.root}"


def digest(raw: bytes | None) -> str:
    """sha256 in hex, or `absent`: the form in which states are compared."""
    return ABSENT if raw is None else hashlib.sha256(raw).hexdigest()


def locate(upstream: Upstream, directory: Path | None = None) -> Target:
    """Finds the package in `directory`, or the one that this Python would import.

    A directory may be a site-packages folder, a virtual environment, a checkout or an unpacked
    source archive, or the package folder itself.

    Raises:
        UsageError: the directory does not exist.
        CannotTell: the package is not there.
    """
    if directory is None:
        return _describe(_imported(upstream), upstream)
    directory = directory.absolute()
    if not directory.is_dir():
        raise UsageError(f"--target {directory}: no such directory")
    sites = sorted(directory.glob("lib/python3*/site-packages"))
    for root in (directory, *sites, directory.parent):
        inside = root != directory.parent or directory.name == upstream.name
        if inside and (root / upstream.name / "__init__.py").is_file():
            return _describe(root, upstream)
    raise CannotTell(f"no `{upstream.name}` package in {directory}")


def _imported(upstream: Upstream) -> Path:
    spec = importlib.util.find_spec(upstream.name)
    if spec is None or spec.origin is None:
        raise CannotTell(
            f"{upstream.name} is not installed for this Python; install "
            f"{upstream.name} {upstream.version}, or name a tree with --target"
        )
    return Path(spec.origin).parent.parent


def _describe(root: Path, upstream: Upstream) -> Target:
    """Adds what the installed distribution knows about itself, if there is one in `root`.

    Two distributions may claim the package (a stub of metadata beside the real one); the one whose
    RECORD lists the package's `__init__.py` owns it.
    """
    marker, fallback = f"{upstream.name}/__init__.py", Target(root)
    for dist in metadata.distributions(path=[str(root)]):
        if (dist.metadata["Name"] or "").lower() not in upstream.distributions:
            continue
        recorded = _recorded(dist, upstream.name)
        found = Target(root, dist.metadata["Name"], dist.version, recorded)
        if marker in recorded:
            return found
        fallback = found
    return fallback


def _recorded(dist: metadata.Distribution, package: str) -> dict[str, str]:
    """The package's hashes from RECORD, as hex."""
    hashes = {}
    for file in dist.files or ():
        if file.hash is not None and file.hash.mode == "sha256" and file.parts[0] == package:
            padded = file.hash.value + "=" * (-len(file.hash.value) % 4)
            hashes[file.as_posix()] = base64.urlsafe_b64decode(padded).hex()
    return hashes
