"""`UPSTREAM.toml`: which vLLM the series is for, and each touched file's hash before and after."""

from __future__ import annotations

import re
import tomllib
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from eldr.engine.patching.errors import PatchError

FILE = "UPSTREAM.toml"
ABSENT = "absent"
_SHA256 = re.compile(r"[0-9a-f]{64}")


@dataclass(frozen=True, slots=True)
class Pin:
    """A touched file: sha256 (hex) before the series, or `absent`, and after it."""

    before: str
    after: str


@dataclass(frozen=True, slots=True)
class Upstream:
    """The release a series applies to.

    Attributes:
        name: the importable package, and its folder in the tree.
        version: public version, without a local suffix.
        tag: the release's git tag.
        commit: that tag's commit, when known.
        distributions: names under which installers know the package.
        files: pins by path, relative to the folder that holds the package.
    """

    name: str
    version: str
    tag: str
    distributions: tuple[str, ...]
    commit: str = ""
    files: dict[str, Pin] = field(default_factory=dict)

    def moved(self, version: str) -> Upstream:
        """The same upstream at another release, its files' hashes yet to be pinned."""
        return replace(self, version=version, tag=f"v{version}", commit="", files={})

    def matches(self, version: str) -> bool:
        """Whether an installed version is this release, whatever its local suffix (`+cpu`)."""
        return version.split("+", 1)[0] == self.version


def read(path: Path) -> Upstream:
    """Reads and checks a manifest.

    Raises:
        PatchError: not there, not TOML, unknown or missing keys, or a malformed hash.
    """
    try:
        data = tomllib.loads(path.read_text("utf-8"))
    except OSError as error:
        raise PatchError(f"{path}: cannot be read: {error.strerror}") from error
    except tomllib.TOMLDecodeError as error:
        raise PatchError(f"{path}: not TOML: {error}") from error
    required = {"name", "version", "tag", "distributions"}
    known = required | {"commit", "files"}
    if unknown := sorted(data.keys() - known):
        raise PatchError(f"{path}: unknown keys {unknown}; known are {sorted(known)}")
    if missing := sorted(required - data.keys()):
        raise PatchError(f"{path}: missing keys {missing}")
    files = {name: _pin(path, name, entry) for name, entry in data.get("files", {}).items()}
    return Upstream(
        data["name"],
        data["version"],
        data["tag"],
        tuple(data["distributions"]),
        data.get("commit", ""),
        files,
    )


def _pin(path: Path, name: str, entry: Any) -> Pin:
    if not isinstance(entry, dict) or entry.keys() != {"before", "after"}:
        raise PatchError(f'{path}: [files."{name}"] needs exactly `before` and `after`')
    before, after = entry["before"], entry["after"]
    if not _SHA256.fullmatch(after) or not (before == ABSENT or _SHA256.fullmatch(before)):
        raise PatchError(f'{path}: [files."{name}"]: not a sha256 in lower-case hex')
    return Pin(before, after)


def render(upstream: Upstream) -> str:
    """The manifest as text, files in path order; `read` gives the same value back."""
    names = ", ".join(f'"{name}"' for name in upstream.distributions)
    lines = [
        "# Which upstream the series is for. Hashes are written by `eldr patch pin`.",
        f'name = "{upstream.name}"',
        f'version = "{upstream.version}"',
        f'tag = "{upstream.tag}"',
    ]
    if upstream.commit:
        lines.append(f'commit = "{upstream.commit}"')
    lines.append(f"distributions = [{names}]")
    for path, pin in sorted(upstream.files.items()):
        lines += ["", f'[files."{path}"]', f'before = "{pin.before}"', f'after = "{pin.after}"']
    return "\n".join(lines) + "\n"
