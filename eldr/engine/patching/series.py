"""The patch series: `series` names the patches in order, `UPSTREAM.toml` pins what they touch."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from pathlib import Path

from eldr.engine.patching import mail, manifest
from eldr.engine.patching.errors import PatchError
from eldr.engine.patching.mail import Patch
from eldr.engine.patching.manifest import Upstream

ORDER = "series"


@dataclass(frozen=True, slots=True)
class Series:
    """Patches in application order, and the release they are for."""

    directory: Path
    upstream: Upstream
    patches: tuple[Patch, ...]

    @property
    def digest(self) -> str:
        """16 hex digits that name exactly these patches on exactly this release."""
        state = hashlib.sha256(f"{self.upstream.name}=={self.upstream.version}\n".encode())
        for patch in self.patches:
            state.update(f"{len(patch.raw)}\n".encode() + patch.raw)
        return state.hexdigest()[:16]

    @property
    def paths(self) -> tuple[str, ...]:
        """Every file that a patch touches, in path order."""
        return tuple(sorted({file.path for patch in self.patches for file in patch.files}))


def shipped_directory() -> Path:
    """The series that belongs to this eldr.

    `patches/` of the source tree when eldr runs from one (or is installed editable), else the copy
    that the wheel carries inside this package.

    Raises:
        PatchError: if neither exists, i.e. eldr was built without its patches.
    """
    package = Path(__file__).resolve().parent
    for directory in (package.parents[2] / "patches", package / "shipped"):
        if (directory / ORDER).is_file():
            return directory
    raise PatchError(f"this eldr carries no patch series (looked beside {package})")


def load(directory: Path | None = None, *, pinned: bool = True) -> Series:
    """Reads a series, by default the shipped one.

    Args:
        directory: where `series` and `UPSTREAM.toml` are.
        pinned: also require that the manifest pins exactly the touched files.

    Raises:
        PatchError: unreadable or malformed parts, a patch that is listed twice, not there, or
            there but not listed, or a manifest that pins other files than the patches touch.
    """
    directory = shipped_directory() if directory is None else directory
    names = _order(directory)
    unlisted = sorted({path.name for path in directory.glob("*.patch")} - set(names))
    if unlisted:
        raise PatchError(f"{directory}: not listed in `{ORDER}`: {', '.join(unlisted)}")
    patches = tuple(mail.parse(name, _read(directory / name)) for name in names)
    series = Series(directory, manifest.read(directory / manifest.FILE), patches)
    if pinned and set(series.paths) != series.upstream.files.keys():
        differ = sorted(set(series.paths) ^ series.upstream.files.keys())
        raise PatchError(
            f"{manifest.FILE} and the patches name different files: {', '.join(differ)}; "
            "run `eldr patch pin`"
        )
    return series


def _order(directory: Path) -> list[str]:
    lines = _read(directory / ORDER).decode("utf-8").splitlines()
    names = [name for line in lines if (name := line.split("#", 1)[0].strip())]
    if repeated := sorted({name for name in names if names.count(name) > 1}):
        raise PatchError(f"{directory / ORDER}: listed twice: {', '.join(repeated)}")
    return names


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise PatchError(f"{path}: cannot be read: {error.strerror}") from error
